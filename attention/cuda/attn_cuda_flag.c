// cuda.h names the function by a macro, so the symbol's suffix is written here.  The flag
// CU_STREAM_WRITE_VALUE_DEFAULT has the write wait for all that is before it in the stream, with a
// fence of the whole system between.
#include "attention/cuda/attn_cuda_flag.h"

#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

static __typeof__(&cuStreamWriteValue64) write_value;
static __typeof__(&cuDeviceGetAttribute) get_attribute;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void find(void) {
    void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void *symbol = lib ? dlsym(lib, "cuStreamWriteValue64_v2") : NULL;
    memcpy(&write_value, &symbol, sizeof(symbol)); // ISO C has no such cast
    symbol = lib ? dlsym(lib, "cuDeviceGetAttribute") : NULL;
    memcpy(&get_attribute, &symbol, sizeof(symbol));
}

attnd_err attn_cuda_flag_check(int device, attnd_errinfo *info) {
    int has = 0;
    pthread_once(&once, find);
    bool good = write_value && get_attribute &&
                get_attribute(&has, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, device) ==
                    CUDA_SUCCESS &&
                has;
    return good ? ATTND_OK
                : attnd_fail(info, ATTND_ENOTSUP, "device",
                             "cuda:%d or its driver has no stream memory operations of 64 bits",
                             device);
}

attnd_err attn_cuda_flag_answer(void *stream, uint64_t pair, attnd_errinfo *info) {
    const uint64_t answered = 1ull << 32; // ready = 0, done = 1
    pthread_once(&once, find);
    if (!write_value) {
        return attnd_fail(info, ATTND_ENOTSUP, "device",
                          "the NVIDIA driver has no cuStreamWriteValue64");
    }
    CUresult code = write_value(stream, pair, answered, CU_STREAM_WRITE_VALUE_DEFAULT);
    if (code == CUDA_SUCCESS) {
        return ATTND_OK;
    }
    attnd_fail(info, ATTND_ECUDA, "cuda", "cuStreamWriteValue64: error %d", (int)code);
    if (info) {
        info->detail = (int32_t)code;
    }
    return ATTND_ECUDA;
}
