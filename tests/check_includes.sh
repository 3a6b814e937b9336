#!/usr/bin/env bash
# Holds the direction of includes: server > scheduler > {attention, kvcache} > proto.  A file may
# include its own folder and what is below; nobody includes tests but tests; kvcache, scheduler and
# proto include no CUDA header.  Prints what is wrong, and exits with 1.
set -euo pipefail
cd "$(dirname "$0")/.."

declare -A below=(
    [proto]="proto"
    [kvcache]="kvcache proto"
    [attention]="attention proto"
    [scheduler]="scheduler attention kvcache proto"
    [server]="server scheduler attention kvcache proto"
    [tests]="tests server scheduler attention kvcache proto"
)
wrong=0

complain() {
    echo "$1"
    wrong=1
}

for folder in "${!below[@]}"; do
    while IFS=: read -r file line include; do
        include=${include#*\"}
        target=${include%%/*}
        if [[ $include == */* && " ${below[$folder]} " != *" $target "* ]]; then
            complain "$file:$line: $folder may not include $target"
        fi
    done < <(grep -rnE '^[[:space:]]*#[[:space:]]*include[[:space:]]*"' "$folder" \
        --include='*.[ch]' --include='*.cu' --include='*.cuh' --include='*.in' || true)
done
while IFS= read -r hit; do
    complain "$hit: a CUDA header outside attention and server"
done < <(grep -rnE '#[[:space:]]*include[[:space:]]*<(cuda|nvrtc|nccl)' proto kvcache scheduler || true)
exit "$wrong"
