#!/usr/bin/env bash
# Runs the daemon on a GPU, from a build folder: load over both transports with every output row
# checked, the decoder and block masks beside the float64 reference, tiers, clients that attend in
# process, errors and the loss of the device, memcheck.
# A line for each, and "all passed" or "FAILED" last.  Full output is under build/gpu (or $OUT).
#     tests/gpu_daemon.sh BUILD
set -uo pipefail
build=$(realpath "${1:?usage: gpu_daemon.sh BUILD}")
cd "$(dirname "$0")/.." || exit 1
out=${OUT:-build/gpu}
mkdir -p "$out"
dir=$(mktemp -d)
url=ipc://$dir/s
failed=0
pid=

cleanup() {
    [ -n "$pid" ] && kill "$pid" 2>/dev/null
    rm -rf "$dir"
}
trap cleanup EXIT

# start runs a daemon, behind the words given, until it is ready.
start() {
    "$@" "$build/attnd" --no-keeper --listen "$url" --device cuda:0 --set cache.memory=4GiB \
        >"$dir/out" 2>>"$out/daemon.log" &
    pid=$!
    for _ in $(seq 600); do
        grep -q '^attnd ready' "$dir/out" && return 0
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.1
    done
    echo "the daemon did not start:"
    tail -n 5 "$out/daemon.log"
    return 1
}

# stop drains: a signal would go to what the daemon runs under.
stop() {
    "$build/attnctl" -s "$url" drain
    wait "$pid"
    local status=$?
    pid=
    return "$status"
}

# check runs a command that is one line of the table.
check() {
    local name=$1 log
    shift
    log=$out/${name//[^a-zA-Z0-9]/_}.txt
    if "$@" >"$log" 2>&1; then
        echo "pass  $name: $(grep -hE 'rows? .*verified|verified|tokens are|^[0-9]+%|tokens lost|tokens a second|^tiers:' "$log" | tail -n 1)"
    else
        failed=1
        echo "FAIL  $name"
        tail -n 12 "$log"
    fi
}

serve() {
    timeout 100 "$build/attn-bench" serve --connect "$url" --transport "$@"
}

start env || exit 1
check "status" "$build/attnctl" -s "$url" --json status
grep -o '"device":{[^}]*}' "$out/status.txt"
grep -o '"kind":"[a-z]*"' "$out/status.txt"
for transport in nng ring; do
    check "tiny-gpu over $transport" serve "$transport" --preset tiny-gpu --requests 30 --verify 1
    check "llama-3-8b over $transport" serve "$transport" --preset llama-3-8b --layers 4 \
        --requests 16 --verify 0.02 --verify-threads 8
    check "decoder in bf16 over $transport" "$build/decoder" "$transport" "$url" 1 0 bf16
done
check "gpt-oss-20b" serve ring --preset gpt-oss-20b --layers 4 --requests 16 --verify 0.02 \
    --verify-threads 8
check "stop" stop

for transport in nng ring; do
    check "survives five times kill -9 over $transport" tests/show_survival.sh "$build" \
        "$transport" cuda:0
done

export ATTND_E2E_DEVICE=cuda:0
check "e2e decoder" env CK_RUN_CASE=bf16 ATTND_E2E_BINARY="$build/attnd" \
    "$build/tests/test_e2e_decoder"
check "block masks" env ATTND_E2E_BINARY="$build/attnd" "$build/tests/test_e2e_gpu_mask"
check "tiers" env ATTND_E2E_BINARY="$build/attnd" "$build/tests/test_e2e_tiers_gpu"
check "in process" env ATTND_E2E_BINARY="$build/attnd" "$build/tests/test_e2e_inproc_cuda"
check "service mode" tests/gpu_service.sh "$build" values ends rate torch
check "errors and loss" env ATTND_E2E_BINARY="$build/tests/attnd_faulty" "$build/tests/test_e2e_gpu"

if command -v compute-sanitizer >/dev/null; then
    if start compute-sanitizer --tool memcheck --error-exitcode 9; then
        check "memcheck: tiny-gpu" serve ring --preset tiny-gpu --requests 4 --verify 1
        check "memcheck" stop
    else
        failed=1
    fi
fi
[ "$failed" -eq 0 ] && echo "all passed" || echo "FAILED"
exit "$failed"
