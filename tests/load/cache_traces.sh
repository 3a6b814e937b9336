#!/usr/bin/env bash
# cache_traces.sh BUILD_DIR: what `attn-bench cache` finds of the Mooncake traces, whose different
# full blocks and unbounded hit rates were counted apart from this code; and what is asked of the
# policy reuse.  ATTND_TRACES is the folder that they were downloaded to, as
# mooncake_conversation_trace.jsonl and mooncake_synthetic_trace.jsonl; without it: 77, skipped.
set -euo pipefail
build=$1
if [ ! -f "${ATTND_TRACES:-/nowhere}/mooncake_conversation_trace.jsonl" ]; then
    echo "skipped: ATTND_TRACES names no folder with the Mooncake traces"
    exit 77
fi
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
for trace in conversation synthetic; do
    "$build/attn-bench" cache --trace "$ATTND_TRACES/mooncake_${trace}_trace.jsonl" --json "$dir/$trace.json"
done
python3 - "$dir" <<'EOF'
import json, sys
for trace, blocks, unbounded in ("conversation", 170899, 37.34), ("synthetic", 40148, 65.04):
    d = json.load(open(f"{sys.argv[1]}/{trace}.json"))
    assert d["unique_blocks"] == blocks, d["unique_blocks"]
    assert round(100 * d["unbounded_hit_rate"], 2) == unbounded, d["unbounded_hit_rate"]
    assert len(d["cells"]) == 5
    for c in d["cells"]:
        assert c["lru_hit_rate"] <= c["belady_hit_rate"] <= d["unbounded_hit_rate"], c
        assert c["lru_hit_rate"] - 0.002 <= c["hit_rate"] <= c["belady_hit_rate"], c
    if trace == "conversation":
        assert d["cells"][2]["gap_closed"] >= 0.15, d["cells"][2]
EOF
