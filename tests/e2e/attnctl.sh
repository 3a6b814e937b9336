#!/usr/bin/env bash
# attnctl against a daemon of its own: every command answers, with --json valid JSON, and drain ends
# the daemon with exit status 0.
#     attnctl.sh BUILD_DIR
set -euo pipefail
build=$1
dir=$(mktemp -d) daemon=
: >"$dir/ready"
trap 'kill "$daemon" 2>/dev/null || true; wait "$daemon" 2>/dev/null || true; rm -rf "$dir"' EXIT
"$build/attnd" --listen "ipc://$dir/attnd.sock" --set cache.memory=64MiB >"$dir/ready" 2>"$dir/log" &
daemon=$!
for _ in $(seq 100); do
    grep -q 'attnd ready' "$dir/ready" && break
    sleep 0.1
done

ctl() { "$build/attnctl" -s "ipc://$dir/attnd.sock" "$@"; }
for command in status models sequences sessions ping "config get" "config get server.log_level" \
    "config set server.log_level debug"; do
    echo "attnctl $command"
    # shellcheck disable=SC2086
    ctl $command >/dev/null
    # shellcheck disable=SC2086
    ctl --json $command | python3 -c 'import json, sys; json.load(sys.stdin)'
done
ctl --json status | python3 -c 'import json, sys
blocks = json.load(sys.stdin)["blocks"]
assert {"total", "free", "cached", "in_use"} <= set(blocks), blocks
assert blocks["in_use"] == 0, blocks'
ctl --json config get server.log_level | grep -q debug

ctl drain
wait "$daemon"
status=0
ctl ping >/dev/null 2>&1 || status=$?
[ "$status" -eq 4 ] || { echo "ping without a daemon: exit status $status, not 4" && exit 1; }
