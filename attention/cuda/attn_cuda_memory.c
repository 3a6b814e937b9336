// Exportable device memory, by the driver's functions for virtual memory: reserve addresses, make
// an allocation, map it there, allow access, export a descriptor; or import one.
#include <cuda.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "attention/cuda/attn_cuda_memory.h"

// What is used of the driver, and how it is declared in cuda.h.
#define DRIVER_MAP(XX)                                 \
    XX(get_error, cuGetErrorString)                    \
    XX(synchronize, cuCtxSynchronize)                  \
    XX(get_granularity, cuMemGetAllocationGranularity) \
    XX(reserve, cuMemAddressReserve)                   \
    XX(unreserve, cuMemAddressFree)                    \
    XX(create, cuMemCreate)                            \
    XX(release, cuMemRelease)                          \
    XX(map, cuMemMap)                                  \
    XX(unmap, cuMemUnmap)                              \
    XX(set_access, cuMemSetAccess)                     \
    XX(export_handle, cuMemExportToShareableHandle)    \
    XX(import_handle, cuMemImportFromShareableHandle)  \
    XX(get_properties, cuMemGetAllocationPropertiesFromHandle)

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

// refused tells memory that cannot be taken over, ATTND_EINVAL, from a device that has ended, as by
// an end of MPS since the context was made: of the latter no call works any more, and the memory
// may well be good.
static attnd_err refused(CUresult code, const char *what, uint64_t bytes, attnd_errinfo *info) {
    attnd_err err = failed(code, what, bytes, info);
    if (err == ATTND_ENOMEM || driver.synchronize() != CUDA_SUCCESS) {
        return err;
    }
    if (info) {
        info->code = ATTND_EINVAL;
    }
    return ATTND_EINVAL;
}

static CUmemAllocationProp properties(int32_t device) {
    return (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
    };
}

attnd_err attn_cuda_memory_unit(int32_t device, uint64_t *unit, attnd_errinfo *info) {
    size_t granularity = 0;
    attnd_err err = attn_cuda_driver_check(info);
    if (err) {
        return err;
    }
    const CUmemAllocationProp props = properties(device);
    CUresult code =
        driver.get_granularity(&granularity, &props, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    *unit = granularity;
    return code ? failed(code, "cuMemGetAllocationGranularity", 0, info) : ATTND_OK;
}

// start looks whether the driver is there, and rounds the bytes up to the device's granularity.
static attnd_err start(attn_cuda_memory *m, int32_t device, uint64_t bytes, uint64_t *unit,
                       attnd_errinfo *info) {
    attnd_err err = attn_cuda_memory_unit(device, unit, info);
    if (err) {
        return err;
    }
    *m = (attn_cuda_memory){.fd = -1, .bytes = (bytes + *unit - 1) / *unit * *unit};
    return ATTND_OK;
}

// map gives the allocation an address; *what names the call that failed.
static CUresult map(attn_cuda_memory *m, int32_t device, uint64_t unit, const char **what) {
    const CUmemAccessDesc access = {.location = properties(device).location,
                                    .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr address = 0;
    *what = "cuMemAddressReserve";
    CUresult code = driver.reserve(&address, m->bytes, unit, 0, 0);
    if (code) {
        return code;
    }
    m->address = address;
    *what = "cuMemMap";
    code = driver.map(m->address, m->bytes, 0, m->handle, 0);
    if (!code) {
        *what = "cuMemSetAccess";
        code = driver.set_access(m->address, m->bytes, &access, 1);
    }
    return code;
}

attnd_err attn_cuda_memory_open(attn_cuda_memory *out, int32_t device, uint64_t bytes,
                                attnd_errinfo *info) {
    attn_cuda_memory m;
    uint64_t unit = 0;
    attnd_err err = start(&m, device, bytes, &unit, info);
    if (err) {
        return err;
    }
    const CUmemAllocationProp props = properties(device);
    CUmemGenericAllocationHandle handle = 0;
    const char *what = "cuMemCreate";
    CUresult code = driver.create(&handle, m.bytes, &props, 0);
    if (!code) {
        m.handle = handle;
        code = map(&m, device, unit, &what);
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

// import gets a handle on the allocation behind a descriptor, which must be one of this device.
static attnd_err import(attn_cuda_memory *m, int32_t device, int fd, attnd_errinfo *info) {
    struct stat st;
    CUmemGenericAllocationHandle handle = 0;
    CUmemAllocationProp props;
    if (fstat(fd, &st) != 0 || S_ISREG(st.st_mode)) {
        return attnd_fail(info, ATTND_EINVAL, "memory", "the descriptor is no memory of a GPU");
    }
    CUresult code = driver.import_handle(&handle, (void *)(uintptr_t)fd,
                                         CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (code) {
        return refused(code, "cuMemImportFromShareableHandle", m->bytes, info);
    }
    m->handle = handle;
    code = driver.get_properties(&props, handle);
    if (code) {
        return refused(code, "cuMemGetAllocationPropertiesFromHandle", m->bytes, info);
    }
    if (props.location.type != CU_MEM_LOCATION_TYPE_DEVICE || props.location.id != device) {
        return attnd_fail(info, ATTND_EINVAL, "memory", "it is of device %d, not %d",
                          props.location.id, device);
    }
    return ATTND_OK;
}

attnd_err attn_cuda_memory_adopt(attn_cuda_memory *out, int32_t device, uint64_t bytes, int fd,
                                 uint64_t was_bytes, attnd_errinfo *info) {
    attn_cuda_memory m;
    uint64_t unit = 0;
    attnd_err err = start(&m, device, bytes, &unit, info);
    if (err) {
        return err;
    }
    if (m.bytes != was_bytes) {
        return attnd_fail(info, ATTND_EINVAL, "memory", "it has %llu bytes, not %llu",
                          (unsigned long long)was_bytes, (unsigned long long)m.bytes);
    }
    err = import(&m, device, fd, info);
    if (!err) {
        const char *what;
        CUresult code = map(&m, device, unit, &what);
        err = code ? refused(code, what, bytes, info) : ATTND_OK;
    }
    if (err) {
        attn_cuda_memory_close(&m); // the descriptor stays the caller's
        return err;
    }
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    m.fd = fd;
    *out = m;
    return ATTND_OK;
}

attnd_err attn_cuda_memory_reach(const attn_cuda_memory *m, int32_t device, attnd_errinfo *info) {
    const CUmemAccessDesc access = {.location = properties(device).location,
                                    .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUresult code = driver.set_access(m->address, m->bytes, &access, 1);
    return code ? failed(code, "cuMemSetAccess", m->bytes, info) : ATTND_OK;
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
