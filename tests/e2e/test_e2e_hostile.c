// Hostile clients beside one that works: garbage, broken frames, lengths that lie, clients that do
// not read, that flood, and every prefix and every field of every message set to its ends.  The one
// that works must not notice.
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tests/e2e/play.h"
#include "tests/e2e/raw.h"

static e2e_daemon d;
static e2e_client good;
static play_model m;
static play_seq s;

static void begin(const char *const *flags) {
    memset(&d, 0, sizeof(d));
    e2e_start(&d, flags);
    e2e_connect(&good, d.url);
    play_hello(&good, "good");
    m = play_tiny();
    m.name = "of the good one";
    play_open(&good, &m);
    play_create(&good, &m, &s);
}

// still_good is true when a step with its checks takes no longer than a second.
static void still_good(void) {
    play_seq *const seqs[] = {&s};
    uint64_t start = e2e_now_ms();
    play_token(&good, seqs, 1, 1);
    ck_assert_uint_le(e2e_now_ms() - start, 1000);
}

// end wants everything of others to be gone, but for sequences that seq_keep kept.
static void end(uint32_t op) {
    still_good();
    e2e_await_stat(&good, "sessions", 1, 3000);
    ck_assert_double_eq(e2e_stat(&good, "steps"), 0);
    ck_assert_double_eq(e2e_stat(&good, "blocks.in_use"), (s.len + 15) / 16);
    if (op != PROTO_SEQ_KEEP) {
        e2e_await_stat(&good, "models", 1, 1000);
        ck_assert_double_eq(e2e_stat(&good, "sequences"), 1);
    }
    ck_assert_double_eq(e2e_stat(&good, "accounting_mismatches"), 0);
    play_free(&good, &s);
    ck_assert_double_eq(e2e_stat(&good, "blocks.in_use"), 0);
    e2e_close(&good);
    e2e_stop(&d);
}

static const char *const plain[] = {
    "--set", "cache.memory=32MiB",  "--set", "cache.slab=1MiB", "--set", "limits.connections=128",
    "--set", "limits.message=2MiB", NULL};

// ---- every message, cut and changed

// victim is a client that sends broken messages, with what a whole one needs.
typedef struct victim {
    e2e_client c;
    play_model m, one;
    play_seq s, lone;
    play_step step; // open, all layers attended
} victim;

static void victim_init(victim *v) {
    e2e_connect(&v->c, d.url);
    play_hello(&v->c, "victim");
    v->m = play_tiny();
    v->one = play_one();
    play_open(&v->c, &v->m);
    play_open(&v->c, &v->one);
    play_create(&v->c, &v->m, &v->s);
    play_create(&v->c, &v->one, &v->lone);
    play_part part = {.seq = &v->s, .new_len = 2};
    ATTND_CK_OK(play_step_open(&v->c, &v->m, &part, 1, 0, &v->step, NULL));
    play_attend(&v->c, &v->step, 0);
    play_attend(&v->c, &v->step, 1);
}

static void victim_fini(victim *v) {
    e2e_close(&v->c);
    play_forget(&v->s);
    play_forget(&v->lone);
}

static const char model_json[] =
    "{\"name\":\"x\",\"digest\":"
    "\"0000000000000000000000000000000000000000000000000000000000000000\",\"dtype\":\"f32\","
    "\"layers\":1,\"q_heads\":2,\"kv_heads\":1,\"head_dim\":8,\"window\":[3,0],\"sinks\":[1,2],"
    "\"rope\":{\"inv_freq\":[1,0.5]}}";

// build writes a whole message of an op that would succeed.
static void build(victim *v, uint32_t op, e2e_buf *b) {
    static const uint64_t tree[2] = {1, 3};
    static const int32_t positions[2] = {4, 5};
    static const uint32_t tokens[2] = {8, 9};
    uint64_t id = ++v->c.id;
    proto_model model = {.model = v->m.id};
    proto_seq seq = {.seq = v->lone.handle};
    proto_seq_keep keep = {.seq = v->lone.handle, .ttl_ms = 5, .name = "n"};
    proto_seq_attach attach = {.model = v->m.id, .name = "n"};
    proto_cancel cancel = {.step = v->step.handle};
    proto_attend_all all = {.step = v->step.handle, .num_layers = 2, .lse_off = PROTO_REGION_NONE};
    play_step lone = {.model = &v->one, .num = 1, .rows = 2, .new_rows = 2};
    lone.parts[0] = (play_part){.seq = &v->lone, .new_len = 2, .positions = positions};
    play_part part = {.seq = &v->lone, .new_len = 2, .positions = positions, .tree = tree};
    play_tensors t = play_random(&v->step);
    switch (op) {
    case PROTO_HELLO:
        e2e_buf_init(b, op, id, "{\"client\":\"x\"}", 14);
        break;
    case PROTO_MODEL_OPEN:
        e2e_buf_init(b, op, id, model_json, sizeof(model_json) - 1);
        break;
    case PROTO_MODEL_CLOSE:
    case PROTO_SEQ_CREATE:
        e2e_buf_init(b, op, id, &model, sizeof(model));
        break;
    case PROTO_SEQ_FORK:
    case PROTO_SEQ_TRUNCATE:
    case PROTO_SEQ_FREE:
        e2e_buf_init(b, op, id, &seq, sizeof(seq));
        break;
    case PROTO_SEQ_KEEP:
        e2e_buf_init(b, op, id, &keep, sizeof(keep));
        break;
    case PROTO_SEQ_ATTACH:
        e2e_buf_init(b, op, id, &attach, sizeof(attach));
        break;
    case PROTO_STEP:
        play_step_body(b, id, &v->one, &part, 1, 5);
        proto_step_seq in;
        memcpy(&in, b->data + PROTO_BODY + sizeof(proto_step), sizeof(in));
        in.tokens_off = e2e_buf_add(b, tokens, sizeof(tokens));
        e2e_buf_set(b, sizeof(proto_step), &in, sizeof(in));
        e2e_buf_seal(b);
        break;
    case PROTO_ATTEND:
        play_attend_body(b, id, &v->step, 1, PROTO_ATTEND_LSE, &t);
        break;
    case PROTO_ATTEND_ALL: // refused here: only rings have a region
        e2e_buf_init(b, op, id, &all, sizeof(all));
        break;
    case PROTO_COMMIT:
        play_commit_body(b, id, &v->step, NULL);
        break;
    case PROTO_CANCEL:
        e2e_buf_init(b, op, id, &cancel, sizeof(cancel));
        break;
    case PROTO_DECODE:
    case PROTO_PREFILL:
        play_attend1_body(b, op, id, &lone, 5, &t);
        break;
    default: // lists and stats
        e2e_buf_init(b, op, id, NULL, 0);
    }
    play_tensors_fini(&t);
}

static const uint32_t ops[] = {
#define XX(name, code, text) PROTO_##name,
    PROTO_OP_MAP(XX)
#undef XX
};
enum { NUM_OPS = sizeof(ops) / sizeof(ops[0]) };

// ck_cut sends the first n bytes: an error, or, without a whole header (c is NULL then), a closed
// connection.
static void ck_cut(raw_client *c, uint32_t op, const uint8_t *data, size_t n) {
    raw_client lone;
    uint8_t *msg;
    size_t bytes;
    if (!c) {
        raw_open(&lone, d.path);
        ck_assert(raw_send(&lone, data, n, 1000));
        ck_assert_msg(raw_closed(&lone, 5000), "%s cut to %zu bytes", proto_op_name(op), n);
        raw_close(&lone);
        return;
    }
    ck_assert(raw_send(c, data, n, 1000));
    ck_assert_msg(raw_recv(c, &msg, &bytes), "%s cut to %zu bytes: closed", proto_op_name(op), n);
    proto_header h;
    memcpy(&h, msg, sizeof(h));
    ck_assert_msg(h.status < 0, "%s cut to %zu bytes", proto_op_name(op), n);
    free(msg);
}

START_TEST(every_prefix_of_every_message_is_an_error) {
    uint32_t op = ops[_i];
    victim v;
    e2e_buf b;
    begin(plain);
    victim_init(&v);
    build(&v, op, &b);
    raw_client whole;
    raw_open(&whole, d.path);
    for (size_t n = 0; n < b.bytes; n++) {
        // As it is: the header says more than there is.
        ck_cut(n < PROTO_BODY ? NULL : &whole, op, b.data, n);
        // With a header that is right about it, from a client with a session.
        if (n > PROTO_BODY) {
            e2e_buf cut = {malloc(n), n};
            memcpy(cut.data, b.data, n);
            e2e_buf_seal(&cut);
            attnd_err err = e2e_call_raw(&v.c, cut.data, n, NULL);
            ck_assert_msg(err != ATTND_OK && err != ATTND_ECONN, "%s cut to %zu bytes: %s",
                          proto_op_name(op), n, attnd_errname(err));
            e2e_buf_fini(&cut);
        }
    }
    still_good();
    raw_close(&whole);
    e2e_buf_fini(&b);
    victim_fini(&v);
    end(op);
}
END_TEST

// change sends a message with `bytes` bytes at off changed, and makes the victim anew when that
// changed more than the message.
static void change(victim *v, uint32_t op, size_t off, size_t bytes, uint64_t value) {
    e2e_buf b;
    e2e_reply r;
    build(v, op, &b);
    if (off + bytes <= b.bytes && memcmp(b.data + off, &value, bytes) != 0) {
        memcpy(b.data + off, &value, bytes);
        attnd_err err = e2e_call_raw(&v->c, b.data, b.bytes, &r);
        e2e_reply_fini(&r);
        if (err == ATTND_OK || err == ATTND_ECONN) {
            victim_fini(v);
            victim_init(v);
        }
    }
    e2e_buf_fini(&b);
}

START_TEST(every_field_of_every_message_at_its_ends_is_survived) {
    static const uint64_t values[] = {0,
                                      1,
                                      2,
                                      7,
                                      8,
                                      63,
                                      64,
                                      1024,
                                      1025,
                                      65536,
                                      65537,
                                      0x7fffffff,
                                      0x80000000,
                                      0xfffffff8,
                                      0xffffffff,
                                      0x100000000,
                                      0x7fffffffffffffff,
                                      0xffffffffffffffff};
    uint32_t op = ops[_i];
    victim v;
    e2e_buf b;
    begin(plain);
    victim_init(&v);
    build(&v, op, &b);
    size_t fields = b.bytes < 200 ? b.bytes : 200; // the fixed parts
    e2e_buf_fini(&b);
    for (size_t off = 4; off < fields; off += 4) {
        for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
            change(&v, op, off, 4, values[i]);
            if (off == 4) { // version and op are the short ones
                change(&v, op, 4, 2, values[i]);
                change(&v, op, 6, 2, values[i]);
            }
            if (off % 8 == 0) {
                change(&v, op, off, 8, values[i]);
            }
        }
        if (off % 32 == 0) {
            still_good();
        }
    }
    victim_fini(&v);
    end(op);
}
END_TEST

// ---- garbage

static uint64_t noise = 88172645463325252u;

static void fill_noise(uint8_t *p, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        noise ^= noise << 13;
        noise ^= noise >> 7;
        noise ^= noise << 17;
        p[i] = (uint8_t)noise;
    }
}

START_TEST(garbage_closes_the_connection_that_sent_it) {
    static uint8_t junk[4096];
    raw_client c;
    begin(plain);
    for (int i = 0; i < 40; i++) {
        fill_noise(junk, sizeof(junk));
        size_t bytes = (size_t)(noise % sizeof(junk)) + 16;
        if (i % 2) {
            raw_connect(&c, d.path); // no greeting at all
            junk[0] |= 1;
            raw_write(&c, junk, bytes);
        } else {
            raw_open(&c, d.path);
            junk[0] |= 1; // not the magic
            raw_send(&c, junk, bytes, 1000);
        }
        ck_assert_msg(raw_closed(&c, 5000), "garbage %d", i);
        raw_close(&c);
        if (i % 8 == 0) {
            still_good();
        }
    }
    ck_assert_double_eq(e2e_stat(&good, "transport.clients.closed_garbage"), 20);
    end(0);
}
END_TEST

START_TEST(a_length_that_lies_allocates_nothing) {
    raw_client c;
    begin(plain);
    static const uint8_t tops[] = {0x3f, 0x7f, 0x80, 0xff, 0x00};
    for (size_t i = 0; i < sizeof(tops); i++) {
        uint8_t frame[9] = {1, tops[i], 0, 0, 0, 0, 0x40, 0, 0}; // 2^62 and the like; 4 MiB
        raw_open(&c, d.path);
        raw_write(&c, frame, sizeof(frame));
        ck_assert(raw_closed(&c, 5000));
        raw_close(&c);
        still_good();
    }
    end(0);
}
END_TEST

START_TEST(a_message_above_the_limit_closes_its_connection) {
    static uint8_t big[(2 << 20) + 4096];
    e2e_client c;
    e2e_reply r;
    begin(plain);
    proto_header h = {.magic = PROTO_MAGIC,
                      .version = PROTO_VERSION,
                      .op = PROTO_STATS,
                      .request = 1,
                      .body_bytes = sizeof(big) - sizeof(h)};
    memcpy(big, &h, sizeof(h));
    e2e_connect(&c, d.url);
    ATTND_CK_ERR(e2e_call_raw(&c, big, sizeof(big), NULL), ATTND_ECONN);
    e2e_close(&c);
    // At the limit itself it is the op that says no.
    h.body_bytes = (2 << 20) - sizeof(h);
    memcpy(big, &h, sizeof(h));
    e2e_connect(&c, d.url);
    play_hello(&c, "large");
    ATTND_CK_ERR(e2e_call_raw(&c, big, 2 << 20, &r), ATTND_EMSGSIZE);
    e2e_reply_fini(&r);
    e2e_close(&c);
    end(0);
}
END_TEST

START_TEST(half_a_message_and_silence_cost_nothing) {
    raw_client c[10];
    begin(plain);
    for (int i = 0; i < 10; i++) {
        uint8_t frame[9] = {1, 0, 0, 0, 0, 0, 0x10, 0, 0}; // 1 MiB to come
        raw_open(&c[i], d.path);
        raw_write(&c[i], frame, sizeof(frame));
        raw_write(&c[i], frame, (size_t)i);
    }
    for (int i = 0; i < 5; i++) {
        still_good();
    }
    for (int i = 0; i < 10; i++) {
        raw_close(&c[i]);
    }
    end(0);
}
END_TEST

// ---- not reading, flooding

static void raw_call(raw_client *c, uint32_t op, const void *body, size_t bytes, uint8_t *out,
                     size_t out_bytes) {
    static uint64_t id;
    e2e_buf b;
    uint8_t *msg;
    size_t n;
    e2e_buf_init(&b, op, ++id, body, bytes);
    ck_assert(raw_send(c, b.data, b.bytes, 5000));
    ck_assert(raw_recv(c, &msg, &n));
    proto_header h;
    memcpy(&h, msg, sizeof(h));
    ck_assert_int_eq(h.status, 0);
    if (out) {
        ck_assert_uint_le(out_bytes, n - sizeof(h));
        memcpy(out, msg + sizeof(h), out_bytes);
    }
    free(msg);
    e2e_buf_fini(&b);
}

// make_many gives the client sequences enough for a seq_list of 1 MiB.
static void make_many(raw_client *c) {
    raw_call(c, PROTO_HELLO, "{}", 2, NULL, 0);
    char reply[64] = "";
    raw_call(c, PROTO_MODEL_OPEN, model_json, sizeof(model_json) - 1, (uint8_t *)reply, 40);
    proto_model model = {.model = (uint32_t)atoi(strchr(reply, ':') + 1)};
    for (int i = 0; i < 8300; i++) {
        raw_call(c, PROTO_SEQ_CREATE, &model, sizeof(model), NULL, 0);
    }
}

static const char *const many[] = {
    "--set", "cache.memory=32MiB",         "--set", "cache.slab=1MiB",
    "--set", "limits.connections=8",       "--set", "cache.max_sequences=8400",
    "--set", "cache.max_seq_blocks=64",    "--set", "limits.session_sequences=8400",
    "--set", "limits.send_timeout=1500ms", NULL};

START_TEST(a_client_that_never_reads_costs_the_others_nothing) {
    raw_client never, junk;
    e2e_buf b;
    uint8_t *msg;
    size_t bytes;
    begin(many);
    raw_open(&never, d.path);
    make_many(&never);
    e2e_buf_init(&b, PROTO_SEQ_LIST, 77, NULL, 0);
    ck_assert(raw_send(&never, b.data, b.bytes, 1000));
    ck_assert(raw_recv(&never, &msg, &bytes));
    ck_assert_uint_ge(bytes, 1 << 20); // a reply of a mebibyte
    free(msg);
    for (int i = 0; i < 60; i++) {
        ck_assert(raw_send(&never, b.data, b.bytes, 1000));
    }
    uint64_t start = e2e_now_ms();
    for (int i = 0; i < 10; i++) { // while a third sends garbage
        static const uint8_t frame[16] = {1, 0xff, 1, 2, 3};
        raw_open(&junk, d.path);
        raw_write(&junk, frame, sizeof(frame));
        play_seq *const seqs[] = {&s};
        play_token(&good, seqs, 1, 1);
        raw_close(&junk);
    }
    ck_assert_uint_le(e2e_now_ms() - start, 10000);
    e2e_await_stat(&good, "transport.clients.closed_slow", 1, 8000);
    ck_assert(raw_closed(&never, 3000));
    raw_close(&never);
    e2e_buf_fini(&b);
    end(0);
}
END_TEST

START_TEST(a_flood_above_twice_the_limit_closes_the_connection) {
    raw_client c;
    e2e_buf b;
    begin(many);
    raw_open(&c, d.path);
    make_many(&c);
    e2e_buf_init(&b, PROTO_SEQ_LIST, 77, NULL, 0);
    bool open = true;
    for (int i = 0; i < 400 && open; i++) {
        open = raw_send(&c, b.data, b.bytes, 1000);
    }
    ck_assert(raw_closed(&c, 5000));
    e2e_await_stat(&good, "transport.clients.closed_flood", 1, 1000);
    ck_assert_double_gt(e2e_stat(&good, "transport.clients.refused_busy"), 0);
    raw_close(&c);
    e2e_buf_fini(&b);
    end(0);
}
END_TEST

START_TEST(above_the_in_flight_limit_the_answer_is_busy_at_once) {
    e2e_client c;
    e2e_flight f[8];
    e2e_reply r;
    begin((const char *const[]){"--set", "cache.memory=4MiB", "--set", "cache.slab=1MiB", "--set",
                                "limits.in_flight=4", NULL});
    e2e_connect(&c, d.url);
    play_hello(&c, "busy");
    play_model tiny = play_tiny();
    play_seq q[6];
    play_step step;
    play_open(&c, &tiny);
    for (int i = 0; i < 6; i++) {
        play_create(&c, &tiny, &q[i]);
    }
    play_part part = {.seq = &q[5], .new_len = 200 * 16};
    ATTND_CK_OK(play_step_open(&c, &tiny, &part, 1, 0, &step, NULL));
    for (int i = 0; i < 4; i++) {
        e2e_buf b;
        part.seq = &q[i];
        play_step_body(&b, ++c.id, &tiny, &part, 1, 60000);
        e2e_send(&c, &f[i], b.data, b.bytes);
        e2e_buf_fini(&b);
    }
    e2e_await_stat(&good, "scheduler.waiting_for_blocks", 4, 1000);
    uint64_t start = e2e_now_ms();
    ATTND_CK_ERR(e2e_call(&c, PROTO_STATS, "", 0, NULL), ATTND_EBUSY);
    ATTND_CK_ERR(e2e_call(&c, PROTO_STATS, "", 0, NULL), ATTND_EBUSY);
    ck_assert_uint_le(e2e_now_ms() - start, 500);
    still_good();
    e2e_close(&c);
    for (int i = 0; i < 4; i++) {
        ATTND_CK_ERR(e2e_recv(&f[i], &r), ATTND_ECONN);
    }
    for (int i = 0; i < 6; i++) {
        play_forget(&q[i]);
    }
    end(0);
}
END_TEST

START_TEST(memory_of_one_connection_is_bounded) {
    e2e_client c;
    e2e_flight f;
    e2e_buf b;
    e2e_reply r;
    static int32_t positions[60000];
    begin((const char *const[]){"--set", "cache.memory=64MiB", "--set", "cache.slab=1MiB", "--set",
                                "limits.message=256KiB", "--set", "limits.connection_memory=512KiB",
                                NULL});
    e2e_connect(&c, d.url);
    play_hello(&c, "large");
    play_model tiny = play_tiny();
    play_seq q[3];
    play_step step;
    play_open(&c, &tiny);
    for (int i = 0; i < 3; i++) {
        play_create(&c, &tiny, &q[i]);
    }
    play_part part = {.seq = &q[0], .new_len = 60000};
    ATTND_CK_OK(play_step_open(&c, &tiny, &part, 1, 0, &step, NULL));
    part = (play_part){.seq = &q[1], .new_len = 60000, .positions = positions}; // 240 KB, waits
    play_step_body(&b, ++c.id, &tiny, &part, 1, 60000);
    e2e_send(&c, &f, b.data, b.bytes);
    e2e_await_stat(&good, "scheduler.waiting_for_blocks", 1, 1000);
    part.seq = &q[2]; // the second waits as well, the third is refused
    e2e_buf second;
    e2e_flight f2;
    play_step_body(&second, ++c.id, &tiny, &part, 1, 60000);
    e2e_send(&c, &f2, second.data, second.bytes);
    e2e_await_stat(&good, "scheduler.waiting_for_blocks", 2, 1000);
    ATTND_CK_ERR(e2e_call_raw(&c, b.data, b.bytes, &r), ATTND_EBUSY);
    e2e_reply_fini(&r);
    ck_assert_double_eq(e2e_stat(&c, "steps"), 3); // small ones still pass
    still_good();
    e2e_close(&c);
    ATTND_CK_ERR(e2e_recv(&f, &r), ATTND_ECONN);
    ATTND_CK_ERR(e2e_recv(&f2, &r), ATTND_ECONN);
    e2e_buf_fini(&b);
    e2e_buf_fini(&second);
    for (int i = 0; i < 3; i++) {
        play_forget(&q[i]);
    }
    end(0);
}
END_TEST

static Suite *suite(void) {
    Suite *all = suite_create("e2e_hostile");
    TCase *tc = tcase_create("hostile");
    tcase_set_timeout(tc, 200);
    tcase_add_loop_test(tc, every_prefix_of_every_message_is_an_error, 0, NUM_OPS);
    tcase_add_loop_test(tc, every_field_of_every_message_at_its_ends_is_survived, 0, NUM_OPS);
    tcase_add_test(tc, garbage_closes_the_connection_that_sent_it);
    tcase_add_test(tc, a_length_that_lies_allocates_nothing);
    tcase_add_test(tc, a_message_above_the_limit_closes_its_connection);
    tcase_add_test(tc, half_a_message_and_silence_cost_nothing);
    tcase_add_test(tc, a_client_that_never_reads_costs_the_others_nothing);
    tcase_add_test(tc, a_flood_above_twice_the_limit_closes_the_connection);
    tcase_add_test(tc, above_the_in_flight_limit_the_answer_is_busy_at_once);
    tcase_add_test(tc, memory_of_one_connection_is_bounded);
    suite_add_tcase(all, tc);
    return all;
}

CHECK_MAIN(suite)
