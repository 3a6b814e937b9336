// Block masks of attends: outputs against the float64 reference, for prompts, chunks, decodes and
// batches, beside windows and trees; what a mask hides is not read; hostile masks are refused
// whole; and their memory comes back.  Over either transport, and on a GPU of host memory.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/e2e/play.h"

enum { MAX_BLOCKS = 1 << 16 };

static e2e_daemon d;
static e2e_client c;

static void begin_with(const char *more, const char *value) {
    char set[128];
    snprintf(set, sizeof(set), "%s=%s", more, value);
    const char *const flags[] = {
        "--set", "cache.memory=64MiB", "--set", "cache.slab=1MiB", "--set", set, NULL};
    memset(&d, 0, sizeof(d));
    e2e_start(&d, flags);
    e2e_connect(&c, d.url);
    play_hello(&c, "masks");
}

static void begin(void) {
    begin_with("compute.prefill_chunk", "64"); // a prompt's query blocks lie across chunks
}

static void end(void) {
    ck_assert_double_eq(e2e_stat(&c, "steps"), 0);
    ck_assert_double_eq(e2e_stat(&c, "accounting_mismatches"), 0);
    e2e_close(&c);
    e2e_stop(&d);
}

// lists is a mask that is being made.
typedef struct lists {
    play_mask mask;
    uint32_t start[MAX_BLOCKS], kv_blocks[MAX_BLOCKS];
} lists;

static uint64_t seed = 88172645463325252u;

static uint32_t random_below(uint32_t n) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (uint32_t)(seed >> 33) % n;
}

// make_mask has each query block of the step see about one of `one_of` KV blocks; some see none.
static void make_mask(lists *l, play_step *s, uint32_t q_block, uint32_t one_of) {
    l->mask = (play_mask){.q_block = q_block, .start = l->start, .kv_blocks = l->kv_blocks};
    uint32_t num = 0;
    l->start[0] = 0;
    for (uint32_t i = 0; i < s->num; i++) {
        const play_part *p = &s->parts[i];
        uint32_t rows = play_rows(p), len = p->seq->len + p->new_len;
        uint32_t num_kv = (len + s->model->block_tokens - 1) / s->model->block_tokens;
        for (uint32_t b = 0; rows > 0 && b <= (rows - 1) / q_block; b++) {
            for (uint32_t k = 0; k < num_kv; k++) {
                if (random_below(one_of) == 0) {
                    l->kv_blocks[num++] = k;
                }
            }
            l->start[++l->mask.num] = num;
        }
    }
    s->mask = &l->mask;
}

static play_step open_step(const play_model *m, const play_part *parts, uint32_t num) {
    play_step s;
    ATTND_CK_OK(play_step_open(&c, m, parts, num, 60000, &s, NULL));
    return s;
}

// masked does a step with a mask of its own in each layer, and checks every output.
static void masked(const play_model *m, const play_part *parts, uint32_t num, uint32_t q_block,
                   uint32_t one_of) {
    static lists l;
    play_step s = open_step(m, parts, num);
    for (uint32_t layer = 0; layer < m->layers; layer++) {
        make_mask(&l, &s, q_block, one_of);
        play_attend(&c, &s, layer);
    }
    ATTND_CK_OK(play_commit(&c, &s, NULL, NULL));
}

START_TEST(outputs_are_the_references) {
    static const uint32_t q_blocks[] = {1, 3, 16, 64, 100, 1000000, UINT32_MAX};
    begin();
    play_model m = play_tiny();
    play_seq seqs[3];
    play_open(&c, &m);
    for (int i = 0; i < 3; i++) {
        play_create(&c, &m, &seqs[i]);
    }
    for (int i = 0; i < 7; i++) {
        play_part prompts[3] = {{.seq = &seqs[0], .new_len = 150},
                                {.seq = &seqs[1], .new_len = 33},
                                {.seq = &seqs[2], .new_len = 1}};
        masked(&m, prompts, 3, q_blocks[i], 1 + (uint32_t)i % 3);
        play_part decodes[3] = {{.seq = &seqs[0], .new_len = 1},
                                {.seq = &seqs[1], .q_len = 7}, // read only
                                {.seq = &seqs[2], .new_len = 5}};
        masked(&m, decodes, 3, q_blocks[i], 2);
    }
    play_token(&c, (play_seq *[]){&seqs[0], &seqs[1]}, 2, 3); // and none beside it
    for (int i = 0; i < 3; i++) {
        play_free(&c, &seqs[i]);
    }
    end();
}
END_TEST

START_TEST(windows_softcaps_trees_and_shared_layers_go_with_masks) {
    begin();
    play_model m = play_tiny();
    m.name = "mixed";
    m.layers = 4;
    m.layer[1].window_left = 40;
    m.layer[2].softcap = 3;
    m.layer[3].kv_layer = 0;
    play_seq seq;
    play_open(&c, &m);
    play_create(&c, &m, &seq);
    for (int i = 0; i < 4; i++) {
        masked(&m, &(play_part){.seq = &seq, .new_len = 90}, 1, 32, 2);
    }
    // a tree of 6 nodes: 0 - 1 - 2, 0 - 3 - 4, 5 alone
    const uint64_t tree[6] = {1, 3, 7, 1 | 8, 1 | 8 | 16, 32};
    const int32_t positions[6] = {360, 361, 362, 361, 362, 360};
    play_step s = open_step(
        &m, &(play_part){.seq = &seq, .new_len = 6, .tree = tree, .positions = positions}, 1);
    static lists l;
    for (uint32_t layer = 0; layer < m.layers; layer++) {
        make_mask(&l, &s, 2, 2);
        play_attend(&c, &s, layer);
    }
    const uint32_t none[1] = {0};
    ATTND_CK_OK(play_commit(&c, &s, none, NULL));
    masked(&m, &(play_part){.seq = &seq, .new_len = 1}, 1, 1, 2);
    play_free(&c, &seq);
    end();
}
END_TEST

// K and V of what no query block sees are NaN.
START_TEST(what_a_mask_hides_is_not_read) {
    begin();
    play_model m = play_one();
    m.not_causal = true;
    play_seq seq;
    play_open(&c, &m);
    play_create(&c, &m, &seq);
    play_step s = open_step(&m, &(play_part){.seq = &seq, .new_len = 80}, 1);
    const uint32_t start[6] = {0, 2, 2, 4, 5, 7}, kv_blocks[7] = {0, 4, 1, 4, 0, 1, 4};
    const play_mask mask = {.q_block = 16, .num = 5, .start = start, .kv_blocks = kv_blocks};
    s.mask = &mask;
    play_tensors t = play_random(&s);
    for (uint32_t token = 32; token < 64; token++) { // blocks 2 and 3
        for (uint32_t i = 0; i < m.kv_heads * m.head_dim; i++) {
            t.k[token * m.kv_heads * m.head_dim + i] = NAN;
            t.v[token * m.kv_heads * m.v_head_dim + i] = NAN;
        }
    }
    e2e_buf b;
    e2e_reply r;
    play_attend_body(&b, ++c.id, &s, 0, PROTO_ATTEND_LSE, &t);
    ATTND_CK_OK(e2e_call_raw(&c, b.data, b.bytes, &r));
    play_check(&s, 0, &t, &r); // which is finite: compare takes no NaN for anything
    proto_attend_reply head;
    memcpy(&head, r.body, sizeof(head));
    for (uint32_t i = 0; i < 16 * m.q_heads * m.v_head_dim; i++) { // rows 16 to 31 see no key
        float x;
        memcpy(&x, r.msg + head.out_off + (16 * m.q_heads * m.v_head_dim + i) * sizeof(x), 4);
        ck_assert(x == 0);
    }
    for (uint32_t i = 16; i < 32; i++) {
        float x;
        memcpy(&x, r.msg + head.lse_off + i * sizeof(x), sizeof(x));
        ck_assert(isinf(x) && x < 0);
    }
    e2e_reply_fini(&r);
    e2e_buf_fini(&b);
    play_tensors_fini(&t);
    ATTND_CK_OK(play_commit(&c, &s, NULL, NULL));
    play_free(&c, &seq);
    end();
}
END_TEST

// ---- hostile masks

typedef struct bad {
    uint32_t words[12]; // q_block, num_query_blocks, start, kv_blocks
    uint32_t num;       // words that are there, at the message's end
    attnd_err err;
    const char *field, *text; // parts of what is said
} bad;

// Two sequences of 20 and 4 rows, kv_len 20 and 4, blocks of 16 tokens: q_block 16 gives 2 + 1
// query blocks, over 2 and 1 KV blocks.
static const bad all_bad[] = {
    {{0, 3, 0, 1, 2, 3, 0, 0, 0}, 9, ATTND_EINVAL, "block_mask", "q_block is 0"},
    {{16, 2, 0, 1, 2, 0, 0}, 7, ATTND_EINVAL, "block_mask", "2 query blocks"},
    {{16, 4, 0, 1, 2, 3, 4, 0, 0, 0, 0}, 11, ATTND_EINVAL, "block_mask", "4 query blocks"},
    {{16, 0, 0}, 3, ATTND_EINVAL, "block_mask", "0 query blocks"},
    {{16, 25}, 12, ATTND_EINVAL, "block_mask", "25 query blocks for 24 rows"},
    {{16, UINT32_MAX}, 12, ATTND_EINVAL, "block_mask", "query blocks"},
    {{UINT32_MAX, 3, 0, 1, 2, 3, 0, 0, 0}, 9, ATTND_EINVAL, "block_mask", "3 query blocks"},
    {{16, 3, 0, 2, 1, 3, 0, 0, 0}, 9, ATTND_EINVAL, "block_mask", "start goes down"},
    {{16, 3, 0, 0x40000000, 2, 3, 0, 0, 0}, 9, ATTND_EINVAL, "block_mask", "start goes down"},
    {{16, 3, 9, 0, 0, 3, 0, 0, 0}, 9, ATTND_EINVAL, "block_mask", "start goes down"},
    {{16, 3, 0, 1, 2, 3, 2, 0, 0}, 9, ATTND_EINVAL, "block_mask", "block 2 is behind kv_len"},
    {{16, 3, 0, 1, 2, 3, 0, 0, 1}, 9, ATTND_EINVAL, "block_mask", "block 1 is behind kv_len"},
    {{16, 3, 0, 1, 2, 3, UINT32_MAX, 0, 0}, 9, ATTND_EINVAL, "block_mask", "is behind kv_len"},
    {{16, 3, 0, 2, 3, 4, 1, 0, 0, 0}, 10, ATTND_EINVAL, "block_mask", "do not ascend"},
    {{16, 3, 0, 2, 3, 4, 1, 1, 0, 0}, 10, ATTND_EINVAL, "block_mask", "do not ascend"},
    {{16}, 1, ATTND_EPROTO, "block_mask_off", ""},
    {{16, 3, 0, 1, 2}, 5, ATTND_EPROTO, "block_mask_off", ""},          // start is cut
    {{16, 3, 0, 1, 2, 3, 0, 0}, 8, ATTND_EPROTO, "block_mask_off", ""}, // kv_blocks are
    {{16, 3, 0, 1, 2, UINT32_MAX, 0, 0, 0}, 9, ATTND_EPROTO, "block_mask_off", ""},
};

// attend_with sends an attend with a mask of any words at its end, at off from there.
static attnd_err attend_with(const play_step *s, const play_tensors *t, const uint32_t *words,
                             uint32_t num, uint32_t off, e2e_reply *r) {
    e2e_buf b;
    proto_attend body;
    play_attend_body(&b, ++c.id, s, 0, PROTO_ATTEND_LSE, t);
    memcpy(&body, b.data + PROTO_BODY, sizeof(body));
    body.block_mask_off = e2e_buf_add(&b, words, num * sizeof(*words)) + off;
    e2e_buf_set(&b, 0, &body, sizeof(body));
    e2e_buf_seal(&b);
    attnd_err err = e2e_call_raw(&c, b.data, b.bytes, r);
    e2e_buf_fini(&b);
    return err;
}

static void ck_bad(const play_step *s, const play_tensors *t, const bad *it, uint32_t off) {
    e2e_reply r;
    attnd_err err = attend_with(s, t, it->words, it->num, off, &r);
    ck_assert_msg(err == it->err, "%s instead of %s: %s", attnd_errname(err),
                  attnd_errname(it->err), r.error.text);
    ck_assert_msg(strncmp(r.error.field, it->field, strlen(it->field)) == 0, "%s", r.error.field);
    ck_assert_msg(strstr(r.error.text, it->text) != NULL, "%s", r.error.text);
    e2e_reply_fini(&r);
}

START_TEST(a_bad_mask_is_refused_whole) {
    begin();
    play_model m = play_one();
    play_seq seqs[2];
    play_open(&c, &m);
    play_create(&c, &m, &seqs[0]);
    play_create(&c, &m, &seqs[1]);
    const play_part parts[2] = {{.seq = &seqs[0], .new_len = 20}, {.seq = &seqs[1], .new_len = 4}};
    play_step s = open_step(&m, parts, 2);
    play_tensors t = play_random(&s);
    for (size_t i = 0; i < sizeof(all_bad) / sizeof(all_bad[0]); i++) {
        ck_bad(&s, &t, &all_bad[i], 0);
    }
    const bad good = {{16, 3, 0, 1, 2, 3, 0, 1, 0}, 9, ATTND_EPROTO, "block_mask_off", ""};
    const uint32_t offs[] = {4, 1, 4096, UINT32_MAX - 4096};
    for (int i = 0; i < 4; i++) {
        ck_bad(&s, &t, &good, offs[i]);
    }
    ATTND_CK_ERR(play_commit(&c, &s, NULL, NULL), ATTND_EINVAL); // nothing was attended
    static lists l;
    make_mask(&l, &s, 16, 2);
    play_attend(&c, &s, 0);
    ATTND_CK_OK(play_commit(&c, &s, NULL, NULL));
    play_token(&c, (play_seq *[]){&seqs[0], &seqs[1]}, 2, 2);
    play_free(&c, &seqs[0]);
    play_free(&c, &seqs[1]);
    play_tensors_fini(&t);
    end();
}
END_TEST

// Any words: refused or served, and the daemon goes on.
START_TEST(random_masks_harm_nobody) {
    enum { NUM = 3000 };
    begin();
    play_model m = play_one();
    play_seq seqs[2];
    play_open(&c, &m);
    play_create(&c, &m, &seqs[0]);
    play_create(&c, &m, &seqs[1]);
    const play_part parts[2] = {{.seq = &seqs[0], .new_len = 20}, {.seq = &seqs[1], .new_len = 4}};
    play_step s = open_step(&m, parts, 2);
    play_tensors t = play_random(&s);
    uint32_t served = 0;
    for (int i = 0; i < NUM; i++) {
        uint32_t words[12] = {16, 3, 0, 1, 2, 3, 0, 1, 0, 0, 0, 0};
        for (uint32_t flips = 1 + random_below(3); flips > 0; flips--) {
            uint32_t *word = &words[random_below(12)];
            *word = random_below(4) ? random_below(5) : 1u << random_below(32);
        }
        e2e_reply r;
        attnd_err err = attend_with(&s, &t, words, 9 + random_below(4), 0, &r);
        served += err == ATTND_OK;
        ck_assert_msg(err == ATTND_OK || err == ATTND_EINVAL || err == ATTND_EPROTO, "%s: %s",
                      attnd_errname(err), r.error.text);
        e2e_reply_fini(&r);
    }
    ck_assert_uint_gt(served, NUM / 50);
    ck_assert_uint_lt(served, NUM);
    play_attend(&c, &s, 0);
    ATTND_CK_OK(play_commit(&c, &s, NULL, NULL));
    play_token(&c, (play_seq *[]){&seqs[0], &seqs[1]}, 2, 2);
    play_free(&c, &seqs[0]);
    play_free(&c, &seqs[1]);
    play_tensors_fini(&t);
    end();
}
END_TEST

// ---- memory

// A mask of 40 query blocks with 40 KV blocks each takes 6.6 KB of a step's 16.
START_TEST(the_memory_of_masks_comes_back) {
    begin_with("limits.step_memory", "16KiB");
    play_model m = play_one();
    play_seq seq;
    play_open(&c, &m);
    play_create(&c, &m, &seq);
    play_step s = open_step(&m, &(play_part){.seq = &seq, .new_len = 640}, 1);
    static lists l;
    for (int i = 0; i < 20; i++) { // an attend may be repeated until commit
        make_mask(&l, &s, 16, 1);
        play_attend(&c, &s, 0);
        if (i % 4 == 0) {
            const bad behind = {{640, 1, 0, 1, 40}, 5, ATTND_EINVAL, "block_mask", "behind"};
            play_tensors t = play_random(&s);
            ck_bad(&s, &t, &behind, 0); // found by the checks behind the copying
            play_tensors_fini(&t);
        }
    }
    make_mask(&l, &s, 4, 1); // 160 query blocks
    play_tensors t = play_random(&s);
    e2e_buf b;
    e2e_reply r;
    play_attend_body(&b, ++c.id, &s, 0, 0, &t);
    ATTND_CK_ERR(e2e_call_raw(&c, b.data, b.bytes, &r), ATTND_EMSGSIZE);
    ck_assert_str_eq(r.error.field, "block_mask_off");
    e2e_reply_fini(&r);
    e2e_buf_fini(&b);
    play_tensors_fini(&t);
    ATTND_CK_OK(play_commit(&c, &s, NULL, NULL));
    play_free(&c, &seq);
    end();
}
END_TEST

// Layers that are sent at once have their masks in the step's memory side by side.
START_TEST(layers_in_flight_have_masks_of_their_own) {
    enum { LAYERS = 8 };
    begin();
    play_model m = play_tiny();
    m.name = "eight";
    m.layers = LAYERS;
    play_seq seq;
    play_open(&c, &m);
    play_create(&c, &m, &seq);
    static lists l[LAYERS];
    for (int round = 0; round < 3; round++) {
        play_step s = open_step(&m, &(play_part){.seq = &seq, .new_len = 150}, 1);
        e2e_buf b[LAYERS];
        e2e_flight flights[LAYERS];
        play_tensors t[LAYERS];
        for (uint32_t i = 0; i < LAYERS; i++) {
            make_mask(&l[i], &s, 32, 2);
            t[i] = play_random(&s);
            play_attend_body(&b[i], ++c.id, &s, i, PROTO_ATTEND_LSE, &t[i]);
        }
        for (uint32_t i = 0; i < LAYERS; i++) {
            e2e_send(&c, &flights[i], b[i].data, b[i].bytes);
        }
        for (uint32_t i = 0; i < LAYERS; i++) {
            e2e_reply r;
            attnd_err err = e2e_recv(&flights[i], &r);
            ck_assert_msg(!err, "layer %u: %s", i, r.error.text);
            s.mask = &l[i].mask;
            play_check(&s, i, &t[i], &r);
            e2e_reply_fini(&r);
            e2e_buf_fini(&b[i]);
            play_tensors_fini(&t[i]);
        }
        ATTND_CK_OK(play_commit(&c, &s, NULL, NULL));
    }
    play_free(&c, &seq);
    end();
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("block_mask");
    TCase *tc = tcase_create("masks");
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, outputs_are_the_references);
    tcase_add_test(tc, windows_softcaps_trees_and_shared_layers_go_with_masks);
    tcase_add_test(tc, what_a_mask_hides_is_not_read);
    tcase_add_test(tc, a_bad_mask_is_refused_whole);
    tcase_add_test(tc, random_masks_harm_nobody);
    tcase_add_test(tc, the_memory_of_masks_comes_back);
    tcase_add_test(tc, layers_in_flight_have_masks_of_their_own);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
