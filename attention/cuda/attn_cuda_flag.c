// cuda.h names the function by a macro, so the symbol's suffix is written here.  The flag
// CU_STREAM_WRITE_VALUE_DEFAULT has the write wait for all that is before it in the stream, with a
// fence of the whole system between.
#include "attention/cuda/attn_cuda_flag.h"

#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

static __typeof__(&cuStreamWriteValue32) write_value;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void find(void) {
    void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void *symbol = lib ? dlsym(lib, "cuStreamWriteValue32_v2") : NULL;
    memcpy(&write_value, &symbol, sizeof(symbol)); // ISO C has no such cast
}

attnd_err attn_cuda_flag_write(void *stream, uint64_t address, uint32_t value,
                               attnd_errinfo *info) {
    pthread_once(&once, find);
    if (!write_value) {
        return attnd_fail(info, ATTND_ENOTSUP, "device",
                          "the NVIDIA driver has no cuStreamWriteValue32");
    }
    CUresult code = write_value(stream, address, value, CU_STREAM_WRITE_VALUE_DEFAULT);
    if (code == CUDA_SUCCESS) {
        return ATTND_OK;
    }
    attnd_fail(info, ATTND_ECUDA, "cuda", "cuStreamWriteValue32: error %d", (int)code);
    if (info) {
        info->detail = (int32_t)code;
    }
    return ATTND_ECUDA;
}
