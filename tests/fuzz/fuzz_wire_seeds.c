// One good message of each kind, laid out by hand from proto_wire.h.
#include <string.h>

#include "proto/proto_msg.h"
#include "tests/fuzz/fuzz_wire.h"

typedef struct builder {
    uint8_t *out;
    size_t end;
} builder;

static uint32_t add(builder *b, const void *data, size_t bytes) {
    size_t off = (size_t)proto_align(b->end);
    memcpy(b->out + off, data, bytes);
    b->end = off + bytes;
    return (uint32_t)off;
}

static const uint8_t ramp[512] = {1, 2, 3, 4, 5, 6, 7, 8};

static void seed_step(builder *b) {
    proto_step s = {.model = 1, .num_seqs = 2, .deadline_ms = 100, .commit_request = 9};
    proto_step_seq q[2] = {{.seq = 1, .new_len = 5}, {.seq = 2, .q_len = 3}};
    proto_commit c = {.step = 7, .num_seqs = 1};
    proto_commit_seq cs = {.accepted = 2};
    uint32_t at = add(b, &s, sizeof(s)), seqs = add(b, q, sizeof(q));
    q[0].tokens_off = add(b, ramp, 20);
    q[0].positions_off = add(b, ramp, 20);
    q[0].tree_off = add(b, ramp, 40);
    q[1].positions_off = add(b, ramp, 12);
    s.commit_off = add(b, &c, sizeof(c));
    uint32_t entry = add(b, &cs, sizeof(cs));
    cs.path_off = add(b, ramp, 8);
    memcpy(b->out + at, &s, sizeof(s));
    memcpy(b->out + seqs, q, sizeof(q));
    memcpy(b->out + entry, &cs, sizeof(cs));
}

static void seed_attend(builder *b) {
    proto_attend a = {.step = 2, .layer = ATTND_F16, .flags = PROTO_ATTEND_LSE};
    const uint32_t mask[5] = {1, 2, 0, 1, 2}; // proto_block_mask, start
    uint32_t at = add(b, &a, sizeof(a));
    a.q.off = add(b, ramp, 2 * 4 * 8 * 2);
    a.k.off = add(b, ramp, 2 * 2 * 16 * 2);
    a.k.stride_token = 32;
    a.k.stride_head = 16;
    a.v.off = add(b, ramp, 2 * 2 * 16 * 2);
    a.block_mask_off = add(b, mask, sizeof(mask));
    memcpy(b->out + at, &a, sizeof(a));
}

static void seed_attend1(builder *b) {
    proto_attend1 a = {.model = 1, .num_seqs = 1, .deadline_ms = 5};
    proto_attend1_seq s = {.seq = 3, .new_len = 2};
    uint32_t at = add(b, &a, sizeof(a)), seqs = add(b, &s, sizeof(s));
    s.positions_off = add(b, ramp, 8);
    a.q.off = add(b, ramp, 2 * 4 * 8 * 2);
    a.k.off = add(b, ramp, 2 * 2 * 8 * 2);
    a.v.off = add(b, ramp, 2 * 2 * 8 * 2);
    memcpy(b->out + at, &a, sizeof(a));
    memcpy(b->out + seqs, &s, sizeof(s));
}

static void seed_attend_all(builder *b) {
    const uint32_t mask[5] = {1, 2, 0, 1, 2}; // proto_block_mask, start
    proto_attend_all a = {.step = 9, .num_layers = 2};
    a.flags = PROTO_ATTEND_LSE | PROTO_ATTEND_BLOCK_MASK;
    a.k = (proto_region_tensor){.off = 4096, .stride_token = 64, .stride_head = 16};
    a.v = (proto_region_tensor){.off = 8192};
    a.out_off = 16384;
    a.lse_off = 32768;
    add(b, &a, sizeof(a));
    add(b, mask, sizeof(mask));
}

static void seed_commit(builder *b) {
    proto_commit c = {.step = 7, .num_seqs = 2};
    proto_commit_seq s[2] = {{.accepted = 2}, {.accepted = 1}};
    add(b, &c, sizeof(c));
    uint32_t at = add(b, s, sizeof(s));
    s[1].path_off = add(b, ramp, 4);
    memcpy(b->out + at, s, sizeof(s));
}

static void seed_attend_reply(builder *b) {
    proto_attend_reply r = {.rows = 2, .kernel = "cpu_scalar", .why = "only one"};
    uint32_t at = add(b, &r, sizeof(r));
    r.out_off = add(b, ramp, 256);
    r.lse_off = add(b, ramp, 8);
    memcpy(b->out + at, &r, sizeof(r));
}

static void seed_error(builder *b) {
    const proto_error e = {.detail = 3, .field = "kv_len", .text = "kv_len -3 is negative"};
    add(b, &e, sizeof(e));
}

static void seed_keep(builder *b) {
    const proto_seq_keep k = {.seq = 1, .ttl_ms = 1000, .name = "chat-17"};
    add(b, &k, sizeof(k));
}

static void seed_attach(builder *b) {
    const proto_seq_attach a = {.model = 1, .name = "chat-17"};
    add(b, &a, sizeof(a));
}

static void seed_hello(builder *b) {
    const char *text = "{\"client\":\"c\",\"tenant\":\"default\",\"session\":\"a1B2\"}";
    add(b, text, strlen(text));
}

static void seed_model(builder *b) {
    const char *text =
        "{\"name\":\"m\",\"digest\":\"000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d"
        "1e1f\",\"scale\":0.125,\"window\":[-1,0],\"sinks\":[1,-2.5e-3],\"kv_layer\":0,"
        "\"rope\":{\"inv_freq\":[1,0.5],\"interleaved\":true},\"layer_overrides\":[{\"rope\":null},"
        "{\"scale\":1}],\"t\":\"\\u00e9\\ud83d\\ude00\xc3\xa9\"}";
    add(b, text, strlen(text));
}

size_t fuzz_wire_seed(int i, uint8_t out[FUZZ_SEED_BYTES]) {
    static const struct {
        proto_op op;
        attnd_err status;
        void (*fill)(builder *b);
    } seeds[] = {
        {PROTO_STEP, ATTND_OK, seed_step},          {PROTO_ATTEND, ATTND_OK, seed_attend},
        {PROTO_DECODE, ATTND_OK, seed_attend1},     {PROTO_PREFILL, ATTND_OK, seed_attend1},
        {PROTO_COMMIT, ATTND_OK, seed_commit},      {PROTO_SEQ_KEEP, ATTND_OK, seed_keep},
        {PROTO_SEQ_ATTACH, ATTND_OK, seed_attach},  {PROTO_HELLO, ATTND_OK, seed_hello},
        {PROTO_MODEL_OPEN, ATTND_OK, seed_model},   {PROTO_STATS, ATTND_OK, seed_attend_reply},
        {PROTO_SEQ_FREE, ATTND_EINVAL, seed_error}, {PROTO_ATTEND_ALL, ATTND_OK, seed_attend_all},
    };
    if (i < 0 || (size_t)i >= sizeof(seeds) / sizeof(seeds[0])) {
        return 0;
    }
    memset(out, 0, FUZZ_SEED_BYTES);
    builder b = {out, PROTO_BODY};
    seeds[i].fill(&b);
    proto_write_header(out, seeds[i].op, 77, seeds[i].status, b.end);
    return b.end;
}
