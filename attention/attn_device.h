// attn_device is a device with memory of its own that attention runs on: one arena, a few buffers
// that lie on both sides, one stream.  It is a table, so that whoever drives a device (the daemon's
// srv_gpu) needs no header of its maker, and can be tested on host memory.  attention/cuda makes
// one (attn_cuda_device.h).
//
// A launch takes a buffer: its inputs are written to the buffer's host side, then
//     plan      checks and plans the launch, on the host
//     upload    copies inputs, and what was planned, to the device side
//     launch    runs what was planned
//     download  copies outputs to the host side
//     mark      and ended says when all of the buffer's work has ended
// The host side must not be touched from upload until ended.  The work of all buffers is done in
// the order in which it was given, as are moves within the arena; only uploads may be done before
// what was given earlier, so nothing that was may use their buffer.
//
// Threads: one at a time, mostly the one that drives it; check_shape and check_row, and what else
// says so, from any.
#ifndef ATTND_ATTENTION_ATTN_DEVICE_H
#define ATTND_ATTENTION_ATTN_DEVICE_H

#include "attention/attn.h"

enum { ATTN_DEVICE_BUFFERS = 2, ATTN_DEVICE_GATE_US = 50 };

typedef struct attn_device attn_device;

typedef struct attn_device_opts {
    int32_t ordinal;       // which device
    uint64_t arena_bytes;  // rounded up to what the device gives
    int arena_fd;          // the arena of a process that is gone, taken over: its arena_fd,
    uint64_t adopt_bytes;  // and its arena_bytes; 0 = an arena is made, arena_fd is not looked at
    uint64_t buffer_bytes; // of each buffer, on each side
    uint32_t max_rows;     // of a launch
} attn_device_opts;

// attn_device_buffer has one layout on both sides: byte i of host is byte i of device.
typedef struct attn_device_buffer {
    uint8_t *host;   // pinned
    uint8_t *device; // not to be dereferenced by the host
    uint64_t bytes;
} attn_device_buffer;

// attn_device_region is memory of the device that another process shares.
typedef struct attn_device_region {
    uint64_t address; // on the device; 0 = none
    uint64_t bytes;
    int fd;          // a descriptor that the other process can map it by; -1 = none
    uint64_t handle; // the maker's
} attn_device_region;

typedef struct attn_device_ops {
    // open makes the device ready, with its arena and buffers.  ATTND_ENOTSUP when it is not there
    // or cannot run the kernels, ATTND_ENOMEM, ATTND_ECUDA; *info is a line for an operator.
    // ATTND_EINVAL: the descriptor is no arena of this device and size.  The caller owns *out:
    // close, which accepts a device that was lost.  A descriptor that was taken over is *out's,
    // too.
    attnd_err (*open)(attn_device **out, const attn_device_opts *opts, attnd_errinfo *info);
    void (*close)(attn_device *d);

    // check_shape and check_row say what the device cannot do of what attn_check lets pass; of a
    // row, lengths, flags and which arrays are there, not where they lie.  ATTND_ENOTSUP with the
    // field.
    attnd_err (*check_shape)(const attn_shape *shape, attnd_errinfo *info);
    attnd_err (*check_row)(const attn_device *d, const attn_shape *shape, const attn_row *row,
                           attnd_errinfo *info);

    // plan: all pointers of the rows but rope and block_mask, and in these, are device addresses.
    // ATTND_EMSGSIZE: more than one launch can do, fewer rows or query tokens may fit.  An error
    // leaves nothing planned.
    attnd_err (*plan)(attn_device *d, uint32_t buffer, const attn_params *p, attn_choice *choice,
                      attnd_errinfo *info);
    attnd_err (*launch)(attn_device *d, uint32_t buffer, attnd_errinfo *info);
    attnd_err (*upload)(attn_device *d, uint32_t buffer, uint64_t off, uint64_t bytes,
                        attnd_errinfo *info);
    // uploaded says whether a launch would begin no sooner for waiting longer: the buffer's last
    // upload is known to have ended, or it is right in front of the launch anyway.  A launch waits
    // for it in any case.
    bool (*uploaded)(attn_device *d, uint32_t buffer);
    attnd_err (*download)(attn_device *d, uint32_t buffer, uint64_t off, uint64_t bytes,
                          attnd_errinfo *info);
    // move copies num_rows rows of row_bytes, pitch apart, within the arena (bytes from its start).
    // No two of the ranges overlap.
    attnd_err (*move)(attn_device *d, uint64_t dst, uint64_t src, uint64_t row_bytes,
                      uint64_t pitch, uint64_t num_rows, attnd_errinfo *info);
    // read and write copy between host memory and the arena, at off bytes from its start, beside
    // the order of the buffers' work: none of it may be using those bytes.  The copy has been made
    // when they return.  Any thread, also while another uses the device.
    attnd_err (*read)(attn_device *d, void *dst, uint64_t off, uint64_t bytes, attnd_errinfo *info);
    attnd_err (*write)(attn_device *d, uint64_t off, const void *src, uint64_t bytes,
                       attnd_errinfo *info);
    // pin makes host memory that these use faster for them; false: it stays as it is.  unpin undoes
    // it.  Any thread.
    bool (*pin)(attn_device *d, void *base, uint64_t bytes);
    void (*unpin)(attn_device *d, void *base);
    // region_make makes memory of at least bytes, all zero, for launches' q, k_new, v_new, out and
    // lse.  ATTND_ENOMEM, ATTND_ECUDA.  region_free gives it back; no work may use it any more.
    // Any thread, also while another uses the device.
    attnd_err (*region_make)(attn_device *d, uint64_t bytes, attn_device_region *out,
                             attnd_errinfo *info);
    void (*region_free)(attn_device *d, attn_device_region *r);
    // flags_map lets the device write host memory, whole pages that may be shared with other
    // processes; *address is where signal finds them.  flags_unmap undoes it; no work may use it
    // any more.  ATTND_ENOTSUP where the device cannot signal, ATTND_ECUDA.  Any thread, as
    // region_make.
    attnd_err (*flags_map)(attn_device *d, void *base, uint64_t bytes, uint64_t *address,
                           attnd_errinfo *info);
    void (*flags_unmap)(attn_device *d, void *base);
    // signal answers a pair (proto_region.h), in memory of flags_map or of a region, in the order
    // of the buffers' work: it stores ready = 0 and done = 1 at once.  What launches before it have
    // written can be seen by whoever sees it.
    attnd_err (*signal)(attn_device *d, uint64_t pair, attnd_errinfo *info);
    // launch_gated launches what is planned behind a gate: a kernel that waits until ready is
    // raised in a device pair, and then lets the launch begin, which is signaled behind.  If it is
    // not raised within ATTN_DEVICE_GATE_US nothing is launched, and nothing signaled, and the
    // upload is spent; passed, once the buffer's work has ended, says which it was, and for how
    // long the gate had waited.  gates says whether what is planned can be launched so, which is
    // worth it only when its upload has ended.  Not called where the device has no gates
    // (attn_device.waits).
    bool (*gates)(attn_device *d, uint32_t buffer);
    attnd_err (*launch_gated)(attn_device *d, uint32_t buffer, uint64_t pair, attnd_errinfo *info);
    bool (*passed)(attn_device *d, uint32_t buffer, uint32_t *waited_us);
    attnd_err (*mark)(attn_device *d, uint32_t buffer, attnd_errinfo *info);
    // ended: errors of what ran show here.
    attnd_err (*ended)(attn_device *d, uint32_t buffer, bool *ended, attnd_errinfo *info);
    // lost is true when the device will not work again in this process, whatever is called.
    bool (*lost)(attn_device *d);
    // spoilt, of a device that is lost: true when what lies in its arena may not be what was
    // written there, as after an error of its memory; false after an error of a kernel, which ends
    // at the access that is wrong.
    bool (*spoilt)(attn_device *d);
} attn_device_ops;

// attn_device is embedded first in a maker's own.
struct attn_device {
    const attn_device_ops *ops;
    char name[64];        // such as "NVIDIA H200"
    uint8_t uuid[16];     // tells it from every other device
    bool mps;             // contexts of processes are shared through NVIDIA's MPS
    bool waits;           // it has gates
    uint64_t region_unit; // regions are whole multiples of so many bytes
    const char *kernels;  // which of the maker's kernels it takes
    void *arena;          // device address, aligned to 256 bytes at least
    uint64_t arena_bytes;
    int arena_fd; // a descriptor that other processes can map the arena by; -1 = none
    attn_device_buffer buffers[ATTN_DEVICE_BUFFERS];
};

#endif
