# shellcheck shell=bash
# An MPS control daemon of a test's own, with its own pipes and logs: sourced by gpu_service.sh and
# gpu.sh.  It serves whoever has CUDA_MPS_PIPE_DIRECTORY set to its folder.
mps_program() {
    command -v nvidia-cuda-mps-control || { [ -x /usr/local/nvidia/bin/nvidia-cuda-mps-control ] &&
        echo /usr/local/nvidia/bin/nvidia-cuda-mps-control; }
}

mps_there() { mps_program >/dev/null; }

# mps_start DIR makes the folder and starts one there; mps_stop DIR ends it.  mps_stop_all DIR ends
# all that are in folders of DIR.
mps_start() {
    mkdir -p "$1" && chmod 0777 "$1" || return 1
    CUDA_MPS_PIPE_DIRECTORY=$1 CUDA_MPS_LOG_DIRECTORY=$1 \
        PATH=$PATH:/usr/local/nvidia/bin "$(mps_program)" -d >"$1/start" 2>&1
}

mps_stop() {
    echo quit | CUDA_MPS_PIPE_DIRECTORY=$1 timeout 10 "$(mps_program)" >/dev/null 2>&1
}

mps_stop_all() {
    local one
    for one in "$1"/*/control; do
        [ -e "$one" ] && mps_stop "$(dirname "$one")"
    done
}
