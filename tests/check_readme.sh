#!/usr/bin/env bash
# Fails when README.md links to a file that is not there.
set -euo pipefail
cd "$(dirname "$0")/.."
status=0
for path in $(grep -oE '\]\([^)#]+\)' README.md | tr -d '])(' | grep -v '^https\?:'); do
    if [ ! -e "$path" ]; then
        echo "README.md links to $path, which is not there"
        status=1
    fi
done
exit $status
