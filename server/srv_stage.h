// srv_stage moves the rows of a launch to a device and their outputs back: it packs q, k, v, tables
// and the rest from wherever they lie in host memory into a buffer of the device, makes rows that
// point there, and afterwards spreads out and lse.  One launch may need several fillings, since a
// buffer has a fixed size: srv_stage_fill takes as much as there is room for, and cuts a row that
// does not fit an empty buffer, first its new tokens, then its queries.
//
//     buffer, both sides   [ inputs ->          <- outputs ]
//
// A row may say that its tensors lie on the device; they are then used where they are, and only its
// table and other small arrays pass through the buffer.
//
// The submit thread's.  Does not allocate after srv_stage_init.
#ifndef ATTND_SERVER_SRV_STAGE_H
#define ATTND_SERVER_SRV_STAGE_H

#include <stdbool.h>
#include <stdint.h>

#include "attention/attn_device.h"

// SRV_STAGE_ON_DEVICE in attn_row.flags: q, k_new, v_new, out and lse are addresses of the device,
// in memory that is there until the launch has ended.  No one but srv_stage knows this flag.
#define SRV_STAGE_ON_DEVICE (1u << 31)

// srv_stage_row is where a row's outputs go.
typedef struct srv_stage_row {
    const attn_row *row;      // of the launch
    int32_t q_first, q_count; // the part of it
    uint64_t out_off, lse_off;
} srv_stage_row;

typedef struct srv_stage {
    const attn_device_buffer *buffer; // borrowed
    uint32_t max_rows;
    const attn_shape *shape;
    attn_row *rows;         // [max_rows], for the device
    attn_rope *ropes;       // [max_rows], likewise
    attn_block_mask *masks; // [max_rows], likewise
    srv_stage_row *hosts;   // [max_rows]
    uint32_t num_rows;
    uint64_t in_bytes, out_bytes;
    // arrays that lie in the buffer already, for rows that share them
    const float *sinks, *alibi_slopes, *k_scale, *v_scale, *inv_freq;
    uint64_t sinks_off, alibi_off, k_scale_off, v_scale_off, inv_freq_off;
} srv_stage;

// srv_stage_init makes the arrays.  ATTND_ENOMEM.  srv_stage_fini accepts one that is all zero.
attnd_err srv_stage_init(srv_stage *s, const attn_device_buffer *buffer, uint32_t max_rows);
void srv_stage_fini(srv_stage *s);

// srv_stage_min_bytes returns a size that one query token with everything of its row always fits,
// with tables of max_entries, masks and positions of up to step_bytes, in replies of up to
// reply_bytes.  One token of the largest model takes 4 MiB (q, k, v and out of 1024 heads of 256
// floats).  lse is laid out for all query tokens of a row; a reply that has it has out too, at
// least four times as large.
static inline uint64_t srv_stage_min_bytes(uint64_t max_entries, uint64_t step_bytes,
                                           uint64_t reply_bytes) {
    return (8u << 20) + max_entries * sizeof(uint32_t) + step_bytes + reply_bytes / 5;
}

// srv_stage_cursor says how far a launch has been filled in.  All zero: nothing.
typedef struct srv_stage_cursor {
    uint32_t row;     // of the launch
    int32_t appended; // new tokens of it that were taken
    int32_t queries;  // query tokens of its part that were taken
} srv_stage_cursor;

// srv_stage_limits bounds a filling further than the buffer does.
typedef struct srv_stage_limits {
    uint32_t rows;
    int32_t queries; // of one row
} srv_stage_limits;

// srv_stage_fill empties the stage and fills it from the cursor on, which it moves.  False: not
// even one token fits; the cursor stays.
bool srv_stage_fill(srv_stage *s, const attn_params *launch, srv_stage_cursor *at,
                    const srv_stage_limits *limits);

// srv_stage_halve makes the limits half of what the stage holds; false when that is one token.
bool srv_stage_halve(const srv_stage *s, srv_stage_limits *limits);

// srv_stage_params returns the launch as the device is to run it: pool and modes of the launch,
// rows of the stage, which stay the stage's.
attn_params srv_stage_params(const srv_stage *s, const attn_params *launch);

// srv_stage_spread copies the outputs, which the device has written to the buffer, to where the
// launch's rows want them.
void srv_stage_spread(const srv_stage *s);

#endif
