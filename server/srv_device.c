// The one place where the server meets attention/cuda.
#include "server/srv_device.h"

#include <stddef.h>

#ifdef ATTND_HAVE_CUDA
#include "attention/cuda/attn_cuda_device.h"

const attn_device_ops *srv_device_cuda(void) {
    return &attn_cuda_device_ops;
}
#else
const attn_device_ops *srv_device_cuda(void) {
    return NULL;
}
#endif
