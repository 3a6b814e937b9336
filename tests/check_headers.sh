#!/usr/bin/env bash
# Compiles every C header alone.  Prints the compiler's words, and exits with 1 when one does not.
set -euo pipefail
cd "$(dirname "$0")/.."
wrong=0
flags=(-std=gnu11 -D_GNU_SOURCE -I. -fsyntax-only -Werror=implicit-function-declaration)
read -ra libs < <(pkg-config --cflags libuv libcjson check)
while IFS= read -r header; do
    if ! echo "#include \"$header\"" | "${CC:-cc}" "${flags[@]}" "${libs[@]}" -x c -; then
        echo "$header does not compile alone"
        wrong=1
    fi
done < <(find proto kvcache attention scheduler server tests -name '*.h' | sort)
exit "$wrong"
