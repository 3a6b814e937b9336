#!/usr/bin/env python3
"""Times a whole model step: llama-3-8b's geometry, random weights, bf16, a CUDA graph of a token.

    bench_model.py BUILD [CELL ...]       CELL: BATCHxKV_LEN, 1x1024 say

Three modes, one after the other, each in a process of its own, cell by cell with a cache that it
frees before the next:
    sdpa        PyTorch's SDPA by cuDNN, over a static cache that is exactly kv_len long, without a
                mask; RoPE and the append are one Triton kernel
    in-process  attention in process over a daemon's arena (attnd.torch), RoPE and the append inside;
                sequences grow by a token each step, around kv_len
    service     the same by the daemon, under MPS, with q, k, v and the output in its region
All have the same projections, MLP and argmax, whose token is the next input.  BUILD is where attnd
was built; ATTND_LIBRARY and ATTND_ENGINES name its libraries, ATTND_MPS the pipe directory of an
MPS control daemon (without it service is left out).  A line a cell, ratios last.
"""
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
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

LAYERS, HIDDEN, Q_HEADS, KV_HEADS, DIM, FFN, VOCAB = 32, 4096, 32, 8, 128, 14336, 128256
THETA = 500000.0
WARM, TOKENS, REPS = 5, 20, 5
MODES = ["sdpa", "in-process", "service"]
ASKED = {  # at most so many times SDPA, by batch
    "in-process": lambda batch: 1.03 if batch == 1 else 1.00 if batch >= 32 else None,
    "service": lambda batch: 1.15 if batch == 1 else 1.03 if batch >= 64 else None,
}
CELLS = ["1x1024", "8x1024", "32x1024", "64x1024", "128x1024",
         "1x8192", "8x8192", "32x8192", "64x8192"]
INV_FREQ = [THETA ** (-2 * i / DIM) for i in range(DIM // 2)]
QKV = (Q_HEADS + 2 * KV_HEADS) * DIM


@triton.jit
def rope_append(qkv, cos, sin, q, k, v, at, length, HQ: tl.constexpr, HKV: tl.constexpr,
                D: tl.constexpr):
    """One head of one token: q and k rotated (halves), k and v to slot `at` of the cache
    [batch, HKV, length, D]."""
    b, h = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, D // 2)
    row = qkv + (b * (HQ + 2 * HKV) + h) * D
    x, y = tl.load(row + i).to(tl.float32), tl.load(row + D // 2 + i).to(tl.float32)
    c, s = tl.load(cos + i), tl.load(sin + i)
    if h < HQ:
        to = q + (b * HQ + h) * D
    elif h < HQ + HKV:
        to = k + ((b * HKV + h - HQ) * length + at).to(tl.int64) * D
    else:
        to = v + ((b * HKV + h - HQ - HKV) * length + at).to(tl.int64) * D
    if h < HQ + HKV:
        tl.store(to + i, (x * c - y * s).to(tl.bfloat16))
        tl.store(to + D // 2 + i, (y * c + x * s).to(tl.bfloat16))
    else:
        tl.store(to + i, x.to(tl.bfloat16))
        tl.store(to + D // 2 + i, y.to(tl.bfloat16))


def weight(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)


class Llama:
    def __init__(self):
        self.embedding, self.head = weight(VOCAB, HIDDEN), weight(VOCAB, HIDDEN)
        self.norm = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")
        self.layers = [(weight(QKV, HIDDEN), weight(HIDDEN, Q_HEADS * DIM),
                        weight(2 * FFN, HIDDEN), weight(HIDDEN, FFN)) for _ in range(LAYERS)]

    def forward(self, token, attend):
        """token [batch] is read, and written with the next one.  attend(layer, x, weight) projects x
        to q, k and v and attends."""
        x = F.embedding(token, self.embedding)
        for i, (qkv, o, gate_up, down) in enumerate(self.layers):
            h = F.rms_norm(x, (HIDDEN,), self.norm)
            x = x + F.linear(attend(i, h, qkv), o)
            gate, up = F.linear(F.rms_norm(x, (HIDDEN,), self.norm), gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, down)
        logits = F.linear(F.rms_norm(x, (HIDDEN,), self.norm), self.head)
        token.copy_(logits.argmax(-1))


def median_ms(step):
    """median_ms is the median of REPS runs of TOKENS calls of step; step.before() comes before
    each, and WARM calls, untimed."""
    times = []
    for _ in range(REPS):
        step.before()
        for _ in range(WARM):
            step()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(TOKENS):
            step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / TOKENS)
    spread = (max(times) - min(times)) / statistics.median(times)
    return statistics.median(times), spread


class Sdpa:
    def __init__(self, model, batch, kv_len):
        shape = (LAYERS, batch, KV_HEADS, kv_len, DIM)
        self.k = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        self.v = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        self.token = torch.zeros(batch, dtype=torch.int64, device="cuda")
        angle = torch.tensor(INV_FREQ, device="cuda") * (kv_len - 1)
        cos, sin = angle.cos(), angle.sin()
        q = torch.empty((batch, Q_HEADS, 1, DIM), dtype=torch.bfloat16, device="cuda")
        self.kept = cos, sin, q  # the graph reads and writes them

        def attend(layer, x, weight):
            qkv, k, v = F.linear(x, weight), self.k[layer], self.v[layer]
            rope_append[(batch, Q_HEADS + 2 * KV_HEADS)](qkv, cos, sin, q, k, v, kv_len - 1, kv_len,
                                                         Q_HEADS, KV_HEADS, DIM, num_warps=1)
            out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            return out.view(batch, Q_HEADS * DIM)

        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            model.forward(self.token, attend)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                model.forward(self.token, attend)

    def before(self):
        pass

    def __call__(self):
        self.graph.replay()

    def end(self):
        pass


class Attnd:
    def __init__(self, model, client, batch, kv_len):
        self.client, self.kv_len = client, kv_len
        self.in_region = client.mode == "service"
        self.model = client.open_model("llama-3-8b", layers=LAYERS, q_heads=Q_HEADS,
                                       kv_heads=KV_HEADS, head_dim=DIM, dtype="bf16",
                                       layer=attnd.Layer(rope=attnd.Rope(INV_FREQ)))
        self.seqs = [self.model.sequence() for _ in range(batch)]
        self.start = kv_len - WARM - TOKENS // 2
        self.fill(kv_len)
        self.token = torch.zeros(batch, dtype=torch.int64, device="cuda")
        qkv, out = self.empty(batch, QKV), self.empty(batch, Q_HEADS, DIM)
        q, k, v = qkv.view(batch, -1, DIM).split([Q_HEADS, KV_HEADS, KV_HEADS], dim=1)
        self.step = client.step(self.seqs, deadline=10)

        def forward(step):
            def attend(layer, x, weight):
                torch.mm(x, weight.t(), out=qkv)
                return attnd.torch.attend(step, layer, q, k, v, out=out).view(batch, Q_HEADS * DIM)
            model.forward(self.token, attend)

        self.graph = attnd.torch.Graph(self.step, forward)
        self.step.cancel()
        self.step = None
        self.host = []

    def empty(self, *shape):
        return (attnd.torch.empty(self.client, shape, torch.bfloat16) if self.in_region
                else torch.empty(shape, dtype=torch.bfloat16, device="cuda"))

    def fill(self, length):
        """fill gives each sequence random keys and values."""
        heads = (Q_HEADS, KV_HEADS, KV_HEADS)
        q, k, v = (self.empty(length, h, DIM).normal_() for h in heads)
        out = self.empty(length, Q_HEADS, DIM)
        for seq in self.seqs:
            step = self.client.step([seq.append(length)], deadline=10)
            for layer in range(LAYERS):
                attnd.torch.attend(step, layer, q, k, v, out=out)
            step.commit()
        torch.cuda.synchronize()

    def before(self):
        if self.step:
            self.step.cancel()
        for seq in self.seqs:
            seq.truncate(self.start)
        self.step = self.client.step(self.seqs, deadline=10)

    def __call__(self):
        begin = time.perf_counter()
        self.graph.replay(self.step)
        self.step = self.client.step(self.seqs, deadline=10, commit=self.step)
        self.host.append(time.perf_counter() - begin)

    def end(self):
        self.step.cancel()
        for seq in self.seqs:
            seq.free()
        self.model.close()
        print(f"attnd host: {statistics.median(self.host) * 1e6:.0f} us a token", flush=True)


class Daemon:
    def __init__(self, build, gib, mode):
        self.build = build
        self.dir = tempfile.TemporaryDirectory()
        self.url = url = f"ipc://{self.dir.name}/s"
        self.process = subprocess.Popen(
            [f"{build}/attnd", "--no-keeper", "--listen", url, "--device", "cuda:0",
             "--set", f"cache.memory={gib}GiB", "--set", f"server.in_process_uids={os.getuid()}"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        if b"ready" not in self.process.stdout.readline():
            sys.exit("attnd does not start")
        self.client = attnd.connect(url, engine="cuda", mode=mode)

    def tell(self):
        status = subprocess.run([f"{self.build}/attnctl", "-s", self.url, "--json", "status"],
                                capture_output=True, check=True).stdout
        did = json.loads(status)["service"]
        return (f"service: {did['layers']} layers, {did['ahead']} begun by the submit thread, of "
                f"these {did['gated']} behind a gate; {did['gates_missed']} gates in vain")

    def end(self):
        self.client.close()
        self.process.terminate()
        self.process.wait()


def run(build, mode, shapes):
    """run times the cells of one mode, and returns microseconds a token of each."""
    torch.manual_seed(1)
    daemon, times = None, []
    with torch.inference_mode():
        model = Llama()
        print(mode, torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
        if mode != "sdpa":
            need = max(b * (l + 64) for b, l in shapes) * LAYERS * KV_HEADS * DIM * 4
            daemon = Daemon(build, need // 2**30 + 2, mode)
        for batch, kv_len in shapes:
            step = (Sdpa(model, batch, kv_len) if mode == "sdpa"
                    else Attnd(model, daemon.client, batch, kv_len))
            ms, spread = median_ms(step)
            times.append(ms * 1000)
            print(f"{mode} batch {batch} kv_len {kv_len} | {ms * 1000:.1f} us a token | "
                  f"spread {spread * 100:.1f}%", flush=True)
            step.end()
            del step
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        if mode == "service":
            print(daemon.tell(), flush=True)
        if daemon:
            daemon.end()
    return times


def report(shapes, times):
    for i, (batch, kv_len) in enumerate(shapes):
        for mode in times:
            if mode != "sdpa":
                ratio, asked = times[mode][i] / times["sdpa"][i], ASKED[mode](batch)
                verdict = ("" if asked is None else
                           f" asked {asked:.2f}: {'met' if ratio <= asked else 'NOT met'}")
                print(f"model batch {batch} kv_len {kv_len} | attnd {mode} / SDPA {ratio:.3f}{verdict}")
        if "service" in times:
            more = (times["service"][i] - times["in-process"][i]) / LAYERS
            print(f"model batch {batch} kv_len {kv_len} | handing over {more:.1f} us a layer more "
                  f"than in process; asked 20: {'met' if more <= 20 else 'NOT met'}")


def main():
    build, cells = sys.argv[1], sys.argv[2:] or CELLS
    times = {}
    with tempfile.TemporaryDirectory() as folder:
        for mode in MODES:
            env = dict(os.environ)
            if mode == "service" and not env.get("ATTND_MPS"):
                print("service: left out, there is no MPS")
                continue
            if mode == "service":
                env["CUDA_MPS_PIPE_DIRECTORY"] = env["ATTND_MPS"]
            subprocess.run([sys.executable, __file__, "--mode", mode, f"{folder}/times", build, *cells],
                           env=env, check=True)
            with open(f"{folder}/times") as file:
                times[mode] = json.load(file)
    report([tuple(int(n) for n in cell.split("x")) for cell in cells], times)


if __name__ == "__main__" and sys.argv[1] == "--mode":
    _, _, MODE, FILE, BUILD, *CHOSEN = sys.argv
    TIMES = run(BUILD, MODE, [tuple(int(n) for n in cell.split("x")) for cell in CHOSEN])
    with open(FILE, "w") as f:
        json.dump(TIMES, f)
elif __name__ == "__main__":
    main()
