#!/usr/bin/env python3
"""The peers of attnd's kernels on a GPU: cuDNN, and FlashAttention-2 where cuDNN does not take a shape, both through
PyTorch's SDPA.

    attn-bench kernels --backend cuda --peer 'python3 tests/load/peers.py --serve' --json FILE
    peers.py FILE         prints each case beside its peer, and what is asked of it

--serve is the other end of tests/load/bench_cuda_peer.h: attn-bench times a case, this program the same case, and so
on in turns, so that both see the same clocks.  Peers get dense, contiguous caches: no paging; numbers are drawn from
the same distribution as attn-bench's (uniform, variance 1).  CUDA graphs of at least 8 calls, 300 MB of caches or more
that take turns.  FlashAttention-3 is not in PyTorch: FA3 is its time or rate over cuDNN's as measured on one H200 (its
own package, pages of 64 tokens for decode), times cuDNN's of the run.  Cases without such a peer (ragged, appended,
with a cached prefix, several query tokens a step) have none."""
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


# ---- the server


def parse(text):
    """A case's shape: (kind, dtype, batch, q_len, kv_len, q_heads, kv_heads, head_dim), None when it has no peer."""
    kind, dtype, heads, *keys = text.split()
    at = {"batch": 1, "q_len": 1, "new": 0, "head_dim": 128} | dict(zip(keys[::2], map(int, keys[1::2])))
    at.setdefault("kv_len", at["q_len"])
    is_decode = kind == "decode" and at["q_len"] == 1
    is_prefill = kind in (CAUSAL, FULL) and at["q_len"] == at["kv_len"] and at["q_len"] * at["batch"] >= 16384
    if at["new"] > 0 or dtype not in ("bf16", "f16") or not (is_decode or is_prefill):
        return None
    q_heads, kv_heads = map(int, heads.split("/"))
    return kind, dtype, at["batch"], at["q_len"], at["kv_len"], q_heads, kv_heads, at["head_dim"]


class Pace:
    """Clock of the SMs and power of the GPU, 0 where NVML is not there."""

    def __init__(self, torch):
        try:
            import pynvml
            pynvml.nvmlInit()
            properties = torch.cuda.get_device_properties(0)
            bus = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
            self.nvml, self.device = pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(bus)
        except Exception as error:  # pylint: disable=broad-except
            print(f"# no clocks: {error}", file=sys.stderr)
            self.nvml = None

    def read(self):
        if self.nvml is None:
            return 0, 0
        return (self.nvml.nvmlDeviceGetClockInfo(self.device, self.nvml.NVML_CLOCK_SM),
                self.nvml.nvmlDeviceGetPowerUsage(self.device) / 1000)


class Peer:
    """A case's data and the graph of its calls."""

    def __init__(self, torch, wanted, shape):
        import torch.nn.functional as F
        from torch.nn.attention import sdpa_kernel

        kind, dtype, batch, q_len, kv_len, q_heads, kv_heads, dim = shape
        dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
        num = max(1, min(8, 300_000_000 // (4 * batch * kv_len * kv_heads * dim) + 1)) if kind == "decode" else 2

        def new(length, heads):
            x = torch.empty(batch, length, heads, dim, device="cuda", dtype=dtype)
            return x.uniform_(-math.sqrt(3), math.sqrt(3)).transpose(1, 2)

        self.sets = [(new(q_len, q_heads), new(kv_len, kv_heads), new(kv_len, kv_heads)) for _ in range(num)]
        with sdpa_kernel(wanted):
            self.capture(torch, [lambda c=c: F.scaled_dot_product_attention(*c, is_causal=kind == CAUSAL,
                                                                            enable_gqa=q_heads != kv_heads)
                                 for c in self.sets])
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def capture(self, torch, calls):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls * 2:
                call()
        torch.cuda.synchronize()
        self.graph, rounds = torch.cuda.CUDAGraph(), math.ceil(8 / len(calls))
        self.calls = rounds * len(calls)
        with torch.cuda.graph(self.graph, stream=stream):
            for _ in range(rounds):
                for call in calls:
                    call()
        for _ in range(2):
            self.graph.replay()
        torch.cuda.synchronize()

    def time(self, pace):
        """Microseconds of a call, clock and power while it ran."""
        self.begin.record()
        self.graph.replay()
        self.end.record()
        mhz, watts = pace.read()
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) * 1e3 / self.calls, mhz, watts


def make(torch, shape):
    """(name, Peer) of a shape; (None, None) when nobody takes it."""
    from torch.nn.attention import SDPBackend

    backends = {f"cuDNN {torch.backends.cudnn.version()}, torch {torch.__version__}": SDPBackend.CUDNN_ATTENTION,
                f"FA2 of torch {torch.__version__}": SDPBackend.FLASH_ATTENTION}
    for name, wanted in backends.items():
        try:
            return name, Peer(torch, wanted, shape)
        except RuntimeError as error:
            print(f"# {name} {shape}: {str(error).splitlines()[0]}", file=sys.stderr)
    return None, None


def serve():
    import torch

    pace, peers = Pace(torch), {}  # shape: (name, Peer)
    for request in sys.stdin:
        what, _, case = request.strip().partition(" ")
        if what == "drop":
            peers.clear()
            torch.cuda.empty_cache()
            continue
        shape = parse(case)
        if what == "make" and shape is not None and shape not in peers:
            peers[shape] = make(torch, shape)
        name, peer = peers.get(shape, (None, None))
        print(name or "-" if what == "make" else "%.4f %.0f %.1f" % peer.time(pace), flush=True)


# ---- the report


def fa3_over_cudnn(shape):
    """FA3's time over cuDNN's, None when it was not measured."""
    kind, dtype, batch, _, kv_len, q_heads, kv_heads, dim = shape
    if kind == "decode":
        return FA3_DECODE.get((batch, kv_len, q_heads, kv_heads)) if (dtype, dim) == ("bf16", 128) else None
    rates = FA3_PREFILL.get((kind, q_heads, dim))
    return 1 / rates[LENGTHS.index(kv_len)] if rates and kv_len in LENGTHS else None


def pace_text(pace):
    return f" at {pace['mhz']:.0f} MHz {pace['watts']:.0f} W" if pace else ""


def line(case, shape):
    """The text of a case, and what is asked of it: a list of (name, measured, bound at most)."""
    us, spread = case["us"], case["peer_us"]
    peer, name = spread["median"], case["peer"].split(",")[0].split()[0]
    text = f"{case['case']:<58} {us:9.2f} us +-{100 * case['spread']:3.1f}%"
    if shape[0] == "decode":
        text += f" {100 * case['ceiling_share']:5.1f}% of read"
    else:
        text += f" {case['gflops'] / 1e3:6.1f} TFLOP/s"
    text += pace_text(case.get("pace"))
    text += f" | {name} {peer:9.2f} us +-{100 * spread['spread']:3.1f}%{pace_text(case.get('peer_pace'))}"
    text += f" | ratio {us / peer:.3f}"
    fa3, asked = fa3_over_cudnn(shape), []
    if name != "cuDNN":
        return text, asked
    if fa3:
        text += f" | to FA3 {us / (fa3 * peer):.3f}"
    if shape[0] == "decode" and fa3 and case["block_tokens"] == 64:
        asked.append(("cuDNN", us / peer, 0.95 if shape[2] == 1 and shape[4] == 8192 else 1.03))
        asked.append(("FA3", us / (fa3 * peer), 1 / 1.05))
    elif shape[0] != "decode" and fa3:
        asked.append(("FA3", us / (fa3 * peer), 1 / 0.95))
    elif shape[0] == CAUSAL and shape[7] == 64:
        asked.append(("cuDNN", us / peer, 1.0))
    return text, asked


def row_of(case, shape):
    """What a case's ratios are put together with."""
    if shape[0] == "decode":
        return "decode"
    where = "contiguous" if " block " in case["case"] else "paged"
    return f"{shape[0]} {shape[5]}/{shape[6]} head_dim {shape[7]}, {where}"


def report(bench):
    """Prints a run of attn-bench; the bars of prefill are FA3's rate, so a share of one is 1 over the ratio."""
    ratios, missed, num_asked = {}, [], 0
    print(f"attnd: {bench['device']}; peers: {next((c['peer'] for c in bench['cases'] if 'peer' in c), 'none')}")
    for case in bench["cases"]:
        shape = parse(case["case"])
        if shape is None or "peer" not in case:
            continue
        text, asked = line(case, shape)
        print(text)
        for name, ratio, bound in asked:
            num_asked += 1
            if ratio > bound:
                missed.append(f"{case['case']}: {ratio:.3f} of {name}, asked at most {bound:.3f}")
            ratios.setdefault((row_of(case, shape), name), []).append(ratio)
    for (row, name), values in ratios.items():
        print(f"{row}: time over {name}'s {' '.join(f'{x:.3f}' for x in values)}, "
              f"geometric mean {statistics.geometric_mean(values):.3f}, speed {1 / statistics.geometric_mean(values):.3f}")
    for text in missed:
        print(f"NOT MET: {text}")
    print(f"{num_asked - len(missed)} of {num_asked} met")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("bench", nargs="?", help="result of attn-bench kernels --json")
    what.add_argument("--serve", action="store_true", help="time cases as attn-bench asks for them")
    args = parser.parse_args()
    if args.serve:
        serve()
    else:
        with open(args.bench, encoding="utf-8") as file:
            report(json.load(file))


if __name__ == "__main__":
    main()
