#!/usr/bin/env bash
# Installs libattnd and libattn into a prefix of their own and builds programs against them, with cc
# and pkg-config and with CMake's find_package, shared and static; each talks to a daemon.
#     install.sh BUILD_DIR
set -euo pipefail
build=$1
source_dir=$(cd "$(dirname "$0")" && pwd)
dir=$(mktemp -d) daemon='' installed=''
trap 'kill "$daemon" 2>/dev/null || true; wait "$daemon" 2>/dev/null || true; rm -rf "$dir"' EXIT

cmake --install "$build" --prefix "$dir/there" --component client >"$dir/install.log"
mv "$dir/there" "$dir/prefix" # nothing in it may know where it was
PKG_CONFIG_PATH=$(dirname "$(find "$dir/prefix" -name attnd.pc)")
export PKG_CONFIG_PATH
lib=$(pkg-config --variable=libdir attnd)
export LD_LIBRARY_PATH=$lib
read -ra flags < <(pkg-config --cflags --libs attnd)
read -ra static < <(pkg-config --static --libs attnd | sed 's/-lattnd/-l:libattnd.a/')
read -ra cflags < <(pkg-config --cflags attnd)
read -ra attn < <(pkg-config --cflags --libs attn)
warn=(-std=c11 -Wall -Wextra -Wpedantic -Werror)
cc "${warn[@]}" "$source_dir/install/main.c" "${flags[@]}" -o "$dir/with_pc"
cc "${warn[@]}" "$source_dir/install/main.c" "${cflags[@]}" "${static[@]}" -o "$dir/with_pc_static"
cc "${warn[@]}" "$source_dir/../../proto/client/example.c" "${flags[@]}" -lm -o "$dir/example"
cc "${warn[@]}" "$source_dir/install/attn.c" "${attn[@]}" -o "$dir/attn_with_pc"
for header in $(cd "$dir/prefix" && find . -name '*.h' | sed 's|^\./include/||; s|^attnd/||'); do
    echo "#include <$header>" | cc "${warn[@]}" "${cflags[@]}" -fsyntax-only -x c - ||
        { echo "$header does not compile where it is installed"; exit 1; }
    installed+=" $header"
done
for header in proto/proto_wire.h proto/proto_ring.h proto/proto_region.h attnd.h attn_engine.h; do
    [[ $installed == *" $header"* ]] || { echo "$header is not installed"; exit 1; }
done
# A header that another one names is there, too.
named=$(find "$dir/prefix" -name '*.h' -exec grep -ohE '[a-z_/]+\.h\b' {} + | sort -u)
for name in $named; do
    [ -f "/usr/include/$name" ] || [ -f "$(cc -print-file-name=include)/$name" ] ||
        [[ $installed" " == *[\ /]"$name "* ]] || { echo "$name is named, and not installed"; exit 1; }
done
cmake -S "$source_dir/install" -B "$dir/cmake" -DCMAKE_PREFIX_PATH="$dir/prefix" >"$dir/cmake.log"
cmake --build "$dir/cmake" >>"$dir/cmake.log"
if nm -D --defined-only "$lib/libattnd.so" | grep ' [TDB] ' | grep -vE ' (attnd_|nng_stream_(recv|send)$)'; then
    echo "libattnd.so exports more than attnd.map says"
    exit 1
fi

"$build/attnd" --listen "ipc://$dir/s" --set cache.memory=64MiB \
    --set "server.in_process_uids=$(id -u)" >"$dir/ready" 2>"$dir/log" &
daemon=$!
for _ in $(seq 100); do
    grep -q 'attnd ready' "$dir/ready" && break
    sleep 0.1
done
for program in with_pc with_pc_static cmake/shared cmake/static example attn_with_pc cmake/attn; do
    "$dir/$program" "ipc://$dir/s"
done
kill "$daemon"
wait "$daemon"
