// Layout of requests: offsets, copies, packing of strided tensors in the longest runs that lie
// together.
#include "proto/client/client_sheet.h"

#include <string.h>

void client_sheet_begin(client_sheet *s, uint8_t *msg, size_t fixed_bytes) {
    s->msg = msg;
    s->end = PROTO_BODY + fixed_bytes;
}

void client_sheet_set(client_sheet *s, uint64_t off, const void *data, size_t bytes) {
    if (s->msg) {
        memcpy(s->msg + off, data, bytes);
    }
}

uint32_t client_sheet_place(client_sheet *s, uint64_t bytes) {
    uint64_t off = proto_align(s->end);
    s->end = off + bytes;
    return (uint32_t)off;
}

uint32_t client_sheet_put(client_sheet *s, const void *data, uint64_t bytes) {
    if (!data) {
        return 0;
    }
    uint32_t off = client_sheet_place(s, bytes);
    client_sheet_set(s, off, data, bytes);
    return off;
}

proto_tensor client_sheet_put_tensor(client_sheet *s, const client_tensor *t) {
    if (!t->data) {
        return (proto_tensor){0};
    }
    uint64_t dim_bytes = t->dim * t->elem_bytes;
    uint64_t packed_bytes = t->heads * dim_bytes;
    uint64_t head_bytes = t->stride_head ? t->stride_head * t->elem_bytes : dim_bytes;
    uint64_t row_bytes = t->stride_token ? t->stride_token * t->elem_bytes : packed_bytes;
    uint32_t off = client_sheet_place(s, t->rows * packed_bytes);
    uint64_t runs = head_bytes == dim_bytes ? 1 : t->heads; // of a row
    uint64_t run_bytes = packed_bytes / runs;
    const uint8_t *from = t->data;
    uint64_t to = off;
    for (uint64_t row = 0; s->msg && row < t->rows; row++) {
        for (uint64_t run = 0; run < runs; run++) {
            client_sheet_set(s, to, from + row * row_bytes + run * head_bytes, run_bytes);
            to += run_bytes;
        }
    }
    return (proto_tensor){.off = off};
}
