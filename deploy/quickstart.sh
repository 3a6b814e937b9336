#!/usr/bin/env bash
# Builds attnd on a bare Debian 12 machine, starts it on a socket in a fresh folder, plays a model
# runtime against it, checks what it answers in float64, and stops it.  Root or sudo are needed only
# when packages are missing.  Nothing is installed but those; what it builds is under build/release.
#
# usage: deploy/quickstart.sh [SECONDS]     seconds of the first load test, 20 unless given
set -euo pipefail
cd "$(dirname "$0")/.."
source deploy/install-deps.sh

seconds=${1:-20}
if ! [[ $seconds =~ ^[1-9][0-9]{0,3}$ ]]; then
    echo "usage: deploy/quickstart.sh [SECONDS]" >&2
    exit 2
fi

say() { printf '\n== %s\n' "$*"; }

daemon=
folder=

# cleanup leaves neither daemon nor folder behind, however the script ends.
cleanup() {
    if [ -n "$daemon" ]; then
        kill -KILL "$daemon" 2>/dev/null || true
        wait "$daemon" 2>/dev/null || true
    fi
    if [ -n "$folder" ]; then
        rm -rf "$folder"
    fi
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

start_daemon() {
    folder=$(mktemp -d)
    build/release/attnd --listen "ipc://$folder/attnd.sock" >"$folder/attnd.log" 2>&1 &
    daemon=$!
    local tries
    for ((tries = 0; tries < 100; tries++)); do
        if build/release/attnctl -s "$folder/attnd.sock" --timeout 1000 ping 2>/dev/null; then
            return 0
        fi
        kill -0 "$daemon" 2>/dev/null || break
        sleep 0.1
    done
    echo "quickstart: the daemon does not come up:" >&2
    cat "$folder/attnd.log" >&2
    return 1
}

# stop_daemon stops it as an operator would, and wants exit status 0.
stop_daemon() {
    local status=0
    kill -TERM "$daemon"
    wait "$daemon" || status=$?
    daemon=
    if [ "$status" -ne 0 ]; then
        echo "quickstart: the daemon ended with status $status:" >&2
        tail -n 20 "$folder/attnd.log" >&2
        return 1
    fi
}

bench() {
    local name=$1
    shift
    build/release/attn-bench serve --connect "ipc://$folder/attnd.sock" --daemon-pid "$daemon" \
        --preset "$name" --json "$folder/$name.json" "$@"
}

# figure takes one number out of a result.
figure() { sed -n "s/^[[:space:]]*\"$2\":[[:space:]]*\([0-9.e+-]*\).*/\1/p" "$folder/$1.json" | head -n 1; }

figures() {
    LC_ALL=C printf '%-12s %10.1f prefill tokens/s %10.1f decode tokens/s %8d rows verified\n' \
        "$1" "$(figure "$1" prefill_tokens_per_s)" "$(figure "$1" decode_tokens_per_s)" \
        "$(figure "$1" verified)"
}

say "packages"
install_deps "${DEPS_BUILD[@]}"
say "build (release)"
cmake --preset release >/dev/null
cmake --build --preset release -j "$(nproc)"
say "start the daemon"
start_daemon
say "tiny, $seconds s, every output row checked in float64"
bench tiny --duration "$seconds" --verify 1
say "the geometry of llama-3-8b (32 layers, bf16), some rows checked"
bench llama-3-8b --requests 2 --concurrency 2 --input 128 --output 8 --verify 0.01
say "stop the daemon"
stop_daemon
say "tokens per second of attention alone: no projections, MLP or sampling"
figures tiny
figures llama-3-8b
