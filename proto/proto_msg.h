// proto_msg checks, reads and writes the messages of proto_wire.h.  A message that is read may hold
// anything: each byte is read at most once (into the caller's memory), none outside the message.
// No allocation.  Any thread.  (TRY below stands for: return when it fails.)
//
//     proto_header h;
//     proto_step step;
//     const void *seqs;
//     TRY(proto_read_header(msg, &h, &info));                      // whatever the op
//     TRY(proto_read(msg, &step, sizeof(step), false, &info));     // h.op is PROTO_STEP
//     TRY(proto_array(msg, "num_seqs", PROTO_BODY + sizeof(step), step.num_seqs,
//                           sizeof(proto_step_seq), sizeof(step), &seqs, &info));
//     proto_copy(&seq, (const char *)seqs + i * sizeof(seq), sizeof(seq));   // one after another
//
// Alignment.  A message need only be aligned to 4 bytes (NNG delivers 16 n + 4), and so are the
// arrays in it: copy structs and 64-bit elements, never read them through a pointer of their type.
#ifndef ATTND_PROTO_PROTO_MSG_H
#define ATTND_PROTO_PROTO_MSG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "proto/proto_wire.h"

enum { PROTO_BODY = sizeof(proto_header) }; // offset of the body

// proto_view is a message: bytes that somebody else owns, aligned to 4.
typedef struct proto_view {
    const uint8_t *data;
    size_t bytes;
} proto_view;

// proto_op_name returns "attend", "?" for a number that is no op.
const char *proto_op_name(uint32_t op);

// proto_op_parse is the inverse; returns 0 for a name that is none.
uint32_t proto_op_parse(const char *name);

// ---- reading

// proto_copy copies bytes of a message out of it, once: the compiler may not read them again where
// the copy is used.  A message in shared memory may change at any moment, so whatever is checked is
// copied by this first.
static inline void proto_copy(void *out, const void *in, size_t bytes) {
    memcpy(out, in, bytes);
    __asm__ volatile("" : : : "memory");
}

// proto_read_header reads and checks the header of a request: EPROTO (too short, wrong magic,
// body_bytes is not the rest of the message, request 0), EVERSION, EINVAL (flags, status or
// reserved field set).  With EVERSION and EINVAL *out is filled all the same, so that the error
// reply can repeat op and request.  Whether op is one is the caller's look-up.
attnd_err proto_read_header(proto_view msg, proto_header *out, attnd_errinfo *info);

// proto_read_reply checks a reply to `request` of `op`.  When it carries an error, that is what
// comes back, with its field and text in *info; EPROTO when it is no such reply.
attnd_err proto_read_reply(proto_view msg, uint32_t op, uint64_t request, attnd_errinfo *info);

// proto_read copies a fixed struct from the start of the body.  EPROTO when the body is shorter;
// when exact, also when it is longer.
attnd_err proto_read(proto_view msg, void *out, size_t bytes, bool exact, attnd_errinfo *info);

// proto_array returns a pointer to count elements of elem_bytes at off, inside the message and
// behind the header and fixed bytes; *out = NULL when off = 0.  EPROTO with the field's name: off
// is not a multiple of 8, or the array does not fit.  Products cannot overflow.  Elements may
// change under a reader when the message lies in shared memory: copy, then check.
attnd_err proto_array(proto_view msg, const char *field, uint64_t off, uint64_t count,
                      uint64_t elem_bytes, size_t fixed, const void **out, attnd_errinfo *info);

// proto_tensor_shape is what the daemon knows of a model when it reads tensors for it.  heads and
// dim are at least 1.
typedef struct proto_tensor_shape {
    uint64_t rows, heads, dim;
    attnd_dtype dtype;
} proto_tensor_shape;

// proto_tensor_extent returns the bytes from a tensor's first to behind its last element, 0 without
// rows; UINT64_MAX when that is more than 64 bits hold.
uint64_t proto_tensor_extent(const proto_tensor_shape *shape, uint64_t stride_token,
                             uint64_t stride_head);

// proto_read_tensor checks that a tensor of that shape lies in the message, fills in default
// strides, and returns its first element; *out = NULL when off = 0.  EPROTO: off is not a multiple
// of 8, or the last element lies outside; EINVAL: reserved field set.
attnd_err proto_read_tensor(proto_view msg, const char *field, const proto_tensor *t,
                            const proto_tensor_shape *shape, size_t fixed, const void **out,
                            int64_t *stride_token, int64_t *stride_head, attnd_errinfo *info);

// proto_check_zero is EINVAL with the field's name unless value (a reserved field, the unknown bits
// of flags) is 0.
attnd_err proto_check_zero(uint64_t value, const char *field, attnd_errinfo *info);

// proto_check_name checks that a fixed name is NUL-terminated, zero-padded and printable ASCII:
// EINVAL.
attnd_err proto_check_name(const char name[PROTO_NAME_BYTES], const char *field, bool may_be_empty,
                           attnd_errinfo *info);

// proto_copy_text copies a peer's text of bytes, cut at its NUL and terminated in any case; what is
// not printable ASCII becomes '?'.
void proto_copy_text(char *out, const char *text, size_t bytes);

// ---- writing

// proto_align rounds an offset up to where an array may begin.
static inline uint64_t proto_align(uint64_t off) {
    return (off + 7) & ~UINT64_C(7);
}

// proto_write_header writes the header of a message of msg_bytes, header included, to its start.
void proto_write_header(void *msg, uint32_t op, uint64_t request, attnd_err status,
                        size_t msg_bytes);

// proto_write_error writes a whole error reply.  The code is info->code, which must not be 0.
enum { PROTO_ERROR_BYTES = sizeof(proto_header) + sizeof(proto_error) };
void proto_write_error(void *msg, uint32_t op, uint64_t request, const attnd_errinfo *info);

#endif
