// proto_msg checks and reads the messages of proto_wire.h.  Every function takes a message that may
// hold anything, reads each of its bytes at most once (into the caller's memory), and never reads
// outside it.  No allocation, except JSON.  Any thread.
#ifndef ATTND_PROTO_PROTO_MSG_H
#define ATTND_PROTO_PROTO_MSG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/proto_wire.h"

// proto_view is a message: bytes that somebody else owns.
typedef struct proto_view {
    const uint8_t *data;
    size_t bytes;
} proto_view;

// proto_op_name returns "attend", "?" for a number that is no op.
const char *proto_op_name(uint32_t op);

// proto_read_header reads and checks the header: EPROTO (too short, wrong magic, body_bytes is not
// the rest of the message, reserved field set, request 0), EVERSION.
attnd_err proto_read_header(proto_view msg, proto_header *out, attnd_errinfo *info);

// proto_read copies a fixed struct from the start of the body.  EPROTO when the body is shorter;
// when exact, also when it is longer.
attnd_err proto_read(proto_view msg, void *out, size_t bytes, bool exact, attnd_errinfo *info);

// proto_array returns a pointer to count elements of elem_bytes at off, inside the message and
// behind the header and fixed bytes.  EPROTO with the field's name: off is not a multiple of 8, or
// the array does not fit.  Products cannot overflow.  Elements may change under a reader when the
// message lies in shared memory: copy, then check.
attnd_err proto_array(proto_view msg, const char *field, uint64_t off, uint64_t count,
                      uint64_t elem_bytes, size_t fixed, const void **out, attnd_errinfo *info);

// proto_tensor_shape is what the daemon knows of a model when it reads tensors for it.
typedef struct proto_tensor_shape {
    uint64_t rows, heads, dim;
    attnd_dtype dtype;
} proto_tensor_shape;

// proto_read_tensor checks that a tensor of that shape lies in the message, fills in default
// strides, and returns its first element; *out = NULL when off = 0.
attnd_err proto_read_tensor(proto_view msg, const char *field, const proto_tensor *t,
                            const proto_tensor_shape *shape, size_t fixed, const void **out,
                            int64_t *stride_token, int64_t *stride_head, attnd_errinfo *info);

// proto_check_name checks that a fixed name is NUL-terminated, zero-padded and printable ASCII.
attnd_err proto_check_name(const char name[PROTO_NAME_BYTES], const char *field, bool may_be_empty,
                           attnd_errinfo *info);

#endif
