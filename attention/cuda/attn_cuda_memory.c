// Exportable device memory, by the driver's functions for virtual memory: reserve addresses, make
// an allocation, map it there, allow access, export a descriptor.
#include <cuda.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "attention/cuda/attn_cuda_memory.h"

// What is used of the driver, and how it is declared in cuda.h.
#define DRIVER_MAP(XX)                                 \
    XX(get_error, cuGetErrorString)                    \
    XX(get_granularity, cuMemGetAllocationGranularity) \
    XX(reserve, cuMemAddressReserve)                   \
    XX(unreserve, cuMemAddressFree)                    \
    XX(create, cuMemCreate)                            \
    XX(release, cuMemRelease)                          \
    XX(map, cuMemMap)                                  \
    XX(unmap, cuMemUnmap)                              \
    XX(set_access, cuMemSetAccess)                     \
    XX(export_handle, cuMemExportToShareableHandle)

static struct driver {
#define XX(name, function) __typeof__(&function) name;
    DRIVER_MAP(XX)
#undef XX
    char why[ATTND_ERR_TEXT_BYTES]; // not empty: it is not there
} driver;

static pthread_once_t once = PTHREAD_ONCE_INIT;

static void find_driver(void) {
    void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!lib) {
        attnd_errinfo info;
        attnd_fail(&info, ATTND_ENOTSUP, "", "no NVIDIA driver: %s", dlerror());
        memcpy(driver.why, info.text, sizeof(driver.why));
        return;
    }
    // ISO C has no cast from an object to a function pointer; dlsym's is stored as bytes.
#define XX(name, function)                                             \
    {                                                                  \
        void *symbol = dlsym(lib, #function);                          \
        if (!symbol) {                                                 \
            strcpy(driver.why, "the NVIDIA driver has no " #function); \
        }                                                              \
        memcpy(&driver.name, &symbol, sizeof(symbol));                 \
    }
    DRIVER_MAP(XX)
#undef XX
}

attnd_err attn_cuda_driver_check(attnd_errinfo *info) {
    pthread_once(&once, find_driver);
    return driver.why[0] ? attnd_fail(info, ATTND_ENOTSUP, "device", "%s", driver.why) : ATTND_OK;
}

static attnd_err failed(CUresult code, const char *what, uint64_t bytes, attnd_errinfo *info) {
    const char *text = NULL;
    driver.get_error(code, &text);
    attnd_err err = code == CUDA_ERROR_OUT_OF_MEMORY ? ATTND_ENOMEM : ATTND_ECUDA;
    attnd_fail(info, err, "memory", "%s of %llu bytes on the GPU: %s", what,
               (unsigned long long)bytes, text ? text : "unknown error");
    if (info) {
        info->detail = (int32_t)code;
    }
    return err;
}

static CUmemAllocationProp properties(int32_t device) {
    return (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
    };
}

attnd_err attn_cuda_memory_open(attn_cuda_memory *out, int32_t device, uint64_t bytes,
                                attnd_errinfo *info) {
    attnd_err err = attn_cuda_driver_check(info);
    if (err) {
        return err;
    }
    attn_cuda_memory m = {.fd = -1};
    const CUmemAllocationProp props = properties(device);
    const CUmemAccessDesc access = {.location = props.location,
                                    .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr address = 0;
    CUmemGenericAllocationHandle handle = 0;
    size_t unit = 0;
    const char *what = "cuMemGetAllocationGranularity";
    CUresult code = driver.get_granularity(&unit, &props, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    if (!code) {
        m.bytes = (bytes + unit - 1) / unit * unit;
        what = "cuMemCreate";
        code = driver.create(&handle, m.bytes, &props, 0);
        m.handle = code ? 0 : handle;
    }
    if (!code) {
        what = "cuMemAddressReserve";
        code = driver.reserve(&address, m.bytes, unit, 0, 0);
        m.address = code ? 0 : address;
    }
    if (!code) {
        what = "cuMemMap";
        code = driver.map(m.address, m.bytes, 0, m.handle, 0);
    }
    if (!code) {
        what = "cuMemSetAccess";
        code = driver.set_access(m.address, m.bytes, &access, 1);
    }
    if (!code) {
        what = "cuMemExportToShareableHandle";
        code = driver.export_handle(&m.fd, m.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    }
    if (code) {
        attn_cuda_memory_close(&m);
        return failed(code, what, bytes, info);
    }
    fcntl(m.fd, F_SETFD, FD_CLOEXEC);
    *out = m;
    return ATTND_OK;
}

// attn_cuda_memory_close ignores errors: after a lost context every call returns one, and the
// process is about to end.
void attn_cuda_memory_close(attn_cuda_memory *m) {
    if (m->fd >= 0 && m->bytes) {
        close(m->fd);
    }
    if (m->address) {
        driver.unmap(m->address, m->bytes);
        driver.unreserve(m->address, m->bytes);
    }
    if (m->handle) {
        driver.release(m->handle);
    }
    *m = (attn_cuda_memory){.fd = -1};
}
