#!/usr/bin/env python3
"""What PyTorch's SDPA reaches on the shapes of bench_cuda: cuDNN and FlashAttention-2 over a dense,
contiguous cache, in CUDA graphs, caches rotated so that none is read from L2.

    peers.py [--grid decode|short|prefill] >peers.txt

One line a case: the fields of bench_cuda, then microseconds a call, median of the repetitions."""
import argparse
import math
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
CELLS = [(1, 8192), (1, 131072), (8, 4096), (32, 4096), (64, 8192), (128, 1024), (128, 8192)]
DECODE = [(b, n, 32, 8) for b, n in CELLS] + [(1, 8192, 64, 8), (128, 8192, 64, 8), (128, 8192, 32, 32)]
SHORT = [(b, n, 32, 8) for b in (1, 256) for n in (1, 16, 128, 256, 1024)]


def bench(calls, reps):
    """calls: one thunk a cache.  Returns the sorted microseconds of a call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls * 2:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = math.ceil(8 / len(calls))
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(reps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return sorted(times)


def case(backend, batch, length, q_heads, kv_heads, reps, dim=128):
    size = 4 * batch * length * kv_heads * dim
    caches = []
    for _ in range(max(1, min(8, 300_000_000 // size + 1))):
        q = torch.randn(batch, q_heads, 1, dim, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(batch, length, kv_heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        v = torch.randn(batch, length, kv_heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        caches.append((q, k, v))
    with sdpa_kernel(BACKENDS[backend]):
        calls = [lambda c=c: F.scaled_dot_product_attention(*c, enable_gqa=q_heads != kv_heads) for c in caches]
        times = bench(calls, reps)
    print(f"{backend:8s} B{batch} L{length} {q_heads}/{kv_heads} hd{dim} | {statistics.median(times):.2f} us "
          f"{times[0]:.2f}..{times[-1]:.2f}", flush=True)


def prefill(backend, name, length, q_heads, kv_heads, reps, dim=128, total=16384):
    batch, is_causal = total // length, name == "causal"
    sets = []
    for _ in range(2):
        shape = lambda heads: (batch, length, heads, dim)
        new = lambda heads: torch.randn(shape(heads), device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        sets.append((new(q_heads), new(kv_heads), new(kv_heads)))
    with sdpa_kernel(BACKENDS[backend]):
        calls = [lambda c=c: F.scaled_dot_product_attention(*c, is_causal=is_causal, enable_gqa=q_heads != kv_heads)
                 for c in sets]
        times = bench(calls, reps)
    flops = 4 * batch * length * length * q_heads * dim / (2 if is_causal else 1)
    us = statistics.median(times)
    print(f"{backend:8s} {name} B{batch} L{length} {q_heads}/{kv_heads} hd{dim} | {us:.2f} us "
          f"{times[0]:.2f}..{times[-1]:.2f} | {flops / us / 1e6:.1f} TFLOP/s", flush=True)


def prefills(backend, reps):
    for n in (512, 1024, 2048, 4096, 8192, 16384):
        for name, q_heads, kv_heads, dim in (("causal", 32, 8, 128), ("causal", 16, 16, 128),
                                             ("full", 16, 16, 128), ("causal", 32, 8, 64)):
            prefill(backend, name, n, q_heads, kv_heads, reps, dim)
            torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--grid", choices=("decode", "short", "prefill"), default="decode")
    parser.add_argument("--backends", default="cudnn,fa2")
    parser.add_argument("--reps", type=int, default=15)
    args = parser.parse_args()
    print(f"# torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {torch.cuda.get_device_name()}")
    for backend in args.backends.split(","):
        if args.grid == "prefill":
            prefills(backend, args.reps)
            continue
        for shape in DECODE if args.grid == "decode" else SHORT:
            try:
                case(backend, *shape, args.reps)
            except RuntimeError as error:
                print(f"# {backend} {shape}: {str(error).splitlines()[0]}")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
