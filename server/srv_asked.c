// What a packet may ask for.  Pure.
#include "server/srv_asked.h"

#include <stdbool.h>

static attnd_err check_flags(const srv_asked *in, size_t bytes, attnd_errinfo *info) {
    uint32_t flags = in->attach.flags;
    bool arena = (flags & PROTO_ATTACH_ARENA) != 0, region = (flags & PROTO_ATTACH_REGION) != 0;
    if (flags & ~(uint32_t)(PROTO_ATTACH_ARENA | PROTO_ATTACH_REGION)) {
        return attnd_fail(info, ATTND_EINVAL, "flags", "unknown flags 0x%x", flags);
    }
    if (arena && region) {
        return attnd_fail(info, ATTND_EINVAL, "flags", "a ring has the arena or a region");
    }
    if (arena && in->attach.session) {
        return attnd_fail(info, ATTND_EINVAL, "flags", "a ring that joins gets no arena");
    }
    size_t need = region ? sizeof(*in) : sizeof(in->attach);
    if (bytes != need) {
        return attnd_fail(info, ATTND_EPROTO, "flags", "%zu bytes, not %zu", bytes, need);
    }
    return ATTND_OK;
}

static attnd_err check_region(const proto_region_ask *r, attnd_errinfo *info) {
    if (r->bytes == 0) {
        return attnd_fail(info, ATTND_EINVAL, "region.bytes", "a region of 0 bytes");
    }
    if (r->num_flags < 1 || r->num_flags > PROTO_REGION_MAX_FLAGS) {
        return attnd_fail(info, ATTND_EINVAL, "region.num_flags", "%u flags: not 1 to %d",
                          r->num_flags, PROTO_REGION_MAX_FLAGS);
    }
    const uint32_t known = PROTO_REGION_MPS | PROTO_REGION_PAIRS;
    return proto_check_zero(r->flags & ~known, "region.flags", info);
}

attnd_err srv_asked_check(const srv_asked *in, size_t bytes, attnd_errinfo *info) {
    const proto_attach *a = &in->attach;
    if (bytes < sizeof(*a) || a->magic != PROTO_RING_MAGIC) {
        return attnd_fail(info, ATTND_EPROTO, "magic", "%zu bytes that are no proto_attach", bytes);
    }
    if (a->version != PROTO_VERSION) {
        return attnd_fail(info, ATTND_EVERSION, "version", "version %u", a->version);
    }
    attnd_err err = proto_check_zero(a->reserved2, "reserved", info);
    if (!err) {
        err = check_flags(in, bytes, info);
    }
    if (!err && (a->flags & PROTO_ATTACH_REGION)) {
        err = check_region(&in->region, info);
    }
    bool has_secret = a->session || (a->flags & PROTO_ATTACH_ARENA);
    for (size_t i = 0; !err && !has_secret && i < sizeof(a->secret); i++) {
        err = proto_check_zero(a->secret[i], "secret", info);
    }
    return err;
}
