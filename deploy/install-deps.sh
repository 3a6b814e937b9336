# To be sourced: install_deps PACKAGE... installs those that are missing, with apt-get, as root or
# by sudo.  Elsewhere than on Debian and its kin it says what is needed and goes on.
# shellcheck shell=bash disable=SC2034

DEPS_BUILD=(build-essential cmake ninja-build pkg-config libuv1-dev libnng-dev libcjson-dev
    libinih-dev libxxhash-dev liburing-dev check)
DEPS_TESTS=(clang clang-format libclang-rt-14-dev python3 python3-venv)
# For the kernels of another architecture.
DEPS_NEON=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static)

# missing_deps prints those of the packages that are not installed.
missing_deps() {
    local package
    for package in "$@"; do
        if [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" != installed ]; then
            echo "$package"
        fi
    done
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        echo "install-deps: not root, and there is no sudo: run as root: $*" >&2
        return 1
    fi
}

install_deps() {
    local missing
    if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
        echo "install-deps: no apt-get here; needed are (Debian's names): $*" >&2
        return 0
    fi
    mapfile -t missing < <(missing_deps "$@")
    if [ "${#missing[@]}" -eq 0 ]; then
        return 0
    fi
    echo "installing: ${missing[*]}"
    as_root apt-get update -qq
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        "${missing[@]}" >/dev/null
}
