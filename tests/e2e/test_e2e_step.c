// Steps in all their forms: windows and layer groups, shared K and V, read-only rows, forks, trees
// with positions, aborts, and what a step refuses.
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tests/e2e/play.h"

static const char *const flags[] = {
    "--set", "cache.memory=64MiB",    "--set", "cache.slab=1MiB",
    "--set", "limits.connections=16", "--set", "limits.step_memory=64KiB",
    NULL};

static e2e_daemon d;
static e2e_client c;

static void setup(void) {
    memset(&d, 0, sizeof(d));
    e2e_start(&d, flags);
    e2e_connect(&c, d.url);
    play_hello(&c, "test");
}

static void teardown(void) {
    e2e_close(&c);
    e2e_stop(&d);
}

// converse runs a prompt of n tokens and a few more through a model, checked.
static void converse(play_model *m, uint32_t n) {
    play_seq s;
    play_open(&c, m);
    play_create(&c, m, &s);
    play_seq *const seqs[] = {&s};
    play_token(&c, seqs, 1, n);
    play_token(&c, seqs, 1, 1);
    play_token(&c, seqs, 1, 3);
    play_free(&c, &s);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 0);
}

START_TEST(layers_of_different_windows_are_groups_of_their_own) {
    play_model m = play_tiny();
    m.layers = 5;
    m.layer[1].window_left = 20;
    m.layer[3].window_left = 20;
    m.layer[4].window_left = 0;
    m.layer[4].window_right = 0;
    converse(&m, 70);
    char *models = e2e_json(&c, PROTO_MODEL_LIST, "");
    ck_assert_ptr_nonnull(strstr(models, "\"layers\":[1,3],\"window\":[20,-1]"));
    ck_assert_ptr_nonnull(strstr(models, "\"layers\":[0,2],\"window\":[-1,-1]"));
    ck_assert_ptr_nonnull(strstr(models, "\"layers\":[4],\"window\":[0,0]"));
    free(models);
}
END_TEST

START_TEST(a_layer_can_read_anothers_k_and_v) {
    play_model m = play_tiny();
    m.layers = 4;
    m.layer[2].kv_layer = 0;
    m.layer[3].kv_layer = 1;
    converse(&m, 40);
}
END_TEST

START_TEST(a_reader_waits_for_the_layer_it_reads) {
    play_model m = play_tiny();
    m.layers = 2;
    m.layer[1].kv_layer = 0;
    play_seq s;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_step step;
    ATTND_CK_OK(play_step_open(&c, &m, &(play_part){.seq = &s, .new_len = 2}, 1, 0, &step, NULL));
    play_tensors t = play_random(&step);
    e2e_buf b;
    play_attend_body(&b, ++c.id, &step, 1, 0, &t);
    ATTND_CK_ERR(e2e_call_raw(&c, b.data, b.bytes, NULL), ATTND_EINVAL);
    e2e_buf_fini(&b);
    play_tensors_fini(&t);
    play_attend(&c, &step, 0);
    play_attend(&c, &step, 1);
    ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    play_forget(&s);
}
END_TEST

START_TEST(other_geometries_have_the_references_outputs) {
    play_model m = play_tiny();
    m.q_heads = 6;
    m.kv_heads = 2;
    m.head_dim = 24;
    m.v_head_dim = 40;
    m.num_inv_freq = 6; // rotary_dim 12 of 24
    m.block_tokens = 7;
    m.layer[0].softcap = 3;
    m.layer[1].scale = 0.5f;
    converse(&m, 45);
    m = play_tiny();
    m.name = "encoder";
    m.not_causal = true;
    m.num_inv_freq = 0;
    converse(&m, 33);
    m = play_tiny();
    m.name = "mqa";
    m.q_heads = 16;
    m.kv_heads = 1;
    m.head_dim = m.v_head_dim = 64;
    m.block_tokens = 64;
    converse(&m, 100);
}
END_TEST

START_TEST(a_long_prefill_runs_in_chunks_and_is_exact) {
    play_model m = play_tiny();
    converse(&m, 700); // over one chunk of 512
}
END_TEST

START_TEST(a_read_only_step_changes_nothing) {
    play_model m = play_tiny();
    play_seq s;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_seq *const seqs[] = {&s};
    play_token(&c, seqs, 1, 30);
    play_step step;
    ATTND_CK_OK(play_step_open(&c, &m, &(play_part){.seq = &s, .q_len = 4}, 1, 0, &step, NULL));
    play_attend(&c, &step, 0);
    play_attend(&c, &step, 1);
    ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    ck_assert_uint_eq(s.len, 30);
    int32_t positions[3] = {100, 7, 0};
    ATTND_CK_OK(play_step_open(&c, &m, &(play_part){.seq = &s, .q_len = 3, .positions = positions},
                               1, 0, &step, NULL));
    play_attend(&c, &step, 0);
    play_attend(&c, &step, 1);
    ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    play_token(&c, seqs, 1, 1);
    play_free(&c, &s);
}
END_TEST

START_TEST(reading_and_writing_sequences_share_a_step) {
    play_model m = play_tiny();
    play_seq a, b;
    play_open(&c, &m);
    play_create(&c, &m, &a);
    play_create(&c, &m, &b);
    play_seq *const seqs[] = {&a, &b};
    play_token(&c, seqs, 2, 20);
    play_part parts[] = {{.seq = &a, .q_len = 3}, {.seq = &b, .new_len = 2}};
    play_step step;
    ATTND_CK_OK(play_step_open(&c, &m, parts, 2, 0, &step, NULL));
    play_attend(&c, &step, 0);
    play_attend(&c, &step, 1);
    ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    ck_assert_uint_eq(a.len, 20);
    ck_assert_uint_eq(b.len, 22);
    play_forget(&a);
    play_forget(&b);
}
END_TEST

START_TEST(a_step_without_rows_is_attended_and_committed) {
    play_model m = play_tiny();
    play_seq s;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_step step;
    ATTND_CK_OK(play_step_open(&c, &m, &(play_part){.seq = &s}, 1, 0, &step, NULL));
    play_attend(&c, &step, 0);
    play_attend(&c, &step, 1);
    ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    play_part parts[] = {{.seq = &s}, {.seq = NULL}};
    play_seq other;
    play_create(&c, &m, &other);
    parts[1] = (play_part){.seq = &other, .new_len = 5};
    ATTND_CK_OK(play_step_open(&c, &m, parts, 2, 0, &step, NULL));
    play_attend(&c, &step, 0);
    play_attend(&c, &step, 1);
    ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    play_forget(&s);
    play_forget(&other);
}
END_TEST

START_TEST(fewer_tokens_can_be_accepted_than_were_attended) {
    play_model m = play_tiny();
    play_seq s;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_seq *const seqs[] = {&s};
    play_token(&c, seqs, 1, 14);
    play_step step;
    play_part part = {.seq = &s, .new_len = 8, .reserve = 3};
    ATTND_CK_OK(play_step_open(&c, &m, &part, 1, 0, &step, NULL));
    play_attend(&c, &step, 0);
    play_attend(&c, &step, 1);
    uint32_t accepted[1] = {9};
    e2e_reply r;
    ATTND_CK_ERR(play_commit(&c, &step, accepted, &r), ATTND_EINVAL);
    ck_assert_str_eq(r.error.field, "accepted");
    e2e_reply_fini(&r);
    accepted[0] = 3;
    ATTND_CK_OK(play_commit(&c, &step, accepted, NULL));
    ck_assert_uint_eq(s.len, 17);
    play_token(&c, seqs, 1, 2); // attends the 17, and no rejected one
    ATTND_CK_OK(play_step_open(&c, &m, &part, 1, 0, &step, NULL));
    play_attend(&c, &step, 0);
    play_attend(&c, &step, 1);
    accepted[0] = 0;
    ATTND_CK_OK(play_commit(&c, &step, accepted, NULL));
    ck_assert_uint_eq(s.len, 19);
    play_token(&c, seqs, 1, 1);
    play_free(&c, &s);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 0);
}
END_TEST

START_TEST(a_fork_goes_its_own_way_from_the_middle_of_a_block) {
    play_model m = play_tiny();
    play_seq s, forks[3];
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_seq *const seqs[] = {&s};
    play_token(&c, seqs, 1, 21); // 16 tokens a block
    for (int i = 0; i < 3; i++) {
        play_fork(&c, &s, &forks[i]);
    }
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 2);
    play_seq *const all[] = {&s, &forks[0], &forks[1], &forks[2]};
    for (int i = 0; i < 15; i++) {
        play_token(&c, all, 4, 1);
    }
    for (int i = 0; i < 3; i++) {
        play_free(&c, &forks[i]);
    }
    play_token(&c, seqs, 1, 1);
    play_free(&c, &s);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 0);
}
END_TEST

// A tree of 6 rows behind the committed tokens; row 0 is the root:
//     0 -> 1 -> 3 -> 5
//     0 -> 2 -> 4
static const uint64_t tree[6] = {0x01, 0x03, 0x05, 0x0b, 0x15, 0x2b};
static const int32_t depth[6] = {0, 1, 1, 2, 2, 3};

static void commit_path(play_step *step, const uint32_t *path, uint32_t num, attnd_err want) {
    proto_commit head = {.step = step->handle, .num_seqs = 1};
    proto_commit_seq seq = {.accepted = num};
    e2e_buf b;
    e2e_buf_init(&b, PROTO_COMMIT, ++c.id, &head, sizeof(head));
    e2e_buf_add(&b, &seq, sizeof(seq));
    seq.path_off = e2e_buf_add(&b, path, num * sizeof(*path));
    e2e_buf_set(&b, sizeof(head), &seq, sizeof(seq));
    e2e_buf_seal(&b);
    ATTND_CK_ERR(e2e_call_raw(&c, b.data, b.bytes, NULL), want);
    e2e_buf_fini(&b);
}

// gather moves the accepted rows of the mirror together, the plain way.
static void gather(play_seq *s, const uint32_t *path, uint32_t num) {
    const play_model *m = s->model;
    for (uint32_t l = 0; l < m->layers; l++) {
        float *k = s->mirror[l], *v = k + (size_t)m->kv_heads * PLAY_MAX_TOKENS * m->head_dim;
        for (uint32_t h = 0; h < m->kv_heads; h++) {
            for (uint32_t j = 0; j < num; j++) {
                size_t base = (size_t)h * PLAY_MAX_TOKENS;
                memmove(k + (base + s->len + j) * m->head_dim,
                        k + (base + s->len + path[j]) * m->head_dim, m->head_dim * sizeof(*k));
                memmove(v + (base + s->len + j) * m->v_head_dim,
                        v + (base + s->len + path[j]) * m->v_head_dim, m->v_head_dim * sizeof(*v));
            }
        }
    }
    s->len += num;
}

START_TEST(an_accepted_path_of_a_tree_becomes_the_sequence) {
    play_model m = play_tiny();
    m.layers = 3;
    m.layer[1].window_left = 12;
    play_seq s;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_seq *const seqs[] = {&s};
    play_token(&c, seqs, 1, 29); // the tree spans a block's edge
    int32_t positions[6];
    for (int i = 0; i < 6; i++) {
        positions[i] = 29 + depth[i];
    }
    play_part part = {.seq = &s, .new_len = 6, .positions = positions, .tree = tree};
    play_step step;
    ATTND_CK_OK(play_step_open(&c, &m, &part, 1, 0, &step, NULL));
    for (uint32_t l = 0; l < 3; l++) {
        play_attend(&c, &step, l);
    }
    commit_path(&step, (const uint32_t[]){0, 2, 1}, 3, ATTND_EINVAL); // does not ascend
    commit_path(&step, (const uint32_t[]){0, 6}, 2, ATTND_EINVAL);    // is no row
    commit_path(&step, (const uint32_t[]){0, 2, 4}, 3, ATTND_OK);
    gather(&s, (const uint32_t[]){0, 2, 4}, 3);
    for (int i = 0; i < 3; i++) {
        play_token(&c, seqs, 1, 2);
    }
    play_free(&c, &s);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 0);
}
END_TEST

START_TEST(a_tree_of_many_words_is_masked_word_by_word) {
    enum { ROWS = 130 };
    static uint64_t wide[ROWS][3];
    static int32_t positions[ROWS];
    for (int i = 0; i < ROWS; i++) { // row i sees itself and every fourth row before it
        for (int j = i; j >= 0; j -= 4) {
            wide[i][j / 64] |= 1ull << (j % 64);
        }
        positions[i] = 5 + i / 4;
    }
    play_model m = play_tiny();
    play_seq s;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_seq *const seqs[] = {&s};
    play_token(&c, seqs, 1, 5);
    play_part part = {.seq = &s, .new_len = ROWS, .positions = positions, .tree = wide[0]};
    play_step step;
    ATTND_CK_OK(play_step_open(&c, &m, &part, 1, 0, &step, NULL));
    play_attend(&c, &step, 0);
    play_attend(&c, &step, 1);
    uint32_t path[33];
    for (uint32_t i = 0; i < 33; i++) {
        path[i] = 1 + 3 * i;
    }
    commit_path(&step, path, 33, ATTND_OK);
    gather(&s, path, 33);
    play_token(&c, seqs, 1, 1);
    play_free(&c, &s);
}
END_TEST

START_TEST(a_commit_names_the_first_layer_that_is_missing) {
    play_model m = play_tiny();
    m.layers = 4;
    play_seq s;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_step step;
    e2e_reply r;
    ATTND_CK_OK(play_step_open(&c, &m, &(play_part){.seq = &s, .new_len = 1}, 1, 0, &step, NULL));
    for (uint32_t l = 0; l < 4; l++) {
        ATTND_CK_ERR(play_commit(&c, &step, NULL, &r), ATTND_EINVAL);
        ck_assert_int_eq(r.error.detail, l == 2 ? 1 : l == 3 ? 1 : (int)l);
        e2e_reply_fini(&r);
        play_attend(&c, &step, l == 1 ? 2 : l == 2 ? 3 : l == 3 ? 1 : 0);
    }
    ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    ATTND_CK_ERR(play_commit(&c, &step, NULL, NULL), ATTND_ESTALE);
    play_forget(&s);
}
END_TEST

START_TEST(a_canceled_step_leaves_no_trace) {
    play_model m = play_tiny();
    play_seq s;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_seq *const seqs[] = {&s};
    play_token(&c, seqs, 1, 10);
    double before = e2e_stat(&c, "blocks.in_use");
    play_step step;
    ATTND_CK_OK(play_step_open(&c, &m, &(play_part){.seq = &s, .new_len = 40}, 1, 0, &step, NULL));
    play_attend(&c, &step, 0);
    ck_assert_double_gt(e2e_stat(&c, "blocks.in_use"), before);
    proto_cancel cancel = {.step = step.handle};
    ATTND_CK_OK(e2e_call(&c, PROTO_CANCEL, &cancel, sizeof(cancel), NULL));
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), before);
    ATTND_CK_ERR(e2e_call(&c, PROTO_CANCEL, &cancel, sizeof(cancel), NULL), ATTND_ESTALE);
    play_token(&c, seqs, 1, 10);
    play_free(&c, &s);
}
END_TEST

START_TEST(an_open_step_ends_at_its_deadline) {
    play_model m = play_tiny();
    play_seq s;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_step step;
    uint64_t start = e2e_now_ms();
    ATTND_CK_OK(play_step_open(&c, &m, &(play_part){.seq = &s, .new_len = 4}, 1, 150, &step, NULL));
    ck_assert_double_eq(e2e_stat(&c, "steps"), 1);
    e2e_await_stat(&c, "steps", 0, 2000);
    ck_assert_uint_ge(e2e_now_ms() - start, 149);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 0);
    play_tensors t = play_random(&step);
    e2e_buf b;
    play_attend_body(&b, ++c.id, &step, 0, 0, &t);
    ATTND_CK_ERR(e2e_call_raw(&c, b.data, b.bytes, NULL), ATTND_ESTALE);
    e2e_buf_fini(&b);
    play_tensors_fini(&t);
    play_seq *const seqs[] = {&s};
    play_token(&c, seqs, 1, 1);
    play_free(&c, &s);
}
END_TEST

START_TEST(a_sequence_has_one_open_step) {
    play_model m = play_tiny();
    play_seq s;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_step step, second;
    play_part part = {.seq = &s, .new_len = 4};
    ATTND_CK_OK(play_step_open(&c, &m, &part, 1, 0, &step, NULL));
    ATTND_CK_ERR(play_step_open(&c, &m, &part, 1, 0, &second, NULL), ATTND_EBUSY);
    proto_seq seq = {.seq = s.handle};
    ATTND_CK_ERR(e2e_call(&c, PROTO_SEQ_FREE, &seq, sizeof(seq), NULL), ATTND_EBUSY);
    ATTND_CK_ERR(e2e_call(&c, PROTO_SEQ_TRUNCATE, &seq, sizeof(seq), NULL), ATTND_EBUSY);
    ATTND_CK_OK(e2e_call(&c, PROTO_SEQ_FORK, &seq, sizeof(seq), NULL));
    play_part twice[2] = {part, part};
    ATTND_CK_ERR(play_step_open(&c, &m, twice, 2, 0, &second, NULL), ATTND_EBUSY);
    play_forget(&s);
}
END_TEST

START_TEST(a_step_can_carry_the_commit_of_the_one_before) {
    play_model m = play_tiny();
    play_seq s;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_part part = {.seq = &s, .new_len = 3};
    play_step step;
    ATTND_CK_OK(play_step_open(&c, &m, &part, 1, 0, &step, NULL));
    for (int round = 0; round < 4; round++) {
        play_attend(&c, &step, 0);
        play_attend(&c, &step, 1);
        e2e_buf b;
        e2e_reply r;
        proto_commit commit = {.step = step.handle, .num_seqs = 1};
        struct {
            proto_commit head;
            proto_commit_seq seq;
        } carried = {commit, {.accepted = 3}};
        uint64_t commit_id = ++c.id;
        play_step_body(&b, ++c.id, &m, &part, 1, 0);
        proto_step body;
        memcpy(&body, b.data + PROTO_BODY, sizeof(body));
        body.commit_off = e2e_buf_add(&b, &carried, sizeof(carried));
        body.commit_request = commit_id;
        e2e_buf_set(&b, 0, &body, sizeof(body));
        e2e_buf_seal(&b);
        if (round == 0) { // a layer is missing: the step is not tried
            play_step lone = step;
            proto_cancel cancel = {.step = lone.handle};
            ATTND_CK_OK(e2e_call(&c, PROTO_CANCEL, &cancel, sizeof(cancel), NULL));
            ATTND_CK_OK(play_step_open(&c, &m, &part, 1, 0, &step, NULL));
            carried.head.step = step.handle;
            memcpy(b.data + body.commit_off, &carried, sizeof(carried));
            ATTND_CK_ERR(e2e_call_raw(&c, b.data, b.bytes, &r), ATTND_EINVAL);
            ck_assert_ptr_eq(strstr(r.error.field, "commit."), r.error.field);
            ck_assert_int_eq(r.error.detail, 0);
            e2e_reply_fini(&r);
            play_attend(&c, &step, 0);
            play_attend(&c, &step, 1);
        }
        ATTND_CK_OK(e2e_call_raw(&c, b.data, b.bytes, &r));
        s.len += 3;
        proto_step_reply head;
        proto_step_len len;
        memcpy(&head, r.body, sizeof(head));
        memcpy(&len, r.body + sizeof(head), sizeof(len));
        ck_assert_uint_eq(len.committed, s.len);
        e2e_reply_fini(&r);
        // The same message again: answered again, with the same handle.
        ATTND_CK_OK(e2e_call_raw(&c, b.data, b.bytes, &r));
        ck_assert_mem_eq(r.body, &head, sizeof(head));
        e2e_reply_fini(&r);
        step.handle = head.step;
        e2e_buf_fini(&b);
    }
    play_attend(&c, &step, 0);
    play_attend(&c, &step, 1);
    ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    ck_assert_uint_eq(s.len, 15);
    play_free(&c, &s);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 0);
}
END_TEST

START_TEST(positions_and_masks_have_a_bound) {
    play_model m = play_tiny();
    play_seq s;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    static int32_t positions[16385];
    play_step step;
    e2e_reply r;
    play_part part = {.seq = &s, .new_len = 16385, .positions = positions}; // 64 KiB hold 16384
    ATTND_CK_ERR(play_step_open(&c, &m, &part, 1, 0, &step, &r), ATTND_EMSGSIZE);
    ck_assert_str_eq(r.error.field, "positions_off");
    e2e_reply_fini(&r);
    positions[3] = -1;
    part.new_len = 4;
    ATTND_CK_ERR(play_step_open(&c, &m, &part, 1, 0, &step, &r), ATTND_EINVAL);
    ck_assert_str_eq(r.error.field, "positions_off");
    e2e_reply_fini(&r);
    play_forget(&s);
}
END_TEST

START_TEST(an_attend_that_runs_can_be_canceled_and_repeated) {
    play_model m = play_tiny();
    play_seq s;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_step step;
    play_part part = {.seq = &s, .new_len = 6000};
    ATTND_CK_OK(play_step_open(&c, &m, &part, 1, 0, &step, NULL));
    play_tensors t = play_random(&step);
    e2e_buf b, again;
    e2e_flight f;
    e2e_reply r;
    uint64_t id = ++c.id;
    play_attend_body(&b, id, &step, 0, 0, &t);
    play_attend_body(&again, ++c.id, &step, 0, 0, &t); // the same slots at the same time
    e2e_send(&c, &f, b.data, b.bytes);
    e2e_await_stat(&c, "scheduler.running", 1, 2000);
    ATTND_CK_ERR(e2e_call_raw(&c, again.data, again.bytes, &r), ATTND_EBUSY);
    ck_assert_str_eq(r.error.field, "layer");
    e2e_reply_fini(&r);
    ATTND_CK_ERR(play_commit(&c, &step, NULL, NULL), ATTND_EBUSY);
    proto_cancel cancel = {.request = id};
    ATTND_CK_OK(e2e_call(&c, PROTO_CANCEL, &cancel, sizeof(cancel), NULL));
    ATTND_CK_ERR(e2e_recv(&f, &r), ATTND_ECANCELED);
    e2e_reply_fini(&r);
    ATTND_CK_ERR(play_commit(&c, &step, NULL, &r), ATTND_EINVAL); // layer 0 is still missing
    ck_assert_int_eq(r.error.detail, 0);
    e2e_reply_fini(&r);
    ATTND_CK_OK(e2e_call_raw(&c, b.data, b.bytes, &r));
    e2e_reply_fini(&r);
    proto_cancel end = {.step = step.handle};
    ATTND_CK_OK(e2e_call(&c, PROTO_CANCEL, &end, sizeof(end), NULL));
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 0);
    e2e_buf_fini(&b);
    e2e_buf_fini(&again);
    play_tensors_fini(&t);
    play_forget(&s);
}
END_TEST

START_TEST(a_step_that_is_canceled_under_its_attend_waits_for_it) {
    play_model m = play_tiny();
    play_seq s;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_step step;
    play_part part = {.seq = &s, .new_len = 2000};
    ATTND_CK_OK(play_step_open(&c, &m, &part, 1, 0, &step, NULL));
    play_tensors t = play_random(&step);
    e2e_buf b;
    e2e_flight f;
    e2e_reply r;
    play_attend_body(&b, ++c.id, &step, 0, 0, &t);
    e2e_send(&c, &f, b.data, b.bytes);
    e2e_await_stat(&c, "scheduler.running", 1, 2000);
    proto_cancel end = {.step = step.handle};
    ATTND_CK_OK(e2e_call(&c, PROTO_CANCEL, &end, sizeof(end), NULL));
    ck_assert(e2e_arrived(&f, 1000)); // answered before the cancel was
    ATTND_CK_ERR(e2e_recv(&f, &r), ATTND_ECANCELED);
    e2e_reply_fini(&r);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 0);
    e2e_buf_fini(&b);
    play_tensors_fini(&t);
    play_seq *const seqs[] = {&s};
    play_token(&c, seqs, 1, 3);
    play_free(&c, &s);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_step");
    TCase *tc = tcase_create("step");
    tcase_set_timeout(tc, 120);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, layers_of_different_windows_are_groups_of_their_own);
    tcase_add_test(tc, a_layer_can_read_anothers_k_and_v);
    tcase_add_test(tc, a_reader_waits_for_the_layer_it_reads);
    tcase_add_test(tc, other_geometries_have_the_references_outputs);
    tcase_add_test(tc, a_long_prefill_runs_in_chunks_and_is_exact);
    tcase_add_test(tc, a_read_only_step_changes_nothing);
    tcase_add_test(tc, reading_and_writing_sequences_share_a_step);
    tcase_add_test(tc, a_step_without_rows_is_attended_and_committed);
    tcase_add_test(tc, fewer_tokens_can_be_accepted_than_were_attended);
    tcase_add_test(tc, a_fork_goes_its_own_way_from_the_middle_of_a_block);
    tcase_add_test(tc, an_accepted_path_of_a_tree_becomes_the_sequence);
    tcase_add_test(tc, a_tree_of_many_words_is_masked_word_by_word);
    tcase_add_test(tc, a_commit_names_the_first_layer_that_is_missing);
    tcase_add_test(tc, a_canceled_step_leaves_no_trace);
    tcase_add_test(tc, an_open_step_ends_at_its_deadline);
    tcase_add_test(tc, a_sequence_has_one_open_step);
    tcase_add_test(tc, a_step_can_carry_the_commit_of_the_one_before);
    tcase_add_test(tc, positions_and_masks_have_a_bound);
    tcase_add_test(tc, an_attend_that_runs_can_be_canceled_and_repeated);
    tcase_add_test(tc, a_step_that_is_canceled_under_its_attend_waits_for_it);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
