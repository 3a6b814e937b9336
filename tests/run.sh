#!/usr/bin/env bash
# All tests, from nothing: installs missing packages, builds (release; AArch64, run by qemu; address
# and undefined behaviour sanitizers; libFuzzer), runs every test, the checks of the source, the
# examples and the quickstart.  Meant to stay under 15 minutes on 2 cores.  Root or sudo are needed
# only when packages are missing.  Ends with "N passed, N failed, N skipped"; exit status 0 only
# without failures.  Logs are under build/run.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
source deploy/install-deps.sh

jobs=$(nproc)
logs=build/run
passed=0 failed=0 skipped=0
failures=()
section_start=

section() {
    section_end
    section_start=$SECONDS
    printf '\n==== %s\n' "$1"
}

section_end() {
    if [ -n "$section_start" ]; then
        printf '     (%d s)\n' $((SECONDS - section_start))
    fi
}

pass() {
    passed=$((passed + 1))
    printf '  pass  %s\n' "$1"
}

skip() {
    skipped=$((skipped + 1))
    printf '  skip  %s: %s\n' "$1" "$2"
}

# fail shows the end of what the failed thing said.
fail() {
    failed=$((failed + 1))
    failures+=("$1")
    printf '  FAIL  %s\n' "$1"
    tail -n "${3:-40}" "$2" | sed 's/^/        /'
}

# check runs a command that is one test.
check() {
    local name=$1 log
    shift
    log=$logs/${name//[^a-zA-Z0-9]/_}.log
    if "$@" >"$log" 2>&1; then
        pass "$name"
    else
        fail "$name" "$log"
        return 1
    fi
}

# count prints an attribute of the first <testsuite> of a JUnit file.
count() { grep -o "$2=\"[0-9]*\"" "$1" 2>/dev/null | head -n 1 | tr -dc 0-9; }

# run_ctest runs the tests of a preset and adds them up, each by itself.  One more than there are
# cores at a time, since many wait for others most of the time.
run_ctest() {
    local preset=$1 log=$logs/ctest_$1.log junit=$PWD/$logs/ctest_$1.xml total bad off
    shift
    rm -f "$junit"
    ctest --preset "$preset" -j $((jobs + 1)) --output-junit "$junit" "$@" >"$log" 2>&1
    total=$(count "$junit" tests) bad=$(count "$junit" failures) off=$(count "$junit" skipped)
    if [ -z "$total" ]; then
        fail "ctest ($preset)" "$log"
        return
    fi
    passed=$((passed + total - bad - off)) failed=$((failed + bad)) skipped=$((skipped + off))
    printf '  %s: %d passed, %d failed, %d skipped\n' "$preset" $((total - bad - off)) "$bad" "$off"
    if [ "$bad" -gt 0 ]; then
        failures+=("$bad of ctest ($preset)")
        grep -vE '^ *Start |   Passed ' "$log" | tail -n 200 | sed 's/^/        /'
    fi
}

# build builds a preset, or with --target some of it.
build() {
    local preset=$1
    shift
    cmake --preset "$preset" && cmake --build --preset "$preset" -j "$jobs" "$@"
}

# together runs sections at the same time, each given as a function, and adds up what they counted;
# what they say comes in the order given.  For those that keep one core busy, or none.
together() {
    local job p f s name
    section_end
    section_start=
    rm -f "${@/#/$logs/count.}"
    set -m # a process group each, for stop_jobs
    for job in "$@"; do
        (
            passed=0 failed=0 skipped=0 failures=()
            "$job"
            section_end
            printf '%s\n' "$passed $failed $skipped" "${failures[@]}" >"$logs/count.$job"
        ) >"$logs/said.$job" 2>&1 &
        jobs_running+=("$!")
    done
    set +m
    wait "${jobs_running[@]}"
    jobs_running=()
    for job in "$@"; do
        cat "$logs/said.$job"
        if ! [ -e "$logs/count.$job" ]; then
            fail "$job ended early" "$logs/said.$job"
            continue
        fi
        {
            read -r p f s
            while read -r name; do
                failures+=("$name")
            done
        } <"$logs/count.$job"
        passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    done
}

jobs_running=()
stop_jobs() {
    if [ "${#jobs_running[@]}" -gt 0 ]; then
        kill -- "${jobs_running[@]/#/-}" 2>/dev/null
    fi
}
trap stop_jobs EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

format() {
    local tool
    tool=$(command -v clang-format-14 || command -v clang-format)
    find proto kvcache attention scheduler server tests \
        \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \) \
        -exec "$tool" --dry-run -Werror {} +
}

# unit_file verifies the unit with the paths of this build, since nothing is installed.
unit_file() {
    local folder
    folder=$(mktemp -d)
    sed "s#/usr/sbin/attnd#$PWD/build/release/attnd#" deploy/attnd.service >"$folder/attnd.service"
    systemd-analyze verify "$folder/attnd.service"
    local status=$?
    rm -rf "$folder"
    return "$status"
}

python_packages() {
    python3 -m venv build/venv &&
        build/venv/bin/python -m pip install -q build numpy ml_dtypes pytest mypy pynng
}

python_wheel() {
    rm -rf build/wheel && build/venv/bin/python -m build -o build/wheel proto/python &&
        build/venv/bin/python -m pip install -q --no-deps --force-reinstall build/wheel/*.whl
}

python_types() {
    (cd proto/python && ../../build/venv/bin/python -m mypy src tests)
}

python_tests() {
    ATTND_BUILD=$PWD/build/release build/venv/bin/python -m pytest -q -p no:cacheprovider \
        proto/python/tests
}

python() {
    section "python"
    if ! python_packages >"$logs/venv.log" 2>&1; then
        skip "python" "its packages cannot be installed from PyPI"
        return
    fi
    check "python: types" python_types
    if check "python: wheel" python_wheel; then
        check "python: tests" python_tests
    fi
}

neon() {
    section "neon: build and tests under qemu"
    if [ "$(uname -m)" != x86_64 ]; then
        skip "neon" "not an x86-64 machine; the release tests cover what it has"
    elif install_deps "${DEPS_NEON[@]}" >"$logs/neon_packages.log" 2>&1 &&
        command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64-static >/dev/null; then
        if check "build (neon)" build neon; then
            run_ctest neon
        fi
    else
        skip "neon" "${DEPS_NEON[*]} cannot be installed"
    fi
}

fuzz() {
    section "fuzz, 30 s"
    if command -v clang >/dev/null; then
        if check "build (fuzz)" build fuzz; then
            run_ctest fuzz
        fi
    else
        skip "fuzz" "no clang"
    fi
}

# Check's limits are for an idle machine; CTest's own stay as they are.
export CK_TIMEOUT_MULTIPLIER=5
mkdir -p "$logs"

section "packages"
if ! install_deps "${DEPS_BUILD[@]}" "${DEPS_TESTS[@]}"; then
    echo "run.sh: the packages cannot be installed" >&2
    exit 1
fi

section "release: build"
if ! [ -e /dev/nvidiactl ]; then
    # To see that the CUDA kernels compile, one of each type and head dimension is enough.
    export ATTN_ONLY='hd128_bf16|hd64_f16'
fi
check "build (release)" build release

together python neon fuzz
export PYTHON=$PWD/build/venv/bin/python # for the examples, which are skipped without it

section "release: tests"
run_ctest release

section "source"
if command -v clang-format-14 >/dev/null || command -v clang-format >/dev/null; then
    check "format" format
else
    skip "format" "no clang-format"
fi
check "direction of includes" tests/check_includes.sh
check "headers compile alone" tests/check_headers.sh
check "links of the README" tests/check_readme.sh
if command -v systemd-analyze >/dev/null; then
    check "systemd unit" unit_file
else
    skip "systemd unit" "no systemd-analyze"
fi

section "quickstart"
check "quickstart" deploy/quickstart.sh 5

section "asan and ubsan: build"
if check "build (asan)" build asan; then
    section "asan and ubsan: tests"
    export UBSAN_OPTIONS=print_stacktrace=1
    # The kernels' launches are fewer here; each fact is there.  Stories are not played again over
    # rings and the fake GPU, which have tests of their own, and whole programs not under load.
    ATTND_CONFORMANCE=short run_ctest asan -E '_over_ring$|_on_fake_gpu$|^e2e_bench_|^e2e_decoder'
fi

section "tsan: the ring"
if check "build (tsan)" build tsan --target attnd test_client_ring test_faults_ring_scribble \
    test_faults_ring_abuse; then
    run_ctest tsan -R '^(client_ring|faults_ring_scribble|faults_ring_abuse)$'
fi

section_end
printf '\n'
for name in "${failures[@]}"; do
    printf 'FAILED: %s\n' "$name"
done
printf '%d s in all\n' "$SECONDS"
printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
[ "$failed" -eq 0 ]
