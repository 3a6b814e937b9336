// client_sheet lays out a request: fixed structs first, then arrays at aligned offsets.  A layout
// function runs twice: on a sheet without a message it measures, then it writes, so that sizes and
// offsets come from one place and nothing grows.  Tensors are packed on the way: what lies in the
// message is contiguous, whatever the caller's strides.  Call one function after another, not in
// one initializer: C does not order those.  Any thread; one sheet is one thread's.
#ifndef ATTND_PROTO_CLIENT_CLIENT_SHEET_H
#define ATTND_PROTO_CLIENT_CLIENT_SHEET_H

#include <stddef.h>
#include <stdint.h>

#include "proto/proto_msg.h"

typedef struct client_sheet {
    uint8_t *msg; // NULL = measure only
    uint64_t end; // bytes so far, header included
} client_sheet;

// client_sheet_begin starts behind the header and fixed_bytes.
void client_sheet_begin(client_sheet *s, uint8_t *msg, size_t fixed_bytes);

// client_sheet_set writes a struct at off, which was placed before.
void client_sheet_set(client_sheet *s, uint64_t off, const void *data, size_t bytes);

// client_sheet_place makes room for bytes and returns their offset.  It is cut to 32 bits: a
// message is measured, and refused when it is too large, before an offset is written.
uint32_t client_sheet_place(client_sheet *s, uint64_t bytes);

// client_sheet_put copies an array and returns its offset; 0 when data is NULL.
uint32_t client_sheet_put(client_sheet *s, const void *data, uint64_t bytes);

// client_tensor is [rows, heads, dim] of the caller, dim contiguous.
typedef struct client_tensor {
    const void *data; // NULL = not there
    uint64_t rows, heads, dim, elem_bytes;
    uint64_t stride_token, stride_head; // elements; 0 = contiguous
} client_tensor;

// client_sheet_put_tensor copies a tensor and says where it is.
proto_tensor client_sheet_put_tensor(client_sheet *s, const client_tensor *t);

#endif
