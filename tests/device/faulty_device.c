// The device of a daemon that errors can be asked of, when ATTND_FAULTY is in the environment, by
// the number of query tokens of a row:
//     FAULTY_LAUNCH  a call in front of the launch is refused; the device lives on
//     FAULTY_LOSS    the kernel is given a block table that leads out of the arena
//     FAULTY_MEMORY  so it is, and the memory is said to be spoilt
// or by the bytes of a region: FAULTY_REGION, there is no memory for it.  With ATTND_FAULTY_OPEN
// there, too, it cannot be opened as often as the file of that name has letters: the last one is
// cut off, and says what is answered.
// Under it lies a real GPU, or the fake one (FAULTY_FAKE).  This file stands in for srv_device.c.
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/proto_region.h"
#include "server/srv_device.h"
#include "tests/device/faulty_device.h"

#ifdef FAULTY_FAKE
#include "tests/device/fake_device.h"
#define DEVICE fake_device_ops
#else
#include "attention/cuda/attn_cuda_device.h"
#define DEVICE attn_cuda_device_ops
#endif

static bool is_refused[ATTN_DEVICE_BUFFERS], is_spoilt;

// take_letter cuts the last letter off a file and returns it, 0 when there is none.
static char take_letter(const char *path) {
    char letter = 0;
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    off_t last = fd >= 0 ? lseek(fd, 0, SEEK_END) - 1 : -1;
    if (last >= 0 && (pread(fd, &letter, 1, last) != 1 || ftruncate(fd, last) != 0)) {
        letter = 0;
    }
    if (fd >= 0) {
        close(fd);
    }
    return letter;
}

static attnd_err open_device(attn_device **out, const attn_device_opts *opts, attnd_errinfo *info) {
    switch (getenv("ATTND_FAULTY") ? take_letter(getenv("ATTND_FAULTY_OPEN")) : 0) {
    case FAULTY_CONTEXT:
        return attnd_fail(info, ATTND_ECUDA, "cuda", "cudaSetDevice: no context, as was asked for");
    case FAULTY_ABSENT:
        return attnd_fail(info, ATTND_ENOTSUP, "device", "no device, as was asked for");
    case FAULTY_FULL:
        return attnd_fail(info, ATTND_ENOMEM, "cuda", "cudaMalloc: full, as was asked for");
    default:
        return DEVICE.open(out, opts, info);
    }
}

// lead_astray overwrites a row's table in the host side of the buffer, which goes up next.
static void lead_astray(const attn_device_buffer *b, const attn_row *row) {
    uint64_t off = (uint64_t)((uintptr_t)row->table - (uintptr_t)b->device);
    memset(b->host + off, 0xff, sizeof(uint32_t));
}

static attnd_err plan(attn_device *d, uint32_t buffer, const attn_params *p, attn_choice *choice,
                      attnd_errinfo *info) {
    is_refused[buffer] = false;
    for (uint32_t i = 0; i < p->num_rows && getenv("ATTND_FAULTY"); i++) {
        is_refused[buffer] |= p->rows[i].q_len == FAULTY_LAUNCH;
        is_spoilt |= p->rows[i].q_len == FAULTY_MEMORY;
        if (p->rows[i].q_len == FAULTY_LOSS || p->rows[i].q_len == FAULTY_MEMORY) {
            lead_astray(&d->buffers[buffer], &p->rows[i]);
        }
    }
    return DEVICE.plan(d, buffer, p, choice, info);
}

// refuse makes the call that is refused, if the launch is to be.
static attnd_err refuse(attn_device *d, uint32_t buffer, attnd_errinfo *info) {
    return is_refused[buffer] ? DEVICE.upload(d, buffer, d->buffers[buffer].bytes, 1ull << 50, info)
                              : ATTND_OK;
}

static attnd_err launch(attn_device *d, uint32_t buffer, attnd_errinfo *info) {
    attnd_err err = refuse(d, buffer, info);
    return err ? err : DEVICE.launch(d, buffer, info);
}

static attnd_err launch_gated(attn_device *d, uint32_t buffer, uint64_t pair, attnd_errinfo *info) {
    attnd_err err = refuse(d, buffer, info);
    return err ? err : DEVICE.launch_gated(d, buffer, pair, info);
}

static void take_time(void) {
    const char *ms = getenv("ATTND_SLOW_REGIONS");
    usleep(ms ? (useconds_t)atoi(ms) * 1000 : 0);
}

static attnd_err region_make(attn_device *d, uint64_t bytes, attn_device_region *out,
                             attnd_errinfo *info) {
    take_time();
    bool asked = bytes % PROTO_REGION_ALIGN == FAULTY_REGION; // pairs are so many times that
    if (asked && getenv("ATTND_FAULTY")) {
        return attnd_fail(info, ATTND_ENOMEM, "memory", "no memory, as was asked for");
    }
    return DEVICE.region_make(d, bytes, out, info);
}

static void region_free(attn_device *d, attn_device_region *r) {
    take_time();
    DEVICE.region_free(d, r);
}

static bool spoilt(attn_device *d) {
    return is_spoilt || DEVICE.spoilt(d);
}

const attn_device_ops *srv_device_cuda(void) {
    static attn_device_ops ops;
    ops = DEVICE;
    ops.open = open_device;
    ops.plan = plan;
    ops.launch = launch;
    ops.launch_gated = launch_gated;
    ops.spoilt = spoilt;
    ops.region_make = region_make;
    ops.region_free = region_free;
    return &ops;
}
