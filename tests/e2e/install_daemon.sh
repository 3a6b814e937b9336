#!/usr/bin/env bash
# Installs all into a DESTDIR under the prefix /usr, and runs the daemon, attnctl, attn-bench and a
# client of three lines from there; then under another prefix, whose unit must name that one's paths.
#     install_daemon.sh BUILD_DIR
set -euo pipefail
build=$(realpath "$1")
source_dir=$(cd "$(dirname "$0")/../.." && pwd)
dir=$(mktemp -d) daemon=
trap 'kill "$daemon" 2>/dev/null || true; wait "$daemon" 2>/dev/null || true; rm -rf "$dir"' EXIT

fail() {
    echo "install_daemon: $*"
    exit 1
}

# put installs under a prefix.
put() {
    DESTDIR=$root cmake --install "$build" --prefix "$1" >"$dir/install.log"
}

# has_unit_of wants the unit to run programs that are there, with a configuration that is there.
has_unit_of() {
    local unit=$root$1/lib/systemd/system/attnd.service program conf
    [ "$(grep -c '^Exec' "$unit")" -eq "$(grep -c '^Exec' "$source_dir/deploy/attnd.service")" ]
    while read -r program conf; do
        if [ ! -x "$root$program" ] || [ ! -f "$root$conf" ]; then
            fail "$unit names $program, $conf"
        fi
    done < <(sed -n 's/^Exec[A-Za-z]*=\([^ ]*attnd\) --config \([^ ]*\).*/\1 \2/p' "$unit")
    diff <(grep -v '^Exec\|^#' "$unit") <(grep -v '^Exec\|^#' "$source_dir/deploy/attnd.service")
}

# ---- below a DESTDIR, as a package is made

root=$dir/root
put /usr
for file in usr/sbin/attnd usr/bin/attnctl usr/bin/attn-bench; do
    [ -x "$root/$file" ] || fail "no program $file"
done
for file in usr/lib/sysusers.d/attnd.conf usr/lib/tmpfiles.d/attnd.conf usr/include/attnd.h \
    usr/share/doc/attnd/README.md usr/share/doc/attnd/LICENSE; do
    [ -f "$root/$file" ] || fail "no file $file"
done
for file in etc/attnd/attnd.conf usr/share/doc/attnd/attnd.conf; do
    cmp "$source_dir/deploy/attnd.conf" "$root/$file"
done
[ "$(stat -c %a "$root/etc/attnd/attnd.conf")" = 644 ] || fail "the configuration's mode"
has_unit_of /usr
if grep -rIl --exclude-dir=doc -e "$dir" -e "$build" "$root"; then
    fail "these files know where they were made"
fi

attnd=("$root/usr/sbin/attnd" --config "$root/etc/attnd/attnd.conf")
"${attnd[@]}" --check-config
"${attnd[@]}" --listen "ipc://$dir/s" --set cache.memory=64MiB >"$dir/ready" 2>"$dir/log" &
daemon=$!
for _ in $(seq 100); do
    grep -q 'attnd ready' "$dir/ready" && break
    sleep 0.1
done
"$root/usr/bin/attnctl" -s "$dir/s" ping
"$root/usr/bin/attn-bench" serve --connect "ipc://$dir/s" --preset tiny --requests 3 --verify 1 >"$dir/bench" ||
    fail "attn-bench: $(tail -5 "$dir/bench")"
cat >"$dir/three.c" <<'END'
#include <attnd.h>
static attnd_client *c;
int main(int n, char **url) { return n != 2 || attnd_connect(&c, url[1], 0, 0) || (attnd_close(c), 0); }
END
PKG_CONFIG_PATH=$(dirname "$(find "$root" -name attnd.pc)")
export PKG_CONFIG_PATH
read -ra flags < <(pkg-config --cflags --libs attnd)
cc -std=c11 -Wall -Wextra -Werror "$dir/three.c" "${flags[@]}" -o "$dir/three"
LD_LIBRARY_PATH=$(pkg-config --variable=libdir attnd) "$dir/three" "ipc://$dir/s"
if "$dir/three" "ipc://$dir/none" 2>/dev/null; then
    fail "a client of nobody's connected"
fi
kill "$daemon"
wait "$daemon"
daemon=

# ---- again: what an operator has changed stays

echo "log_level = debug" >"$root/etc/attnd/attnd.conf"
put /usr
[ "$(cat "$root/etc/attnd/attnd.conf")" = "log_level = debug" ] || fail "the configuration was replaced"

# ---- under another prefix

root=
put "$dir/opt"
has_unit_of "$dir/opt"
cmp "$source_dir/deploy/attnd.conf" "$dir/opt/etc/attnd/attnd.conf"
"$dir/opt/sbin/attnd" --version >/dev/null
if command -v systemd-analyze >/dev/null; then
    systemd-analyze verify --man=no "$dir/opt/lib/systemd/system/attnd.service" >"$dir/verify" 2>&1 || true
    if grep -i "attnd.service.*\(unknown\|not executable\|invalid\)" "$dir/verify"; then
        fail "systemd says so"
    fi
fi

# ---- a folder of libraries that is two deep: pkg-config finds the prefix

cmake -S "$source_dir" -B "$dir/deep" -DCMAKE_INSTALL_PREFIX=/usr -DCMAKE_INSTALL_LIBDIR=lib/some-linux-gnu \
    -DATTND_CUDA=OFF -DATTND_TESTS=OFF >"$dir/deep.log"
mkdir -p "$dir/usr/lib/some-linux-gnu/pkgconfig"
find "$dir/deep" -name attnd.pc -exec cp {} "$dir/usr/lib/some-linux-gnu/pkgconfig/" \;
include=$(PKG_CONFIG_PATH=$dir/usr/lib/some-linux-gnu/pkgconfig pkg-config --variable=includedir attnd)
[ "$(realpath -m "$include")" = "$dir/usr/include" ] || fail "includedir is $include"
