#!/usr/bin/env bash
# Runs the README's first requests, C and Python, against a daemon of their own.
#     examples.sh BUILD_DIR c|python
# The Python one needs the package attnd ($PYTHON names an interpreter that has it); without it: exit
# 77, skipped.
set -euo pipefail
build=$1 which=$2
source_dir=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
if [ "$which" = python ] && ! "$python" -c 'import attnd' 2>/dev/null; then
    echo "skipped: $python has no attnd"
    exit 77
fi

dir=$(mktemp -d) daemon=
: >"$dir/ready"
trap 'kill "$daemon" 2>/dev/null || true; wait "$daemon" 2>/dev/null || true; rm -rf "$dir"' EXIT
"$build/attnd" --listen "ipc://$dir/attnd.sock" --set cache.memory=64MiB >"$dir/ready" 2>"$dir/log" &
daemon=$!
for _ in $(seq 100); do
    grep -q 'attnd ready' "$dir/ready" && break
    sleep 0.1
done

case $which in
c) "$build/attnd-example" "ipc://$dir/attnd.sock" ;;
python) "$python" "$source_dir/proto/python/example.py" "ipc://$dir/attnd.sock" ;;
*) echo "usage: examples.sh BUILD_DIR c|python" && exit 2 ;;
esac
kill "$daemon"
wait "$daemon" # the daemon's own exit status counts too
