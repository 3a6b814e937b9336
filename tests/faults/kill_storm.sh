#!/usr/bin/env bash
# Kills attnd's worker by SIGKILL at random moments while three small language models, over rings
# and messages, generate one text after the other: each text must be the float64 reference's, token
# for token, whatever was in flight.  Every fifth kill is followed by one or two more during the
# recovery.
#     tests/faults/kill_storm.sh [BUILD]      ATTND_KILLS=10000 for a long storm (40 otherwise)
set -euo pipefail
cd "$(dirname "$0")/../.."
build=${1:-build/release}
kills=${ATTND_KILLS:-40}
dir=$(mktemp -d /tmp/attnd_storm_XXXXXX)
url=ipc://$dir/s
keeper=
pids=()

end() {
    touch "$dir/stop"
    for pid in "${pids[@]}" $keeper; do
        kill "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    rm -rf "$dir"
}
trap end EXIT

fail() {
    echo "kill_storm: $1" >&2
    tail -n 40 "$dir/log" >&2
    exit 1
}

# generate runs decoders of a seed until the storm is over; a wrong text is left in $dir/wrong.  One
# that was disturbed before it had its sequence is simply run again.
generate() {
    local how=$1 seed=$2
    "$build/decoder" reference - "$seed" >"$dir/want.$seed"
    until [ -e "$dir/stop" ]; do
        if ! "$build/decoder" "$how" "$url" "$seed" >"$dir/got.$seed" 2>"$dir/err.$seed" &&
            ! grep -qE '^decoder: (step|attend|after)' "$dir/err.$seed"; then
            continue
        fi
        if ! cmp -s "$dir/want.$seed" "$dir/got.$seed"; then
            cat "$dir/want.$seed" "$dir/got.$seed" "$dir/err.$seed" >>"$dir/wrong"
            return
        fi
        echo . >>"$dir/texts"
    done
}

worker() {
    local all
    all=$(cat "/proc/$keeper/task/$keeper/children")
    echo "${all%% *}"
}

ready_times() { grep -c '^attnd ready' "$dir/out" || true; }

# await_ready waits until more workers than $1 have been ready.
await_ready() {
    local tries
    for ((tries = 0; tries < 4000; tries++)); do
        [ "$(ready_times)" -gt "$1" ] && return
        kill -0 "$keeper" 2>/dev/null || fail "the keeper has ended"
        sleep 0.005
    done
    fail "not ready again"
}

"$build/attnd" --listen "$url" --set cache.memory=64MiB --set cache.slab=1MiB \
    --set compute.threads=1 --set server.restart_pause=0s >"$dir/out" 2>"$dir/log" &
keeper=$!
await_ready 0
touch "$dir/texts"
generate ring 11 &
pids+=($!)
generate nng 12 &
pids+=($!)
generate ring 13 &
pids+=($!)

again=0
for ((i = 1; i <= kills; i++)); do
    [ -e "$dir/wrong" ] && break
    before=$(ready_times)
    sleep "0.$((RANDOM % 3))$((RANDOM % 10))$((RANDOM % 10))"
    kill -9 "$(worker)" 2>/dev/null || true
    for ((n = i % 5 ? 0 : 1 + RANDOM % 2; n > 0; n--)); do
        old=$(worker)
        sleep "0.00$((RANDOM % 10))"
        [ -n "$old" ] && kill -9 "$old" 2>/dev/null && again=$((again + 1))
    done
    await_ready "$before"
done
touch "$dir/stop"
for pid in "${pids[@]}"; do
    wait "$pid"
done
pids=()
[ ! -e "$dir/wrong" ] || { cat "$dir/wrong" >&2; fail "a text is wrong"; }
texts=$(wc -l <"$dir/texts")
! grep -E 'starts empty|damaged|accounting of blocks is wrong|given up' "$dir/log" >&2 ||
    fail "the cache was not whole"
kill "$keeper"
status=0
wait "$keeper" || status=$?
keeper=
[ "$status" -eq 0 ] || fail "exit status $status"
aborted=$(grep -c 'recovered.*[1-9][0-9]* open steps aborted' "$dir/log" || true)
echo "kills $((i - 1)) and $again in recovery | $aborted with steps open | texts $texts | violations 0"
[ "$texts" -ge 1 ] && [ "$aborted" -ge 1 ]
