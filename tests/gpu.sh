#!/usr/bin/env bash
# Builds the CUDA kernels on a machine that has nvcc, CMake and a GPU (no library is needed), runs
# the GPU tests, memcheck on a part of them, and the decode and prefill benchmarks beside cuDNN and
# FlashAttention-2 through PyTorch's SDPA, and prints the ratios last.  Full figures are under
# build/gpu (or $OUT).  Where the daemon's libraries are, or ATTND_BUILD names a folder that it was
# built in, the daemon is tested, too.
#     tests/gpu.sh [LENGTHS]      LENGTHS: a file of sequence lengths, one a line, for the ragged rows
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
out=${OUT:-build/gpu}
build=build/kernels
mkdir -p "$out"
failed=0

say() { printf '\n==== %s (at %d s)\n' "$1" "$SECONDS"; }

say "build"
cmake -S . -B $build -DATTND_KERNELS_ONLY=ON -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_FLAGS_RELEASE=-O3 \
    >"$out/build.txt" 2>&1 &&
    cmake --build $build -j "$(nproc)" >>"$out/build.txt" 2>&1 || { tail -n 30 "$out/build.txt"; exit 1; }

for kernel in bulk portable prefill default; do
    say "tests: $kernel"
    timeout 120 $build/tests/test_conformance_cuda --kernel $kernel >"$out/tests_$kernel.txt" 2>&1 || failed=1
    grep -v 'error / bound' "$out/tests_$kernel.txt" | cut -c1-200 | tail -n 16
done

say "memory outlives its process"
timeout 60 $build/tests/test_attn_cuda_memory >"$out/memory.txt" 2>&1 || failed=1
tail -n 8 "$out/memory.txt"

if command -v compute-sanitizer >/dev/null; then
    say "memcheck"
    for kernel in bulk prefill; do
        timeout 120 compute-sanitizer --tool memcheck --error-exitcode 1 \
            $build/tests/test_conformance_cuda --kernel $kernel --short >"$out/memcheck_$kernel.txt" 2>&1 || failed=1
        tail -n 1 "$out/memcheck_$kernel.txt"
    done
fi

say "daemon"
daemon=${ATTND_BUILD:-}
if [ -z "$daemon" ] && pkg-config --exists libuv libcjson inih check; then
    daemon=build/daemon
    cmake -S . -B $daemon -DCMAKE_BUILD_TYPE=Release >"$out/build_daemon.txt" 2>&1 &&
        cmake --build $daemon -j "$(nproc)" --target attnd attnctl attn-bench decoder attnd_faulty \
            test_e2e_gpu test_e2e_decoder >>"$out/build_daemon.txt" 2>&1 ||
        { tail -n 30 "$out/build_daemon.txt"; daemon= failed=1; }
fi
if [ -n "$daemon" ]; then
    timeout 200 tests/gpu_daemon.sh "$daemon" || failed=1
else
    echo "left out: libuv, cJSON, inih, NNG and Check are not here"
fi

say "benchmark"
timeout 60 $build/tests/bench_cuda --grid ragged --read-bytes 0 ${1:+--lengths "$1"} >"$out/ragged.txt" 2>&1 || failed=1
awk -F'|' '/^(ragged|equal)/ { print $1 "|" $2 "|" $3 "| in a process of its own" }' "$out/ragged.txt"
timeout 90 $build/tests/bench_cuda ${1:+--lengths "$1"} >"$out/bench.txt" 2>&1 || failed=1
grep -E '^(read|append|ragged|equal)' "$out/bench.txt" | cut -c1-140
timeout 60 $build/tests/bench_cuda --grid short --read-bytes 0 >"$out/short.txt" 2>&1 || failed=1
awk -F'|' '/^decode/ { print $1 "|" $2 "|" $6 }' "$out/short.txt"
timeout 90 $build/tests/bench_cuda --grid prefill --read-bytes 0 --reps 11 >"$out/prefill.txt" 2>&1 || failed=1
grep -E '^(prefix|append)' "$out/prefill.txt" | cut -c1-140

if python3 -c 'import torch' 2>/dev/null; then
    timeout 90 python3 tests/conformance/cuda/peers.py >"$out/peers.txt" 2>&1 || failed=1
    timeout 90 python3 tests/conformance/cuda/peers.py --grid prefill --backends cudnn --reps 11 \
        >"$out/peers_prefill.txt" 2>&1 || failed=1
else
    echo "peers are left out: no PyTorch" | tee "$out/peers.txt" >"$out/peers_prefill.txt"
fi

# What ncu saw a decode launch move, over the bytes of its K and V.
moved() {
    ncu --clock-control none --csv --print-units base --kernel-name regex:decode --launch-count 1 \
        --metrics dram__bytes_read.sum,dram__bytes_write.sum \
        $build/tests/bench_cuda --read-bytes 0 --reps 1 --case "$@" 2>&1 | tee -a "$out/ncu.txt" |
        awk -F'","' -v ideal=$(($1 * $2 * $4 * 512)) -v name="B$1 L$2 $3/$4" '
            /dram__bytes/ { bytes = $NF; gsub(/[",]/, "", bytes); sum += bytes }
            END { printf "%-20s %13.0f of %13.0f bytes  %.4f\n", name, sum, ideal, sum / ideal }'
}
if command -v ncu >/dev/null; then
    say "DRAM bytes over ideal bytes"
    moved 1 131072 32 8
    moved 128 1024 32 8
    moved 64 8192 32 8
    moved 128 8192 32 8
fi

say "decode, attnd beside cuDNN and FA2 on a dense cache"
awk -F'|' '
    function us(text, part) { split(text, part, " "); return part[1] }
    function shape(text, part) { split(text, part, " "); return part[2] " " part[3] " " part[4] " " part[5] }
    /^cudnn/ { cudnn[shape($1)] = us($2) }
    /^fa2/ { fa2[shape($1)] = us($2) }
    /^decode/ { n++; name[n] = shape($1); time[n] = us($2); share[n] = $4 }
    END {
        for (i = 1; i <= n; i++) {
            peer = cudnn[name[i]]
            printf "%-26s %9.2f us %s", name[i], time[i], share[i]
            printf peer ? "  cuDNN %9.2f us  ratio %.3f" : "", peer, peer ? time[i] / peer : 0
            peer = fa2[name[i]]
            printf peer ? "  FA2 %9.2f us  ratio %.3f\n" : "\n", peer, peer ? time[i] / peer : 0
        }
    }' "$out/peers.txt" "$out/bench.txt"

say "prefill, 16384 tokens in all, TFLOP/s of attnd (the last column: block of tokens) and of cuDNN"
awk -F'|' '
    function rate(text, part) { split(text, part, " "); return part[1] }
    function shape(text, part) { split(text, part, " "); return part[1] " " part[2] " " part[3] " " part[4] " " part[5] }
    /^cudnn/ { sub(/^cudnn */, ""); cudnn[shape($1)] = rate($3) }
    /^(causal|full)/ {
        n++; name[n] = shape($1); own[n] = rate($3); block[n] = $1; sub(/.* block/, "block ", block[n])
    }
    END {
        for (i = 1; i <= n; i++) {
            peer = cudnn[name[i]]
            printf "%-32s %7.1f", name[i], own[i]
            printf peer ? "  cuDNN %7.1f  ratio %.3f" : "", peer, peer ? own[i] / peer : 0
            printf "  %s\n", block[i]
        }
    }' "$out/peers_prefill.txt" "$out/prefill.txt"
[ "$failed" -eq 0 ] && echo "all passed" || echo "FAILED"
exit "$failed"
