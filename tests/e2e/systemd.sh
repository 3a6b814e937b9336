#!/usr/bin/env bash
# Runs the unit under a real systemd: PID 1 of namespaces of its own, with two units and none of the
# system's.  A decoder generates text while the worker is killed, attnd is restarted (with another
# binary, as an upgrade does it), and the keeper is killed; the text must be the undisturbed run's.
#     tests/e2e/systemd.sh BUILD
# Exit status 77 where that cannot be: it takes root, systemd, and a kernel that lets it.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=$(realpath "${1:?usage: systemd.sh BUILD}")
systemd=/lib/systemd/systemd
[ "$(id -u)" -eq 0 ] && [ -x $systemd ] && command -v unshare systemctl >/dev/null || exit 77
unshare -m -p -u -i -C -f --mount-proc true 2>/dev/null || exit 77
dir=$(mktemp -d /var/lib/attnd_systemd_XXXXXX) # the unit sees no /tmp, /home or /root
outer=

end() {
    [ -z "$outer" ] || kill -9 "$outer" 2>/dev/null || true
    wait "$outer" 2>/dev/null || true
    sleep 0.2
    # the control groups that this systemd made, which are empty now
    for unit in $(cd "$dir" && cat groups 2>/dev/null); do
        find /sys/fs/cgroup/*/"$unit" /sys/fs/cgroup/"$unit" -depth -type d -exec rmdir {} + 2>/dev/null || true
    done
    rm -rf "$dir"
}
trap end EXIT

mkdir "$dir/units" "$dir/units/attnd.service.d"
cp "$build/attnd" "$dir/attnd"
cp deploy/attnd.service "$dir/units/"
cat >"$dir/units/attnd.service.d/test.conf" <<EOF
[Unit]
DefaultDependencies=no
[Service]
ExecStartPre=
ExecStart=
ExecStart=$dir/attnd --listen ipc:///run/attnd/s --set cache.memory=64MiB --set cache.slab=1MiB
ConfigurationDirectory=
User=
Group=
StandardOutput=append:$dir/log
StandardError=append:$dir/log
EOF
cat >"$dir/units/show.service" <<EOF
[Unit]
DefaultDependencies=no
After=attnd.service
[Service]
Type=oneshot
StandardOutput=append:$dir/out
StandardError=append:$dir/out
ExecStart=/bin/bash $dir/show.sh
EOF
cat >"$dir/units/show.target" <<EOF
[Unit]
DefaultDependencies=no
Wants=attnd.service show.service
EOF
cat >"$dir/show.sh" <<EOF
cd $dir
value() { systemctl show attnd -p "\$1" --value; }
decode() { $build/decoder ring ipc:///run/attnd/s 1 \$1; }
state() { echo "\$1: \$(value ActiveState), \$(value NFileDescriptorStore) descriptors kept, \$(value NRestarts) restarts"; }
decode 0 >undisturbed
decode 30 >disturbed &
decoder=\$!
sleep 0.8
kill -9 \$(cut -d' ' -f1 /proc/\$(value MainPID)/task/*/children)
sleep 0.8
state "worker killed"
cp attnd attnd.new && mv attnd.new attnd # another file, as of a package
systemctl restart attnd
state "restarted"
sleep 0.8
kill -9 \$(value MainPID)
wait \$decoder
state "keeper killed"
cmp undisturbed disturbed && echo "texts are equal: \$(wc -w <disturbed) tokens"
systemctl stop attnd
state "stopped"
touch done
EOF
cat >"$dir/pid1.sh" <<EOF
mount --make-rprivate /
touch $dir/console
mount --bind $dir/console /dev/console
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system /run/lock
cp -r $dir/units/. /run/systemd/system/
container=docker exec $systemd --system --unit=show.target --log-target=console
EOF
list_groups() { ls -d /sys/fs/cgroup/*/*.{mount,slice,scope} /sys/fs/cgroup/*.{mount,slice,scope} 2>/dev/null | sort || true; }
list_groups >"$dir/before"
unshare -m -p -u -i -C -f --mount-proc --kill-child bash "$dir/pid1.sh" >"$dir/pid1" 2>&1 &
outer=$!
for _ in $(seq 300); do
    [ -e "$dir/done" ] && break
    kill -0 $outer 2>/dev/null || break
    sleep 0.1
done
list_groups | comm -13 "$dir/before" - | xargs -r -n 1 basename | sort -u >"$dir/groups"
cat "$dir/out" 2>/dev/null || { cat "$dir/pid1" "$dir/console"; exit 77; }
good=0
grep -q 'texts are equal: 100 tokens' "$dir/out" && grep -q 'keeper killed: active, 2 .*, 1 restarts' "$dir/out" &&
    [ "$(grep -c 'recovered in' "$dir/log")" -ge 3 ] && ! grep 'starts empty' "$dir/log" || good=1
[ $good -eq 0 ] || cat "$dir/log" "$dir/console"
exit $good
