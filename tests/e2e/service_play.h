// service_play is a client in tests of service mode: a model, some sequences of equal length, and
// tokens whose q, k and v are known by their number.  Checks inside are Check assertions.
#ifndef ATTND_TESTS_E2E_SERVICE_PLAY_H
#define ATTND_TESTS_E2E_SERVICE_PLAY_H

#include "proto/client/attnd.h"
#include "tests/e2e/harness.h"
#include "tests/e2e/service_device.h"

enum {
    PLAY_LAYERS = 4, // the last reads layer 1's K and V
    PLAY_HEADS = 8,
    PLAY_KV_HEADS = 2,
    PLAY_DIM = 64,
    PLAY_SEQS = 3,
    PLAY_MAX = 70, // tokens of a sequence in a step
    PLAY_MAX_ROWS = PLAY_SEQS * PLAY_MAX,
    PLAY_Q_ROW = PLAY_HEADS * PLAY_DIM,
    PLAY_KV_ROW = PLAY_KV_HEADS * PLAY_DIM,
    PLAY_ROW = PLAY_Q_ROW + 2 * PLAY_KV_ROW,
    PLAY_OUT = PLAY_LAYERS * PLAY_MAX_ROWS * PLAY_Q_ROW, // elements of all outputs of a step
};

typedef enum play_how {
    PLAY_MESSAGES, // over the ring, host memory
    PLAY_COPIED,   // service mode, tensors in memory of the client's own
    PLAY_REGION,   // in attnd_memory, q, k and v parts of one tensor
    PLAY_BUFFERS,  // in attnd_buffers
} play_how;

// play_tensors is a layer's: qkv [rows, PLAY_ROW] and out [rows, PLAY_Q_ROW], in bf16.
typedef struct play_tensors {
    uint16_t *qkv, *out;
} play_tensors;

typedef struct play {
    play_how how;
    attnd_client *c;
    uint32_t model, len;
    uint64_t seqs[PLAY_SEQS];
    service_stream *stream; // NULL over the ring
    play_tensors host[PLAY_LAYERS], device[PLAY_LAYERS];
    attnd_memory *qkv, *out;       // PLAY_REGION
    attnd_buffers *buffers;        // PLAY_BUFFERS
    int pause_ms;                  // of the stream, before each attend
    const attnd_block_mask *masks; // [PLAY_LAYERS], of the attends that follow; NULL = none
    attnd_errinfo info;
} play;

// PLAY_OK checks a call of a play's client, and says what it said.
#define PLAY_OK(p, expr)                                                                 \
    do {                                                                                 \
        attnd_err play_err = (expr);                                                     \
        ck_assert_msg(!play_err, "%s: %s: %s", attnd_errname(play_err), (p)->info.field, \
                      (p)->info.text);                                                   \
    } while (0)

// play_dial only connects.
attnd_err play_dial(play *p, const char *url, play_how how);
void play_begin(play *p, const char *url, play_how how);
// play_end closes; the stream is idle within ms.
void play_end(play *p, int ms);

attnd_err play_try_step(play *p, uint32_t rows, uint32_t deadline_ms, uint64_t *step);
uint64_t play_step(play *p, uint32_t rows);
// play_fill gives q, k and v of `rows` tokens of each sequence, the first of them number `first`,
// to all layers.
void play_fill(play *p, uint32_t first, uint32_t rows);
attnd_err play_attend(play *p, uint64_t step, uint32_t layer, uint32_t rows);
attnd_err play_try_commit(play *p, uint64_t step, uint32_t rows);
void play_commit(play *p, uint64_t step, uint32_t rows);

// play_read copies all outputs to out [PLAY_LAYERS, PLAY_SEQS * rows, PLAY_Q_ROW], in the stream.
void play_read(play *p, uint32_t rows, uint16_t *out);

// play_forward is a whole step, outputs read.
void play_forward(play *p, uint32_t rows, uint16_t *out);

// play_graph captures the attends of a token for each sequence.
service_graph *play_graph(play *p, uint64_t step);

// play_check compares an output row of layer 0 with attention over its tokens, in float64.
void play_check(const uint16_t *row, uint32_t seq, uint32_t token);

#endif
