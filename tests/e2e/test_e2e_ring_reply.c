// Room for replies on a ring: what does not fit is told by a status, and has not been done.
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "tests/e2e/ring_fixture.h"

static e2e_daemon d;
static char attach_path[128];

static void setup(void) {
    static const char *const flags[] = {"--set", "cache.memory=64MiB", "--set", "cache.slab=1MiB",
                                        NULL};
    memset(&d, 0, sizeof(d));
    e2e_start(&d, flags);
    snprintf(attach_path, sizeof(attach_path), "%s.attach", d.path);
}

static void teardown(void) {
    e2e_stop(&d);
}

// attach asks for a ring without saying hello.
static void attach(ring_client *r) {
    ATTND_CK_OK(ring_client_open(r, attach_path, 16, 1 << 20));
}

static void open_ring(ring_client *r) {
    attach(r);
    ATTND_CK_OK(call(r, PROTO_HELLO, 1, "{}", 2));
}

// submit_room sends a message of any op with so much room, and returns the completion.
static proto_ring_complete submit_room(ring_client *r, uint32_t op, uint64_t id, const void *body,
                                       size_t bytes, uint32_t room) {
    proto_ring_complete done = {.status = 1};
    proto_write_header(ring_client_data(r, 0), op, id, ATTND_OK, PROTO_BODY + bytes);
    memcpy(ring_client_data(r, PROTO_BODY), body, bytes);
    ring_client_submit(r, 0, (uint32_t)(PROTO_BODY + bytes), 65536, room, id);
    ring_client_bell(r);
    ck_assert(ring_client_wait(r, &done, 10000));
    ck_assert_uint_eq(done.user, id);
    return done;
}

START_TEST(a_place_below_the_least_gets_a_status_alone) {
    ring_client r;
    uint32_t model;
    open_ring(&r);
    open_seq(&r, &model);
    memset(ring_client_data(&r, 65536), 0xab, 512);
    proto_ring_complete done = submit_room(&r, PROTO_SEQ_CREATE, 20, &(proto_model){model, 0}, 8,
                                           PROTO_RING_MIN_REPLY - 1);
    ATTND_CK_ERR((attnd_err)done.status, ATTND_EMSGSIZE);
    ck_assert_uint_eq(done.reply_bytes, 0);
    for (int i = 0; i < 512; i++) {
        ck_assert_uint_eq(*ring_client_data(&r, 65536 + (uint64_t)i), 0xab);
    }
    done = submit_room(&r, PROTO_SEQ_CREATE, 20, &(proto_model){model, 0}, 8, PROTO_RING_MIN_REPLY);
    ATTND_CK_OK((attnd_err)done.status); // the id was not used up
    ck_assert_uint_eq(done.reply_bytes, 48);
    ring_client_close(&r);
}
END_TEST

START_TEST(hello_and_model_open_want_room_for_json) {
    ring_client r;
    attach(&r);
    proto_ring_complete done = submit_room(&r, PROTO_HELLO, 1, "{}", 2, PROTO_RING_JSON_REPLY - 1);
    ATTND_CK_ERR((attnd_err)done.status, ATTND_EMSGSIZE);
    ck_assert_uint_eq(done.reply_bytes, 264);                      // an error reply
    ATTND_CK_ERR(call(&r, PROTO_STATS, 2, NULL, 0), ATTND_ESTALE); // and no session
    done = submit_room(&r, PROTO_HELLO, 1, "{}", 2, PROTO_RING_JSON_REPLY);
    ATTND_CK_OK((attnd_err)done.status);
    done = submit_room(&r, PROTO_STATS, 3, "", 0, 264);
    ATTND_CK_ERR((attnd_err)done.status, ATTND_EMSGSIZE);
    ring_client_close(&r);
}
END_TEST

// open_many opens a step of as many read-only sequences as its reply needs more room for than the
// least.
enum { MANY = 64 };

static uint64_t open_many(ring_client *r, uint32_t room, attnd_err *err) {
    uint32_t model;
    open_seq(r, &model);
    struct {
        proto_step step;
        proto_step_seq seqs[MANY];
    } body = {.step = {.model = model, .num_seqs = MANY}};
    for (uint32_t i = 0; i < MANY; i++) {
        const void *reply;
        proto_model create = {.model = model};
        ATTND_CK_OK(ring_client_call(r, PROTO_SEQ_CREATE, 100 + i, &create, 8, &reply));
        memcpy(&body.seqs[i].seq, reply, 8);
    }
    proto_ring_complete done = submit_room(r, PROTO_STEP, 200, &body, sizeof(body), room);
    *err = (attnd_err)done.status;
    uint64_t step;
    memcpy(&step, ring_client_data(r, 65536 + PROTO_BODY), 8);
    return step;
}

START_TEST(a_step_that_cannot_be_told_is_not_open) {
    ring_client r;
    attnd_err err;
    open_ring(&r);
    open_many(&r, 32 + 16 + 8 * MANY - 1, &err);
    ATTND_CK_ERR(err, ATTND_EMSGSIZE);
    const void *reply;
    ATTND_CK_OK(ring_client_call(&r, PROTO_STATS, 300, NULL, 0, &reply));
    ck_assert_double_eq(e2e_number(reply, "steps"), 0);
    ring_client_close(&r);
}
END_TEST

START_TEST(a_commit_that_cannot_be_told_is_not_made) {
    ring_client r;
    attnd_err err;
    open_ring(&r);
    struct {
        proto_commit commit;
        proto_commit_seq seqs[MANY];
    } body = {.commit = {.step = open_many(&r, 32 + 16 + 8 * MANY, &err), .num_seqs = MANY}};
    ATTND_CK_OK(err);
    proto_attend attend = {.step = body.commit.step};
    ATTND_CK_OK(call(&r, PROTO_ATTEND, 201, &attend, sizeof(attend)));
    uint32_t room = 32 + 8 + 4 * MANY;
    proto_ring_complete done = submit_room(&r, PROTO_COMMIT, 202, &body, sizeof(body), room - 1);
    ATTND_CK_ERR((attnd_err)done.status, ATTND_EMSGSIZE);
    done = submit_room(&r, PROTO_COMMIT, 202, &body, sizeof(body), room);
    ATTND_CK_OK((attnd_err)done.status);
    ck_assert_uint_eq(done.reply_bytes, room);
    ring_client_close(&r);
}
END_TEST

// put lays a message with a body at a place of the data area, with its reply 2048 behind, and
// submits it without a doorbell.
static void put(ring_client *r, uint64_t at, uint32_t op, uint64_t id, const void *body,
                size_t bytes) {
    proto_write_header(ring_client_data(r, at), op, id, ATTND_OK, PROTO_BODY + bytes);
    memcpy(ring_client_data(r, at + PROTO_BODY), body, bytes);
    ring_client_submit(r, at, (uint32_t)(PROTO_BODY + bytes), at + 2048, 2048, id);
}

// open_tree opens a step of 4 rows, a root with 3 children, and attends its only layer.
static uint64_t open_tree(ring_client *r, uint32_t *model) {
    struct {
        proto_step step;
        proto_step_seq seq;
        uint64_t tree[4];
    } body = {.step = {.num_seqs = 1},
              .seq = {.seq = open_seq(r, model), .new_len = 4},
              .tree = {0x1, 0x3, 0x5, 0x9}};
    body.step.model = *model;
    body.seq.tree_off = PROTO_BODY + offsetof(__typeof__(body), tree);
    const void *reply;
    uint64_t step;
    ATTND_CK_OK(ring_client_call(r, PROTO_STEP, 20, &body, sizeof(body), &reply));
    memcpy(&step, reply, 8);
    struct {
        proto_attend attend;
        float q[32], k[32], v[32];
    } a = {.attend = {.step = step}};
    a.attend.q.off = PROTO_BODY + offsetof(__typeof__(a), q);
    a.attend.k.off = PROTO_BODY + offsetof(__typeof__(a), k);
    a.attend.v.off = PROTO_BODY + offsetof(__typeof__(a), v);
    ATTND_CK_OK(call(r, PROTO_ATTEND, 21, &a, sizeof(a)));
    return step;
}

// The commit's rows move while a later request pushes its id out of the window of kept replies:
// what was moved can be committed no more, so the step is gone, and the sequence as it was.
START_TEST(a_commit_refused_when_its_rows_have_moved_ends_the_step) {
    enum { COMMIT = 1000, CREATE = COMMIT + 1000 };
    ring_client r;
    uint32_t model;
    open_ring(&r);
    struct {
        proto_commit commit;
        proto_commit_seq seq;
        uint32_t path[2];
    } body = {.commit = {.step = open_tree(&r, &model), .num_seqs = 1},
              .seq = {.accepted = 2},
              .path = {0, 3}};
    body.seq.path_off = PROTO_BODY + offsetof(__typeof__(body), path);
    proto_model create = {.model = model};
    put(&r, 0, PROTO_COMMIT, COMMIT, &body, sizeof(body));
    put(&r, 8192, PROTO_SEQ_CREATE, CREATE, &create, sizeof(create));
    ring_client_bell(&r);
    for (int i = 0; i < 2; i++) {
        proto_ring_complete done;
        ck_assert(ring_client_wait(&r, &done, 30000));
        ATTND_CK_ERR((attnd_err)done.status, done.user == COMMIT ? ATTND_ESTALE : ATTND_OK);
    }
    ATTND_CK_ERR(call(&r, PROTO_COMMIT, CREATE + 1, &body, sizeof(body)), ATTND_ESTALE);
    const void *reply;
    ATTND_CK_OK(ring_client_call(&r, PROTO_STATS, CREATE + 2, NULL, 0, &reply));
    ck_assert_double_eq(e2e_number(reply, "steps"), 0);
    ck_assert_double_eq(e2e_number(reply, "blocks.in_use"), 0);
    ring_client_close(&r);
}
END_TEST

START_TEST(an_attend_writes_nothing_behind_its_place) {
    ring_client r;
    uint32_t model;
    open_ring(&r);
    step_body body = one_token(model, open_seq(&r, &model));
    body.step.model = model;
    const void *reply;
    ATTND_CK_OK(ring_client_call(&r, PROTO_STEP, 20, &body, sizeof(body), &reply));
    struct {
        proto_attend attend;
        float q[8], k[8], v[8];
    } a = {.attend = {.q = {.off = 104}, .k = {.off = 136}, .v = {.off = 168}}};
    memcpy(&a.attend.step, reply, 8);
    for (int i = 0; i < 8; i++) {
        a.v[i] = (float)i;
    }
    uint32_t room = 32 + 128 + 32; // out is [1, 1, 8] float32
    memset(ring_client_data(&r, 65536), 0xab, 512);
    proto_ring_complete done =
        submit_room(&r, PROTO_ATTEND, 21, &a, sizeof(a), PROTO_RING_MIN_REPLY);
    ATTND_CK_OK((attnd_err)done.status);
    ck_assert_uint_eq(done.reply_bytes, room);
    ck_assert_mem_eq(ring_client_data(&r, 65536 + 160), a.v, 32); // one key: out = v
    for (uint64_t i = room; i < 512; i++) {
        ck_assert_uint_eq(*ring_client_data(&r, 65536 + i), 0xab);
    }
    ring_client_close(&r);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_ring_reply");
    TCase *tc = tcase_create("reply");
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, a_place_below_the_least_gets_a_status_alone);
    tcase_add_test(tc, hello_and_model_open_want_room_for_json);
    tcase_add_test(tc, a_step_that_cannot_be_told_is_not_open);
    tcase_add_test(tc, a_commit_that_cannot_be_told_is_not_made);
    tcase_add_test(tc, a_commit_refused_when_its_rows_have_moved_ends_the_step);
    tcase_add_test(tc, an_attend_writes_nothing_behind_its_place);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
