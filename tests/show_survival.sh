#!/usr/bin/env bash
# Shows that the cache survives kill -9: a small language model generates text over attnd, whose
# worker is killed with SIGKILL five times in the middle; the text must be the undisturbed run's.
# On a GPU the decoder is the one in bf16, which is fed the reference's tokens and checked by them.
#     tests/show_survival.sh [BUILD] [nng|ring|inproc] [DEVICE]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/release}
transport=${2:-ring}
device=${3:-cpu}
kind=bf16
[ "$device" != cpu ] || kind=f32
kills=5
pause_ms=20 # before each token, so that there is time for all kills
[ "$device" = cpu ] || pause_ms=60
dir=$(mktemp -d /tmp/attnd_show_XXXXXX)
keeper=
decoder=

end() {
    for pid in $decoder $keeper; do
        kill "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    rm -rf "$dir"
}
trap end EXIT

fail() {
    echo "show_survival: $1" >&2
    cat "$dir/log" >&2
    exit 1
}

# ready_times prints how often a worker became ready.
ready_times() { grep -c '^attnd ready' "$dir/out" || true; }

"$build/attnd" --listen "ipc://$dir/s" --device "$device" --set cache.memory=64MiB --set cache.slab=1MiB \
    --set "server.in_process_uids=$(id -u)" \
    >"$dir/out" 2>"$dir/log" &
keeper=$!
for _ in $(seq 300); do
    [ "$(ready_times)" -ge 1 ] && break
    sleep 0.1
done
[ "$(ready_times)" -eq 1 ] || fail "attnd did not start"

"$build/decoder" "$transport" "ipc://$dir/s" 1 0 $kind >"$dir/undisturbed" || fail "the first run failed"
"$build/decoder" "$transport" "ipc://$dir/s" 1 "$pause_ms" $kind >"$dir/disturbed" &
decoder=$!

slowest=0
for ((i = 1; i <= kills; i++)); do
    sleep "0.3$((RANDOM % 10))$((RANDOM % 10))"
    kill -0 "$decoder" 2>/dev/null || fail "the run ended before kill $i"
    worker=$(cat "/proc/$keeper/task/$keeper/children") worker=${worker%% *}
    from=$(date +%s%N)
    kill -9 "$worker"
    until [ "$(ready_times)" -gt "$i" ]; do
        [ $(($(date +%s%N) - from)) -lt 20000000000 ] || fail "not ready again"
        sleep 0.002
    done
    ms=$((($(date +%s%N) - from) / 1000000))
    echo "kill -9 number $i of worker $worker: ready again after $ms ms"
    slowest=$((ms > slowest ? ms : slowest))
done
wait "$decoder" || fail "the disturbed run failed"
decoder=

tokens=$(wc -w <"$dir/disturbed")
lost=$(paste <(tr ' ' '\n' <"$dir/undisturbed") <(tr ' ' '\n' <"$dir/disturbed") |
    awk '$1 != $2 { lost++ } END { print lost + 0 }')
for what in 'was opened in' 'recovered in'; do
    grep "$what" "$dir/log" | tail -1 | sed 's/.* INFO /the last worker: /' || true
done
echo "kills $kills | slowest time to ready $slowest ms | tokens $tokens | tokens lost $lost"
cmp "$dir/undisturbed" "$dir/disturbed" || fail "the texts differ"
[ "$tokens" -eq 100 ] && [ "$lost" -eq 0 ] || fail "tokens were lost"
