#!/usr/bin/env bash
# Builds what runs on a GPU, tests it there (memcheck too), and times it in turns with cuDNN, with
# what DRAM moved; the ratios come last.  Full figures are under build/gpu (or $OUT).
#     tests/gpu.sh [LENGTHS]      LENGTHS: a file of sequence lengths, one a line, for the ragged rows
#     tests/gpu.sh model [CELL ...]  a whole model step, attnd in process and in service mode (under an
#                                    MPS of its own, when there is one) beside SDPA, and a prompt beside
#                                    the prefill kernel by itself
#     tests/gpu.sh racecheck         shared-memory hazards of the prefill kernel, by kind
# It takes nvcc and CMake, and for the daemon and the benchmark the libraries of
# deploy/install-deps.sh.  What does not build here may come from elsewhere: ATTND_BUILD names a
# folder that attnd was built in, of which everything found is taken, with shared libraries in its
# folder deps/ when this machine has not got them.
set -uo pipefail
given=${ATTND_BUILD:+$(realpath "$ATTND_BUILD")}
lengths=${1:+$(realpath "$1")}
cd "$(dirname "$0")/.." || exit 1
out=${OUT:-build/gpu}
build=build/gpu-build
mkdir -p "$out"
failed=0
jobs_of=() # by process: title, log, lines of it to print

say() { printf '\n==== %s (at %d s)\n' "$1" "$SECONDS"; }

# own runs a program of the build.
own() { LD_LIBRARY_PATH=${given:+$given/deps:}${LD_LIBRARY_PATH:-} "$@"; }

# place prints where a program is; it fails when there is none.
place() {
    local dir
    for dir in "$given" $build; do
        if [ -n "$dir" ] && [ -x "$dir/$1" ]; then
            echo "$dir/$1"
            return 0
        fi
    done
    return 1
}

# make_targets builds targets, with the options of CMake given before "--".
make_targets() {
    local options=()
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    shift
    if ! cmake -S . -B $build -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_FLAGS_RELEASE=-O3 "${options[@]}" >"$out/build.txt" 2>&1 ||
        ! cmake --build $build -j "$(nproc)" --target "$@" >>"$out/build.txt" 2>&1; then
        tail -n 30 "$out/build.txt"
        exit 1
    fi
}

# gpu.sh model [CELL ...] times a whole model step beside SDPA (tests/model/bench_model.py).
if [ "${1:-}" = model ]; then
    shift
    python3 -c 'import torch, triton; assert torch.cuda.is_available()' 2>/dev/null ||
        { echo "gpu.sh model: takes a GPU, and PyTorch with Triton"; exit 1; }
    daemon=$(place attnd) || { echo "gpu.sh model: build attnd, attnd_shared and attn_shared first"; exit 1; }
    parts=$(dirname "$daemon")
    export ATTND_LIBRARY=$parts/proto/libattnd.so ATTND_ENGINES=$parts/attention/libattn.so
    # shellcheck source=tests/mps.sh
    . tests/mps.sh
    mps=$(mktemp -d)
    if mps_there && mps_start "$mps"; then
        export ATTND_MPS=$mps
        trap 'mps_stop "$mps"; rm -rf "$mps"' EXIT
    fi
    export PYTHONPATH=$PWD/proto/python/src
    own timeout 400 python3 tests/model/bench_model.py "$parts" "$@" 2>&1 | tee "$out/model.txt"
    failed=${PIPESTATUS[0]}
    own timeout 100 python3 tests/model/bench_prefill.py "$parts" 2>&1 | tee "$out/prefill.txt"
    exit $((failed | PIPESTATUS[0]))
fi

say "build"
if [ -z "$given" ] && pkg-config --exists libuv libcjson inih libxxhash check; then
    make_targets -- attnd attnctl attn-bench decoder attnd_faulty test_e2e_gpu test_e2e_gpu_mask test_e2e_decoder test_e2e_inproc_cuda \
        test_e2e_streams_cuda test_e2e_streams_end_cuda \
        test_conformance_cuda test_hand_over test_attn_cuda_memory test_attn_cuda_plan test_attn_prefill
elif ! place tests/test_conformance_cuda >/dev/null; then
    make_targets -DATTND_KERNELS_ONLY=ON -- test_conformance_cuda test_attn_cuda_memory
fi
grep -h '^-- CUDA' "$out/build.txt" 2>/dev/null
conformance=$(place tests/test_conformance_cuda)

# gpu.sh racecheck counts the hazards that racecheck sees, by the lines of code of both accesses.  It
# does not follow an mbarrier from warp to warp; attention/cuda/README.md lists what is ordered so.
if [ "${1:-}" = racecheck ]; then
    own timeout 300 compute-sanitizer --tool racecheck --racecheck-report hazard --show-backtrace no --print-limit 10000000 \
        "$conformance" --kernel prefill --short 2>&1 | awk '
        /hazard detected/ { match($0, /RAW|WAR|WAW/); kind = substr($0, RSTART, 3); n = 0 }
        / Thread \(/ && kind != "" {
            both = (n++ ? both " and " : "") $2 " " $NF
            if (n == 2) { count[kind ": " both]++; kind = "" }
        }
        /SUMMARY|failed/ { print }
        END { for (x in count) printf "%8d %s\n", count[x], x | "sort -rn" }' | tee "$out/racecheck.txt"
    exit "${PIPESTATUS[0]}"
fi
bench=$(place attn-bench)

# Correctness, all of it side by side; what is printed comes in order.
for kernel in bulk portable prefill default plans; do
    own timeout 200 "$conformance" --kernel $kernel >"$out/tests_$kernel.txt" 2>&1 &
    jobs_of[$!]="tests: $kernel|$out/tests_$kernel.txt|16"
done
for unit in attn_cuda_plan attn_prefill attn_cuda_memory hand_over; do
    if program=$(place tests/test_$unit); then
        own timeout 200 "$program" >"$out/test_$unit.txt" 2>&1 &
        jobs_of[$!]="$unit|$out/test_$unit.txt|8"
    fi
done
if command -v compute-sanitizer >/dev/null; then
    for kernel in bulk prefill; do
        own timeout 200 compute-sanitizer --tool memcheck --error-exitcode 1 \
            "$conformance" --kernel $kernel --short >"$out/memcheck_$kernel.txt" 2>&1 &
        jobs_of[$!]="memcheck: $kernel|$out/memcheck_$kernel.txt|1"
    done
fi
for pid in "${!jobs_of[@]}"; do
    IFS='|' read -r name log lines <<<"${jobs_of[$pid]}"
    wait "$pid" || failed=1
    say "$name"
    grep -v 'error / bound' "$log" | cut -c1-200 | tail -n "$lines"
done

say "daemon"
if daemon=$(place attnd); then
    own timeout 300 tests/gpu_daemon.sh "$(dirname "$daemon")" || failed=1
else
    echo "left out: libuv, cJSON, inih, xxhash, NNG and Check are not here, nor ATTND_BUILD"
fi

say "benchmark"
if [ -z "$bench" ]; then
    echo "left out: libuv, cJSON and NNG are not here, nor ATTND_BUILD"
    exit $failed
fi
peer=()
python3 -c 'import torch' 2>/dev/null && peer=(--peer "python3 $PWD/tests/load/peers.py --serve")
own timeout 300 "$bench" kernels --backend cuda --json "$out/bench.json" ${lengths:+--lengths "$lengths"} "${peer[@]}" \
    >"$out/bench.txt" 2>&1 || failed=1
grep -vE '^asked.*: met$' "$out/bench.txt" | sed 's/ (read in random order[^|]*)//; s/, [0-9]* splits ([^)]*)//' | cut -c1-170

python3 tests/load/peers.py "$out/bench.json" >"$out/peers.txt" 2>&1 || failed=1

# moved prints what ncu saw the first decode launch of a case move, over the bytes of its K and V.
moved() {
    own ncu --clock-control none --csv --print-units base --kernel-name regex:decode --launch-count 1 \
        --metrics dram__bytes_read.sum,dram__bytes_write.sum \
        "$bench" kernels --backend cuda --reps 1 --case "$1" 2>&1 | tee -a "$out/ncu.txt" |
        awk -F'","' -v ideal="$2" -v name="$1" '
            /dram__bytes/ { bytes = $NF; gsub(/[",]/, "", bytes); sum += bytes }
            END { printf "%-42s %13.0f of %13.0f bytes  %.4f\n", name, sum, ideal, sum / ideal }'
}
if command -v ncu >/dev/null; then
    say "DRAM bytes over ideal bytes"
    moved "decode bf16 32/8 kv_len 131072" $((131072 * 8 * 512))
    moved "decode bf16 32/8 batch 128 kv_len 1024" $((131072 * 8 * 512))
    moved "decode bf16 32/8 batch 64 kv_len 8192" $((524288 * 8 * 512))
    moved "decode bf16 32/8 batch 128 kv_len 8192" $((1048576 * 8 * 512))
fi

say "attnd beside its peers"
cat "$out/peers.txt"
[ "$failed" -eq 0 ] && echo "all passed" || echo "FAILED"
exit "$failed"
