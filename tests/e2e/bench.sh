#!/usr/bin/env bash
# attn-bench against a daemon of its own.
#     bench.sh BUILD_DIR ipc      every case of `attn-bench ipc` is measured; its clients end by SIGKILL
#     bench.sh BUILD_DIR killed   of two load tests at once one is killed: the other loses nothing
#     bench.sh BUILD_DIR prefixes   prompts share prefixes, more than the cache holds
# At the end no block is in use, and the daemon ends with exit status 0.
set -euo pipefail
build=$1 story=$2 cache=(--set cache.memory=256MiB)
dir=$(mktemp -d) daemon='' victim=''
url=ipc://$dir/attnd.sock
trap 'kill -KILL $daemon $victim 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$dir"' EXIT
: >"$dir/ready"
if [ "$story" = ipc ]; then
    # NNG forgets a reply that it is given in the instant in which it closes the pipe (srv_nng.c).
    export ASAN_OPTIONS=${ASAN_OPTIONS:+$ASAN_OPTIONS:}detect_leaks=0
fi
if [ "$story" = prefixes ]; then # 128 blocks of 64 tokens of tiny
    cache=(--set cache.memory=8MiB --set cache.slab=8MiB)
fi
"$build/attnd" --listen "$url" "${cache[@]}" >"$dir/ready" 2>"$dir/log" &
daemon=$!
for _ in $(seq 100); do
    grep -q 'attnd ready' "$dir/ready" && break
    sleep 0.1
done

# No function, so that $! is attn-bench itself.
serve=("$build/attn-bench" serve --connect "$url" --preset tiny --verify 1)

# number FILE EXPRESSION evaluates Python over the JSON document d.
number() { python3 -c 'import json, sys; d = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$@"; }

equal() { [ "$2" = "$3" ] || { echo "$1: $2, not $3" && exit 1; }; }

case $story in
ipc)
    "$build/attn-bench" ipc --connect "$url" --seconds 0.15 --max-clients 8 --json "$dir/ipc.json"
    # over NNG and rings, and three bare echoes; 1 and 8 clients; 1 and 16 in flight
    equal cases "$(number "$dir/ipc.json" 'sum(c["per_second"] > 0 for c in d["cases"])')" 20
    ;;
killed)
    "${serve[@]}" --requests 100000 --seed 2 >/dev/null 2>&1 &
    victim=$!
    "${serve[@]}" --requests 300 --input 100 --output 40 --json "$dir/serve.json" &
    survivor=$!
    sleep 0.5
    kill -KILL "$victim"
    kill -0 "$survivor" || { echo "the survivor had ended before" && exit 1; }
    wait "$survivor"
    equal requests "$(number "$dir/serve.json" 'd["requests"]')" 300
    equal errors "$(number "$dir/serve.json" 'd["errors"]')" 0
    equal mismatches "$(number "$dir/serve.json" 'd["mismatches"]')" 0
    # 99 + 40 tokens of 2 layers
    equal verified "$(number "$dir/serve.json" 'd["verified"]')" $((300 * 139 * 2))
    ;;
prefixes)
    # Two prompts of 1100 tokens share 1024, and one of 600 the first 512 of them; then come 6 of
    # 2048 tokens that share 512, so 17 + 1 + 1 + 6 * 24 + 8 full blocks are different.
    python3 - >"$dir/trace.jsonl" <<'EOF'
def row(tokens, outputs, ids):
    print('{"timestamp": 0, "input_length": %d, "output_length": %d, "hash_ids": %s}' % (tokens, outputs, ids))
row(1100, 2, [1, 2, 3])
row(1100, 2, [1, 2, 4])
row(600, 2, [1])
for i in range(6):
    row(2048, 3, [100, 3 * i + 101, 3 * i + 102, 3 * i + 103])
EOF
    "$build/attn-bench" serve --connect "$url" --preset tiny --trace "$dir/trace.jsonl" --concurrency 1 \
        --verify 0.01 --json "$dir/serve.json"
    equal requests "$(number "$dir/serve.json" 'd["requests"]')" 9
    equal errors "$(number "$dir/serve.json" 'd["errors"]')" 0
    equal mismatches "$(number "$dir/serve.json" 'd["mismatches"]')" 0
    # of each step of 512 shared tokens all but the last, which must give a row
    cached=$((2 * 511 + 511 + 5 * 511))
    equal cached "$(number "$dir/serve.json" 'd["cached_tokens"]')" $cached
    # prompts, and outputs but the last one, of 2 layers
    equal rows "$(number "$dir/serve.json" 'd["rows"]')" $((2 * (2 * 1101 + 601 + 6 * 2050 - cached)))
    "$build/attnctl" -s "$url" --json status >"$dir/status.json"
    equal "evicted more than none" "$(number "$dir/status.json" 'd["prefix_cache"]["evictions"] > 0')" True
    ;;
*) echo "usage: bench.sh BUILD_DIR ipc|killed|prefixes" && exit 2 ;;
esac

for _ in $(seq 20); do
    "$build/attnctl" -s "$url" --json status >"$dir/status.json"
    in_use=$(number "$dir/status.json" 'd["blocks"]["in_use"] + d["sequences"]')
    [ "$in_use" = 0 ] && break
    sleep 0.1
done
equal "blocks in use" "$in_use" 0
equal "accounting mismatches" "$(number "$dir/status.json" 'd["accounting_mismatches"]')" 0
kill "$daemon"
wait "$daemon" # the daemon's own exit status counts too
