#!/usr/bin/env bash
# Runs the README's first requests, C and Python, against a daemon of their own.
#     examples.sh BUILD_DIR c|python|wire
# python needs the package attnd, wire needs pynng ($PYTHON names an interpreter that has them);
# without it: exit 77, skipped.
set -euo pipefail
build=$1 which=$2
source_dir=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
case $which in
c) needs= ;;
python) needs=attnd ;;
wire) needs=pynng ;;
*) echo "usage: examples.sh BUILD_DIR c|python|wire" && exit 2 ;;
esac
if [ -n "$needs" ] && ! "$python" -c "import $needs" 2>/dev/null; then
    echo "skipped: $python has no $needs"
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
wire) "$python" "$source_dir/proto/python/example_wire.py" "ipc://$dir/attnd.sock" ;;
esac
kill "$daemon"
wait "$daemon" # the daemon's own exit status counts too
