#!/usr/bin/env bash
# Runs the tests of service mode on a GPU, from a build folder: client and daemon on one GPU, with
# and without MPS, and on two where there are two.  Stories run side by side, each with a daemon
# (and an MPS server) of its own; what is timed runs alone.  A line for each, and "all passed" or
# "FAILED" last.  Full output is under build/gpu (or $OUT).
#     tests/gpu_service.sh BUILD [STORY ...]      STORY: values ends rate peers torch; all but peers
#                                                 need one GPU
set -uo pipefail
build=$(realpath "${1:?usage: gpu_service.sh BUILD [STORY ...]}")
shift
stories=" ${*:-values ends rate peers torch} "
cd "$(dirname "$0")/.." || exit 1
out=${OUT:-build/gpu}
mkdir -p "$out"
dir=$(mktemp -d)
failed=0
export ATTND_E2E_BINARY=$build/attnd ATTND_E2E_DEVICE=cuda:0
# shellcheck source=tests/mps.sh
. tests/mps.sh

cleanup() {
    mps_stop_all "$dir"
    rm -rf "$dir"
}
trap cleanup EXIT

wants() { [ "${stories#* "$1" }" != "$stories" ]; }

# run runs a test program's case, or all; with MPS when the first word says so.
run() {
    local how=$1 name=$2 program=$3 case=$4
    local log=$out/service_${how}_$name.txt begin=$SECONDS pipes=
    if [ "$how" = mps ]; then
        pipes=$dir/$name
        mps_start "$pipes" || { echo "FAIL  $name under MPS: it does not start"; return 1; }
    fi
    if env ${pipes:+CUDA_MPS_PIPE_DIRECTORY=$pipes} ${case:+CK_RUN_CASE=$case} \
        timeout 150 "$program" >"$log" 2>&1; then
        echo "pass  $name ($how, $((SECONDS - begin)) s): $(grep -hE 'tokens a second|another user' "$log" | tail -n 1)"
    else
        echo "FAIL  $name ($how, $((SECONDS - begin)) s)"
        grep -vE '^(Running|attnd ready)' "$log" | cut -c1-300 | tail -n 12
        [ -n "$pipes" ] && tail -n 5 "$pipes/server.log"
        touch "$dir/failed"
    fi
    [ -z "$pipes" ] || mps_stop "$pipes"
}

modes=plain
mps_there && modes="plain mps"
for how in $modes; do
    wants values && run "$how" values "$build/tests/test_e2e_streams_cuda" service &
    if wants ends; then
        for case in daemon steps keeper users outlives; do
            run "$how" "$case" "$build/tests/test_e2e_streams_end_cuda" "$case" &
        done
        # with kernels that wait, a client that is killed ends the daemon's context, too: outlives
        ATTND_E2E_SET=compute.wait_kernels=off run "$how" client "$build/tests/test_e2e_streams_end_cuda" client &
    fi
done
wants values && run plain cpu "$build/tests/test_e2e_streams_cuda" none &
wait
if wants rate; then
    for how in $modes; do
        ATTND_E2E_ALONE=1 run "$how" rate "$build/tests/test_e2e_streams_end_cuda" rate
    done
fi
if wants peers; then
    if [ "$(nvidia-smi -L | wc -l)" -gt 1 ]; then
        export ATTND_E2E_CLIENT_DEVICE=1
        run plain peers "$build/tests/test_e2e_streams_cuda" service
        run plain peers_end "$build/tests/test_e2e_streams_end_cuda" daemon
        unset ATTND_E2E_CLIENT_DEVICE
    else
        echo "left out: peers, there is one GPU"
    fi
fi
if wants torch && python3 -c 'import torch, pytest' 2>/dev/null; then
    if PYTHONPATH=proto/python/src ATTND_BUILD=$build ATTND_LIBRARY=$build/proto/libattnd.so \
        timeout 120 python3 -m pytest -q -p no:cacheprovider proto/python/tests/test_torch.py >"$out/service_torch.txt" 2>&1; then
        echo "pass  torch: $(tail -n 1 "$out/service_torch.txt")"
    else
        echo "FAIL  torch"
        tail -n 15 "$out/service_torch.txt"
        touch "$dir/failed"
    fi
fi
[ -e "$dir/failed" ] && failed=1
[ "$failed" -eq 0 ] && echo "all passed" || echo "FAILED"
exit "$failed"
