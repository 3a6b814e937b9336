// Where things lie in a region: offsets, counts and strides of any value end in an error and never
// in an address.  Any thread.
#include "proto/proto_region.h"

attnd_err proto_region_array(uint64_t region_bytes, const char *field, uint64_t off, uint64_t bytes,
                             attnd_errinfo *info) {
    if (off % PROTO_REGION_ALIGN != 0) {
        return attnd_fail(info, ATTND_EINVAL, field, "%s: offset %llu is not a multiple of %d",
                          field, (unsigned long long)off, PROTO_REGION_ALIGN);
    }
    if (off > region_bytes || bytes > region_bytes - off) {
        return attnd_fail(info, ATTND_EINVAL, field,
                          "%s: %llu bytes at offset %llu do not lie in the region of %llu", field,
                          (unsigned long long)bytes, (unsigned long long)off,
                          (unsigned long long)region_bytes);
    }
    return ATTND_OK;
}

attnd_err proto_region_place(uint64_t region_bytes, const char *field, const proto_region_tensor *t,
                             const proto_tensor_shape *shape, proto_region_view *out,
                             attnd_errinfo *info) {
    uint64_t head = t->stride_head ? t->stride_head : shape->dim;
    uint64_t token = t->stride_token ? t->stride_token : shape->heads * shape->dim;
    if (head % PROTO_REGION_STRIDE != 0 || token % PROTO_REGION_STRIDE != 0) {
        return attnd_fail(info, ATTND_EINVAL, field,
                          "%s: strides %llu and %llu are not multiples of %d elements", field,
                          (unsigned long long)token, (unsigned long long)head, PROTO_REGION_STRIDE);
    }
    uint64_t bytes = proto_tensor_extent(shape, token, head);
    attnd_err err = proto_region_array(region_bytes, field, t->off, bytes, info);
    if (!err) {
        *out = (proto_region_view){t->off, bytes, (int64_t)token, (int64_t)head};
    }
    return err;
}
