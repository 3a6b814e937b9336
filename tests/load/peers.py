#!/usr/bin/env python3
"""Times cuDNN and (decode) FlashAttention-2, through PyTorch's SDPA, on the cases of a result of `attn-bench
kernels --backend cuda --json FILE`, and prints both beside each other.

    peers.py FILE [--json OUT]

Peers get dense, contiguous caches: no paging.  CUDA graphs of at least 8 calls, 300 MB of caches or
more that take turns, medians of 11 replays.  FlashAttention-3 is not in PyTorch: FA3 is its time or
rate over cuDNN's as measured on one H200 (its own package, pages of 64 tokens for decode), times
cuDNN's of this run.  Cases without such a peer (ragged, appended, with a cached prefix, several
query tokens a step) are left out."""
import argparse
import json
import math
import statistics
import sys

CAUSAL, FULL = "prefill", "full"

# (batch, kv_len, q_heads, kv_heads): FA3's time over cuDNN's, decode, head_dim 128
FA3_DECODE = {
    (1, 8192, 32, 8): 19.4 / 15.8, (1, 131072, 32, 8): 147 / 128, (8, 4096, 32, 8): 43.9 / 37.5,
    (32, 4096, 32, 8): 138 / 125, (64, 8192, 32, 8): 593 / 483, (128, 1024, 32, 8): 161 / 127,
    (128, 8192, 32, 8): 1258 / 964, (1, 8192, 64, 8): 23.2 / 16.2, (128, 8192, 64, 8): 1202 / 967,
    (128, 8192, 32, 32): 4842 / 3772,
}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# (kind, q_heads, head_dim): FA3's TFLOP/s over cuDNN's for each of LENGTHS; None = not measured
FA3_PREFILL = {
    (CAUSAL, 16, 128): (341 / 348, 498 / 439, 605 / 514, 654 / 574, 633 / 527, 646 / 555),
    (FULL, 16, 128): (539 / 537, 611 / 611, 628 / 638, 641 / 618, 643 / 600, 667 / 604),
    (CAUSAL, 32, 128): (397 / 375, 517 / 474, 573 / 547, 609 / 521, 630 / 549, 646 / 562),
}


def time_calls(torch, calls, reps):
    """calls: one thunk a cache.  Returns the median microseconds of a call."""
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
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(reps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return statistics.median(times)


def time_peer(torch, backend, shape, reps=11):
    """shape: (kind, dtype, batch, q_len, kv_len, q_heads, kv_heads, head_dim).  None: it does not take it."""
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kind, dtype, batch, q_len, kv_len, q_heads, kv_heads, dim = shape
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    num = max(1, min(8, 300_000_000 // (4 * batch * kv_len * kv_heads * dim) + 1)) if kind == "decode" else 2

    def new(length, heads):
        return torch.randn(batch, length, heads, dim, device="cuda", dtype=dtype).transpose(1, 2)

    try:
        sets = [(new(q_len, q_heads), new(kv_len, kv_heads), new(kv_len, kv_heads)) for _ in range(num)]
        wanted = SDPBackend.CUDNN_ATTENTION if backend == "cuDNN" else SDPBackend.FLASH_ATTENTION
        with sdpa_kernel(wanted):
            calls = [lambda c=c: F.scaled_dot_product_attention(*c, is_causal=kind == CAUSAL,
                                                                enable_gqa=q_heads != kv_heads) for c in sets]
            return time_calls(torch, calls, reps)
    except RuntimeError as error:
        print(f"# {backend} {shape}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    finally:
        sets = calls = None
        torch.cuda.empty_cache()


def shape_of(case):
    """What peers are asked for, None when they have no such call."""
    kind = case["case"].split()[0]
    is_decode = kind == "decode" and case["q_len"] == 1
    is_prefill = kind in (CAUSAL, FULL) and case["q_len"] == case.get("kv_len") and case["q_len"] * case["batch"] >= 16384
    if case["new_len"] > 0 or not (is_decode or is_prefill):
        return None
    return (kind, case["kv_dtype"], case["batch"], case["q_len"], case["kv_len"], case["q_heads"], case["kv_heads"],
            case["head_dim"])


def fa3_over_cudnn(shape):
    """FA3's time over cuDNN's, None when it was not measured."""
    kind, dtype, batch, q_len, kv_len, q_heads, kv_heads, dim = shape
    if kind == "decode":
        return FA3_DECODE.get((batch, kv_len, q_heads, kv_heads)) if (dtype, dim) == ("bf16", 128) else None
    rates = FA3_PREFILL.get((kind, q_heads, dim))
    return 1 / rates[LENGTHS.index(kv_len)] if rates and kv_len in LENGTHS else None


def line(case, shape, times):
    """The texts of a case, and what is asked of it: a list of (name, measured, bound, at most?)."""
    us = case["us"]
    text = f"{case['case']:<62} {us:9.2f} us"
    asked = []
    if shape[0] == "decode":
        text += f" {100 * case['ceiling_share']:5.1f}% of read"
    else:
        text += f" {case['gflops'] / 1e3:6.1f} TFLOP/s"
    for backend, peer in times.items():
        text += f" | {backend} {peer:9.2f} us, ratio {us / peer:.3f}" if peer else f" | no {backend}"
    cudnn, fa3 = times.get("cuDNN"), fa3_over_cudnn(shape)
    if cudnn and fa3:
        text += f" | FA3 {fa3 * cudnn:9.2f} us, ratio {us / (fa3 * cudnn):.3f}"
    if cudnn and shape[0] == "decode" and fa3 and case["block_tokens"] == 64:
        asked.append(("cuDNN", us / cudnn, 0.95 if shape[2] == 1 and shape[4] == 8192 else 1.03))
        asked.append(("FA3", us / (fa3 * cudnn), 1 / 1.05))
    elif cudnn and fa3 and shape[0] != "decode":
        asked.append(("FA3", us / (fa3 * cudnn), 1 / 0.95))
    elif cudnn and shape[0] == CAUSAL and shape[7] == 64:
        asked.append(("cuDNN", us / cudnn, 1.0))
    return text, asked


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", help="result of attn-bench kernels --json")
    parser.add_argument("--json", help="write what was measured there")
    args = parser.parse_args()
    with open(args.bench, encoding="utf-8") as file:
        bench = json.load(file)
    try:
        import torch
    except ImportError:
        sys.exit("peers are left out: no PyTorch")
    print(f"attnd: {bench['device']}; peers: torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    measured, results, ratios, missed, num_asked = {}, [], {}, [], 0
    for case in bench["cases"]:
        shape = shape_of(case)
        if shape is None:
            continue
        if shape not in measured:
            backends = ("cuDNN", "FA2") if shape[0] == "decode" else ("cuDNN",)
            measured[shape] = {b: time_peer(torch, b, shape) for b in backends}
        text, asked = line(case, shape, measured[shape])
        print(text, flush=True)
        results.append({"case": case["case"], "us": case["us"], "peers_us": measured[shape],
                        "fa3_over_cudnn": fa3_over_cudnn(shape)})
        for name, ratio, bound in asked:
            num_asked += 1
            if ratio > bound:
                missed.append(f"{case['case']}: {ratio:.3f} of {name}, asked at most {bound:.3f}")
            group = (shape[0] == "decode", case["case"].find(" block ") >= 0, name)
            ratios.setdefault(group, []).append(ratio)
    for (is_decode, is_block, name), values in ratios.items():
        what = "decode" if is_decode else f"prefill, {'contiguous' if is_block else 'paged'}"
        print(f"{what}: geometric mean of {len(values)} ratios to {name}: {statistics.geometric_mean(values):.3f}")
    for text in missed:
        print(f"NOT MET: {text}")
    print(f"{num_asked - len(missed)} of {num_asked} met")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"what": "peers.py", "bench": args.bench, "torch": torch.__version__,
                       "cudnn": torch.backends.cudnn.version(), "cases": results}, file, indent=1)


if __name__ == "__main__":
    main()
