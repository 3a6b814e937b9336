// kv_faults makes a library call fail at its n-th use.  A test that is linked with
// -Wl,--wrap=calloc,--wrap=mmap,... defines which calls it wraps with the macros below.
#ifndef ATTND_TESTS_KV_FAULTS_H
#define ATTND_TESTS_KV_FAULTS_H

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/types.h>

typedef struct kv_fault {
    int after; // calls that still succeed
    int times; // calls that then fail, 0 = one; after them none does
    int err;   // errno of those
} kv_fault;

#define KV_NO_FAULT \
    { .after = -1 }

static inline int kv_fault_hits(kv_fault *fault) {
    if (fault->after < 0 || fault->after-- > 0) {
        return 0;
    }
    fault->after = --fault->times > 0 ? 0 : -1;
    errno = fault->err;
    return 1;
}

#define KV_FAULT_CALLOC(fault)                     \
    void *__real_calloc(size_t num, size_t size);  \
    void *__wrap_calloc(size_t num, size_t size);  \
    void *__wrap_calloc(size_t num, size_t size) { \
        if (kv_fault_hits(fault)) {                \
            return NULL;                           \
        }                                          \
        return __real_calloc(num, size);           \
    }

#define KV_FAULT_MMAP(fault)                                                            \
    void *__real_mmap(void *at, size_t bytes, int prot, int flags, int fd, off_t off);  \
    void *__wrap_mmap(void *at, size_t bytes, int prot, int flags, int fd, off_t off);  \
    void *__wrap_mmap(void *at, size_t bytes, int prot, int flags, int fd, off_t off) { \
        if (kv_fault_hits(fault)) {                                                     \
            return MAP_FAILED;                                                          \
        }                                                                               \
        return __real_mmap(at, bytes, prot, flags, fd, off);                            \
    }

#define KV_FAULT_MEMFD(fault)                                   \
    int __real_memfd_create(const char *name, unsigned flags);  \
    int __wrap_memfd_create(const char *name, unsigned flags);  \
    int __wrap_memfd_create(const char *name, unsigned flags) { \
        if (kv_fault_hits(fault)) {                             \
            return -1;                                          \
        }                                                       \
        return __real_memfd_create(name, flags);                \
    }

#define KV_FAULT_FTRUNCATE(fault)               \
    int __real_ftruncate(int fd, off_t bytes);  \
    int __wrap_ftruncate(int fd, off_t bytes);  \
    int __wrap_ftruncate(int fd, off_t bytes) { \
        if (kv_fault_hits(fault)) {             \
            return -1;                          \
        }                                       \
        return __real_ftruncate(fd, bytes);     \
    }

// fcntl with an int argument, as sealing uses it.
#define KV_FAULT_FCNTL(fault)                \
    int __real_fcntl(int fd, int cmd, ...);  \
    int __wrap_fcntl(int fd, int cmd, ...);  \
    int __wrap_fcntl(int fd, int cmd, ...) { \
        if (kv_fault_hits(fault)) {          \
            return -1;                       \
        }                                    \
        va_list args;                        \
        va_start(args, cmd);                 \
        int arg = va_arg(args, int);         \
        va_end(args);                        \
        return __real_fcntl(fd, cmd, arg);   \
    }

#endif
