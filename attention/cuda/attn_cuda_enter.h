// attn_cuda_enter makes an engine's device the thread's for the time of a call, and lets the thread
// allocate and copy while another stream is under capture.  Used by the engines
// (attn_cuda_engine.c, attn_cuda_service.c).
#ifndef ATTND_ATTENTION_CUDA_ATTN_CUDA_ENTER_H
#define ATTND_ATTENTION_CUDA_ATTN_CUDA_ENTER_H

#include <cuda_runtime_api.h>

// attn_cuda_entered is what was before.
typedef struct attn_cuda_entered {
    int device;
    enum cudaStreamCaptureMode mode;
} attn_cuda_entered;

static inline attn_cuda_entered attn_cuda_enter(int device) {
    attn_cuda_entered was = {0, cudaStreamCaptureModeRelaxed};
    (void)cudaGetDevice(&was.device);
    (void)cudaSetDevice(device);
    (void)cudaThreadExchangeStreamCaptureMode(&was.mode);
    return was;
}

// attn_cuda_leave undoes it.
static inline void attn_cuda_leave(attn_cuda_entered was) {
    (void)cudaThreadExchangeStreamCaptureMode(&was.mode);
    (void)cudaSetDevice(was.device);
}

#endif
