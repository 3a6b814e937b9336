// The layout of a ring's region, which both ends compute from what the client asked for, so that
// neither has to believe what is written in it.  Any thread.
#include "proto/proto_ring.h"

enum { PAGE = 4096 };

static const uint64_t max_data_bytes = UINT64_C(1) << 40;

static uint64_t round_up(uint64_t bytes) {
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

attnd_err proto_ring_layout_make(proto_ring_layout *out, uint32_t entries, uint64_t data_bytes,
                                 attnd_errinfo *info) {
    if (entries < PROTO_RING_MIN_ENTRIES || entries > PROTO_RING_MAX_ENTRIES ||
        (entries & (entries - 1)) != 0) {
        return attnd_fail(info, ATTND_EINVAL, "entries",
                          "%u entries: not a power of two of %d to %d", entries,
                          PROTO_RING_MIN_ENTRIES, PROTO_RING_MAX_ENTRIES);
    }
    if (data_bytes == 0) {
        return attnd_fail(info, ATTND_EINVAL, "data_bytes", "a ring needs a data area");
    }
    if (data_bytes > max_data_bytes) {
        return attnd_fail(info, ATTND_EMSGSIZE, "data_bytes", "%llu bytes of data are too many",
                          (unsigned long long)data_bytes);
    }
    out->entries = entries;
    out->sq_off = PROTO_RING_HEAD_BYTES;
    out->cq_off = out->sq_off + (uint64_t)entries * sizeof(proto_ring_submit);
    out->data_off = round_up(out->cq_off + (uint64_t)entries * sizeof(proto_ring_complete));
    out->data_bytes = round_up(data_bytes);
    out->bytes = out->data_off + out->data_bytes;
    return ATTND_OK;
}
