#!/usr/bin/env bash
# Compiles every C header alone, except the kernel texts attn_cpu_simd*.h, which the file of an
# instruction set includes behind its vector type (attn_cpu_vec_*.h), and the vector type of another
# architecture.  Prints the compiler's words, and exits with 1 when one does not.
set -euo pipefail
cd "$(dirname "$0")/.."
wrong=0
case $(uname -m) in
aarch64) other='avx*' ;;
*) other=neon ;;
esac
flags=(-std=gnu11 -Wno-psabi -D_GNU_SOURCE -I. -fsyntax-only -Werror=implicit-function-declaration)
read -ra libs < <(pkg-config --cflags libuv libcjson check)
while IFS= read -r header; do
    if ! echo "#include \"$header\"" | "${CC:-cc}" "${flags[@]}" "${libs[@]}" -x c -; then
        echo "$header does not compile alone"
        wrong=1
    fi
done < <(find proto kvcache attention scheduler server tests -name '*.h' \
    ! -name 'attn_cpu_simd*.h' ! -name "attn_cpu_vec_$other.h" | sort)
exit "$wrong"
