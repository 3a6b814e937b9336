#!/usr/bin/env python3
"""Times prefill through the daemon beside the kernel by itself: one prompt, llama-3-8b's attention (32 layers, 32/8
heads, head_dim 128, bf16), queries, keys and values as slices of what a fused projection writes, RoPE and append inside.

    bench_prefill.py BUILD [TOKENS ...]

    kernel      attn-bench: a CUDA graph of the same launch, nothing of the daemon
    in-process  attention in process over a daemon's arena, a graph of all layers
    service     the same by the daemon, under MPS, with tensors in its region
In the last two a prompt is timed by the clock, from before its layers are handed over until the last one has ended, its
step being open; committing it is timed too.  BUILD, ATTND_LIBRARY, ATTND_ENGINES and ATTND_MPS are as in bench_model.py.
A line a cell: microseconds a layer, medians of 11."""
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import attnd
import attnd.torch
import torch

from bench_model import DIM, INV_FREQ, KV_HEADS, LAYERS, MODES, Q_HEADS, Daemon

CELLS, REPS, WARM = [128, 512, 2048, 8192], 11, 2


def kernel_us(build, tokens):
    """Microseconds of the kernel alone."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([f"{build}/attn-bench", "kernels", "--backend", "cuda", "--json", f"{folder}/out", "--case",
                        f"prefill bf16 {Q_HEADS}/{KV_HEADS} q_len {tokens} new {tokens} fused 1"],
                       stdout=subprocess.DEVNULL, check=True)
        with open(f"{folder}/out", encoding="utf-8") as file:
            return json.load(file)["cases"][0]["us"]


def time_prompt(client, tokens):
    """(attention, commit): milliseconds of a prompt, medians."""
    def empty(*shape):
        return (attnd.torch.empty(client, shape, torch.bfloat16) if client.mode == "service"
                else torch.empty(shape, dtype=torch.bfloat16, device="cuda"))

    model = client.open_model("llama-3-8b", layers=LAYERS, q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=DIM,
                              dtype="bf16", layer=attnd.Layer(rope=attnd.Rope(INV_FREQ)))
    seq = model.sequence()
    qkv, out = empty(tokens, Q_HEADS + 2 * KV_HEADS, DIM), empty(tokens, Q_HEADS, DIM)
    q, k, v = qkv.normal_().split([Q_HEADS, KV_HEADS, KV_HEADS], dim=1)

    def forward(step):
        for layer in range(LAYERS):
            attnd.torch.attend(step, layer, q, k, v, out=out)

    step = client.step([seq.append(tokens)], deadline=10)
    graph = attnd.torch.Graph(step, forward)
    step.cancel()
    times = []
    for _ in range(WARM + REPS):
        step = client.step([seq.append(tokens)], deadline=10)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph.replay(step)
        torch.cuda.synchronize()
        middle = time.perf_counter()
        step.commit()
        times.append((middle - begin, time.perf_counter() - middle))
        seq.truncate(0)
    seq.free()
    model.close()
    return [statistics.median(x) * 1e3 for x in zip(*times[WARM:])]


def run(build, mode, cells):
    daemon = Daemon(build, max(cells) * LAYERS * KV_HEADS * DIM * 4 // 2**30 + 2, mode)
    times = [time_prompt(daemon.client, tokens) for tokens in cells]
    daemon.end()
    return times


def main():
    build, cells = sys.argv[1], [int(cell) for cell in sys.argv[2:]] or CELLS
    kernel, times = [kernel_us(build, tokens) for tokens in cells], {}
    with tempfile.TemporaryDirectory() as folder:
        for mode in MODES[1:]:
            env = dict(os.environ)
            if mode == "service" and not env.get("ATTND_MPS"):
                print("service: left out, there is no MPS")
                continue
            if mode == "service":
                env["CUDA_MPS_PIPE_DIRECTORY"] = env["ATTND_MPS"]
            subprocess.run([sys.executable, __file__, "--mode", mode, f"{folder}/times", build, *map(str, cells)],
                           env=env, check=True)
            with open(f"{folder}/times", encoding="utf-8") as file:
                times[mode] = json.load(file)
    for i, tokens in enumerate(cells):
        line = f"prefill {tokens} tokens | kernel {kernel[i]:.1f} us a layer"
        for mode, of_mode in times.items():
            attention, commit = of_mode[i]
            us = attention * 1e3 / LAYERS
            line += f" | {mode} {us:.1f} ({us - kernel[i]:+.1f}, {us / kernel[i]:.3f} times), commit {commit * 1e3:.0f} us"
        print(line)


if __name__ == "__main__" and sys.argv[1] == "--mode":
    _, _, MODE, FILE, BUILD, *CHOSEN = sys.argv
    with open(FILE, "w", encoding="utf-8") as output:
        json.dump(run(BUILD, MODE, [int(tokens) for tokens in CHOSEN]), output)
elif __name__ == "__main__":
    main()
