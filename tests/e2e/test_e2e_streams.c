// Service mode: what clients' streams hand over comes back with the bits that the daemon gives over
// the ring, as it comes and by a graph that is replayed with growing lengths.  With streams of the
// host against a daemon with a fake GPU (test_e2e_streams), or on a GPU, by tests/gpu_service.sh
// (test_e2e_streams_cuda).
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/proto_region.h"
#include "tests/e2e/service_play.h"

enum {
    TOKENS = 1000,      // replayed
    PACED_TOKENS = 200, // with a pause before each layer
    SAMPLE = 97,        // every so many are compared with the reference
    IN_TIME_MS = 1000,
    SYNC_MS = 20000,
    BLOCK = 16, // tokens, of the model
    MAX_BLOCKS = 16,
};

static const char *const flags[] = {"--set", "cache.memory=64MiB",       "--set", "cache.slab=4MiB",
                                    "--set", "compute.deterministic=on", NULL};
static const play_how hows[] = {PLAY_COPIED, PLAY_REGION, PLAY_BUFFERS};
static e2e_daemon d;

static void setup(void) {
    memset(&d, 0, sizeof(d));
    e2e_dir(&d);
    e2e_start(&d, flags);
}

// end wants nothing to be left of any client.
static void end(void) {
    e2e_client c;
    e2e_connect(&c, d.admin_url);
    free(e2e_json(&c, PROTO_HELLO, "{}"));
    e2e_await_stat(&c, "blocks.in_use", 0, IN_TIME_MS);
    e2e_await_stat(&c, "service.regions", 0, IN_TIME_MS); // libattnd has said that it let go
    e2e_close(&c);
    ck_assert(!e2e_log_has(&d, "accounting"));
    e2e_stop(&d);
}

// check_rows compares the first and the last row of each sequence.
static void check_rows(const uint16_t *out, uint32_t first, uint32_t rows) {
    for (uint32_t s = 0; s < PLAY_SEQS; s++) {
        play_check(out + s * rows * PLAY_Q_ROW, s, first);
        play_check(out + (s * rows + rows - 1) * PLAY_Q_ROW, s, first + rows - 1);
    }
}

START_TEST(outputs_have_the_bits_of_messages) {
    static uint16_t there[PLAY_OUT], here[PLAY_OUT];
    // By prefill and decode; in every other step layers come long after the one before.
    static const uint32_t rows[] = {PLAY_MAX, 1, 1, 5, 1, 33, 1, 1, 1};
    play a, b;
    play_begin(&a, d.url, PLAY_MESSAGES);
    play_begin(&b, d.url, hows[_i]);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        uint32_t first = a.len;
        b.pause_ms = i % 2;
        play_forward(&a, rows[i], there);
        play_forward(&b, rows[i], here);
        ck_assert_mem_eq(there, here, PLAY_LAYERS * PLAY_SEQS * rows[i] * PLAY_Q_ROW * 2);
        check_rows(here, first, rows[i]);
    }
    play_end(&a, 0);
    play_end(&b, IN_TIME_MS);
    end();
}
END_TEST

// ---- block masks

// lists is a mask that is being made, of a layer.
typedef struct lists {
    uint32_t start[PLAY_MAX_ROWS + 1], kv_blocks[PLAY_MAX_ROWS * MAX_BLOCKS];
} lists;

static attnd_block_mask make_mask(lists *l, uint32_t len, uint32_t rows, uint32_t q_block) {
    uint32_t num = 0, listed = 0;
    l->start[0] = 0;
    for (uint32_t i = 0; i < PLAY_SEQS; i++) {
        for (uint32_t b = 0; b * q_block < rows; b++) {
            for (uint32_t n = 0; n <= (len - 1) / BLOCK; n++) {
                if (rand() & 1) {
                    l->kv_blocks[listed++] = n;
                }
            }
            l->start[++num] = listed;
        }
    }
    return (attnd_block_mask){q_block, num, l->start, l->kv_blocks};
}

START_TEST(masked_outputs_have_the_bits_of_messages) {
    static uint16_t there[PLAY_OUT], here[PLAY_OUT];
    static lists l[PLAY_LAYERS];
    static const uint32_t rows[] = {PLAY_MAX, 1, 5, 33, 1}, q_blocks[] = {16, 1, 3, 7, 1};
    attnd_block_mask masks[PLAY_LAYERS];
    play a, b;
    play_begin(&a, d.url, PLAY_MESSAGES);
    play_begin(&b, d.url, hows[_i]);
    a.masks = b.masks = masks;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        for (uint32_t n = 0; n < PLAY_LAYERS; n++) {
            masks[n] = make_mask(&l[n], a.len + rows[i], rows[i], q_blocks[i]);
        }
        play_forward(&a, rows[i], there);
        play_forward(&b, rows[i], here);
        ck_assert_mem_eq(there, here, PLAY_LAYERS * PLAY_SEQS * rows[i] * PLAY_Q_ROW * 2);
    }
    a.masks = b.masks = NULL; // and none behind them
    play_forward(&a, 1, there);
    play_forward(&b, 1, here);
    ck_assert_mem_eq(there, here, PLAY_LAYERS * PLAY_SEQS * PLAY_Q_ROW * 2);
    play_end(&a, 0);
    play_end(&b, IN_TIME_MS);
    end();
}
END_TEST

// launches_of returns how many launches a layer of PLAY_MAX tokens of each sequence takes.
static double launches_of(play *p, e2e_client *c, uint64_t step, const attnd_block_mask *masks) {
    double before = e2e_stat(c, "scheduler.launches");
    p->masks = masks;
    PLAY_OK(p, play_attend(p, step, 0, PLAY_MAX));
    ck_assert(service_sync(p->stream, SYNC_MS));
    p->masks = NULL;
    return e2e_stat(c, "scheduler.launches") - before;
}

// A query block of one token may take as long as one of many.
START_TEST(masked_prompts_go_in_chunks) {
    static const char *const chunks[] = {
        "--set", "cache.memory=64MiB",       "--set", "cache.slab=4MiB",
        "--set", "compute.prefill_chunk=32", NULL};
    static lists l;
    attnd_block_mask masks[PLAY_LAYERS];
    e2e_client c;
    play p;
    memset(&d, 0, sizeof(d));
    e2e_dir(&d);
    e2e_start(&d, chunks);
    play_begin(&p, d.url, PLAY_COPIED);
    e2e_connect(&c, d.admin_url);
    free(e2e_json(&c, PROTO_HELLO, "{}"));
    uint64_t step = play_step(&p, PLAY_MAX);
    play_fill(&p, 0, PLAY_MAX);
    masks[0] = make_mask(&l, PLAY_MAX, PLAY_MAX, 1);
    ck_assert_double_eq(launches_of(&p, &c, step, NULL), 1);
    ck_assert_double_eq(launches_of(&p, &c, step, masks), 3 * PLAY_SEQS); // 32, 32 and 6 tokens
    ATTND_CK_OK(attnd_step_cancel(p.c, step, &p.info));
    e2e_close(&c);
    play_end(&p, IN_TIME_MS);
    end();
}
END_TEST

// What the lists hold the daemon finds out when the stream waits already.
START_TEST(wrong_masks_are_refused) {
    static uint16_t out[PLAY_OUT];
    const uint32_t start[PLAY_SEQS + 1] = {0, 1, 2, 3}, kv_blocks[PLAY_SEQS] = {0, 77, 0};
    attnd_block_mask masks[PLAY_LAYERS] = {{1, PLAY_SEQS, start, kv_blocks}};
    play b;
    play_begin(&b, d.url, PLAY_COPIED);
    play_forward(&b, 2, out);
    b.masks = masks;
    uint64_t step = play_step(&b, 1);
    play_fill(&b, b.len, 1);
    ATTND_CK_OK(play_attend(&b, step, 0, 1));
    ck_assert(service_sync(b.stream, IN_TIME_MS));
    ATTND_CK_ERR(play_try_commit(&b, step, 1), ATTND_EINVAL);
    ck_assert_str_eq(b.info.field, "block_mask");
    ATTND_CK_OK(attnd_step_cancel(b.c, step, &b.info));
    step = play_step(&b, 1);
    masks[0].kv_blocks = NULL;
    ATTND_CK_ERR(play_attend(&b, step, 0, 1), ATTND_EINVAL);
    masks[0].start = NULL;
    ATTND_CK_ERR(play_attend(&b, step, 0, 1), ATTND_EINVAL);
    masks[0] = (attnd_block_mask){1, PLAY_SEQS, start, kv_blocks};
    service_capture(b.stream); // a replay would not know other lists
    ATTND_CK_ERR(play_attend(&b, step, 0, 1), ATTND_ENOTSUP);
    ck_assert_str_eq(b.info.field, "block_mask");
    service_graph_free(service_end(b.stream));
    ATTND_CK_OK(attnd_step_cancel(b.c, step, &b.info));
    b.masks = NULL;
    play_forward(&b, 1, out);
    check_rows(out, 2, 1);
    play_end(&b, IN_TIME_MS);
    end();
}
END_TEST

// A mask takes some 4 KB of a step's MiB, and an attend may be repeated until commit.
START_TEST(the_memory_of_masks_comes_back) {
    static lists l;
    static uint16_t out[PLAY_OUT];
    attnd_block_mask masks[PLAY_LAYERS];
    play b;
    play_begin(&b, d.url, PLAY_COPIED);
    play_forward(&b, 50, out);
    uint64_t step = play_step(&b, PLAY_MAX);
    play_fill(&b, b.len, PLAY_MAX);
    for (int i = 0; i < 600; i++) {
        masks[0] = make_mask(&l, b.len + PLAY_MAX, PLAY_MAX, 1);
        b.masks = masks;
        PLAY_OK(&b, play_attend(&b, step, 0, PLAY_MAX));
        if (i % 32 == 0) {
            ck_assert(service_sync(b.stream, SYNC_MS));
            e2e_sleep_ms(5); // the stream knows of the end before the daemon
        }
    }
    b.masks = NULL;
    for (uint32_t n = 0; n < PLAY_LAYERS; n++) {
        PLAY_OK(&b, play_attend(&b, step, n, PLAY_MAX));
    }
    play_read(&b, PLAY_MAX, out);
    play_commit(&b, step, PLAY_MAX);
    ck_assert(service_sync(b.stream, SYNC_MS));
    check_rows(out, 50, PLAY_MAX);
    play_end(&b, IN_TIME_MS);
    end();
}
END_TEST

// ---- graphs

// The inputs of all tokens are there before, and nothing of the client's looks at a result before
// the last one.
START_TEST(a_graph_is_replayed_with_growing_lengths) {
    enum { OUT = PLAY_LAYERS * PLAY_SEQS * PLAY_Q_ROW, IN = PLAY_SEQS * PLAY_ROW };
    static uint16_t first[PLAY_OUT], there[OUT];
    const bool pairs = getenv("ATTND_FAKE_MPS") != NULL;
    const size_t tokens = pairs ? PACED_TOKENS : TOKENS;
    play a, b;
    play_begin(&a, d.url, PLAY_MESSAGES);
    play_begin(&b, d.url, hows[_i]);
    play_forward(&a, PLAY_MAX, first);
    play_forward(&b, PLAY_MAX, first);
    uint16_t *in = service_alloc(tokens * PLAY_LAYERS * IN * 2);
    uint16_t *here = malloc(tokens * OUT * 2);
    for (size_t t = 0; t < tokens; t++) {
        play_fill(&b, b.len + (uint32_t)t, 1);
        for (size_t l = 0; l < PLAY_LAYERS; l++) {
            service_copy(b.stream, in + (t * PLAY_LAYERS + l) * IN, b.host[l].qkv, IN * 2);
        }
        ck_assert(service_sync(b.stream, SYNC_MS)); // host memory is used again
    }
    b.pause_ms = pairs; // layers come at equal times, and find gates
    uint64_t captured = play_step(&b, 1), step = captured;
    service_graph *graph = play_graph(&b, captured);
    ATTND_CK_ERR(play_try_commit(&b, step, 1), ATTND_EINVAL); // nothing was done
    for (size_t t = 0; t < tokens; t++) {
        for (size_t l = 0; l < PLAY_LAYERS; l++) {
            service_copy(b.stream, b.device[l].qkv, in + (t * PLAY_LAYERS + l) * IN, IN * 2);
        }
        ATTND_CK_OK(attnd_step_replay(b.c, captured, step, b.stream, &b.info));
        service_launch(graph, b.stream);
        play_read(&b, 1, here + t * OUT);
        play_commit(&b, step, 1);
        step = play_step(&b, 1);
    }
    ck_assert(service_sync(b.stream, SYNC_MS));
    for (size_t t = 0; t < tokens; t++) {
        play_forward(&a, 1, there);
        ck_assert_mem_eq(there, here + t * OUT, sizeof(there));
        if (t % SAMPLE == 0) {
            check_rows(here + t * OUT, PLAY_MAX + (uint32_t)t, 1);
        }
    }
    free(here);
    service_free(in);
    service_graph_free(graph);
    play_end(&a, 0);
    play_end(&b, IN_TIME_MS);
    end();
}
END_TEST

// Two clients at once, whose tokens the daemon batches as it likes.
START_TEST(clients_do_not_mix) {
    enum { OUT = PLAY_LAYERS * PLAY_SEQS * PLAY_Q_ROW, TURNS = 20 };
    static uint16_t first[PLAY_OUT], want[TURNS * OUT], got[2][OUT];
    play a, b[2];
    play_begin(&a, d.url, PLAY_MESSAGES);
    play_forward(&a, PLAY_MAX, first);
    for (int t = 0; t < TURNS; t++) {
        play_forward(&a, 1, want + t * OUT);
    }
    for (int i = 0; i < 2; i++) {
        play_begin(&b[i], d.url, hows[i]);
        play_forward(&b[i], PLAY_MAX, first);
    }
    for (int t = 0; t < TURNS; t++) {
        uint64_t step[2];
        for (int i = 0; i < 2; i++) {
            step[i] = play_step(&b[i], 1);
            play_fill(&b[i], b[i].len, 1);
        }
        for (uint32_t l = 0; l < PLAY_LAYERS; l++) {
            ATTND_CK_OK(play_attend(&b[0], step[0], l, 1));
            ATTND_CK_OK(play_attend(&b[1], step[1], l, 1));
        }
        for (int i = 0; i < 2; i++) {
            play_read(&b[i], 1, got[i]);
            play_commit(&b[i], step[i], 1);
            ck_assert(service_sync(b[i].stream, SYNC_MS));
            ck_assert_mem_eq(got[i], want + t * OUT, sizeof(got[i]));
        }
    }
    play_end(&a, 0);
    play_end(&b[0], IN_TIME_MS);
    play_end(&b[1], IN_TIME_MS);
    end();
}
END_TEST

// A step of other lengths than were captured, and graphs that are not launched after all, more of
// them than the daemon has places for calls.
START_TEST(a_replay_that_comes_to_nothing_leaves_nothing) {
    static uint16_t there[PLAY_OUT], here[PLAY_OUT];
    play a, b;
    play_begin(&a, d.url, PLAY_MESSAGES);
    play_begin(&b, d.url, PLAY_REGION);
    play_forward(&a, 3, there);
    play_forward(&b, 3, here);
    uint64_t captured = play_step(&b, 1), step;
    service_graph *graph = play_graph(&b, captured);
    ATTND_CK_OK(attnd_step_cancel(b.c, captured, &b.info));
    step = play_step(&b, 2);
    ATTND_CK_ERR(attnd_step_replay(b.c, captured, step, b.stream, &b.info), ATTND_EINVAL);
    ck_assert_str_eq(b.info.field, "rows");
    ATTND_CK_ERR(attnd_step_replay(b.c, captured + 77, step, b.stream, &b.info), ATTND_ESTALE);
    ck_assert_str_eq(b.info.field, "captured");
    ATTND_CK_OK(attnd_step_cancel(b.c, step, &b.info));
    for (int i = 0; i < 2 * PROTO_REGION_MAX_CALLS; i++) {
        step = play_step(&b, 1);
        ATTND_CK_OK(attnd_step_replay(b.c, captured, step, b.stream, &b.info));
        ATTND_CK_OK(attnd_step_cancel(b.c, step, &b.info));
    }
    ATTND_CK_ERR(attnd_step_replay(b.c, captured, step, b.stream, &b.info), ATTND_ESTALE);
    ck_assert_str_eq(b.info.field, "step");
    step = play_step(&b, 1);
    play_fill(&b, b.len, 1);
    ATTND_CK_OK(attnd_step_replay(b.c, captured, step, b.stream, &b.info));
    service_launch(graph, b.stream);
    play_read(&b, 1, here);
    play_commit(&b, step, 1);
    ck_assert(service_sync(b.stream, SYNC_MS));
    play_forward(&a, 1, there);
    ck_assert_mem_eq(there, here, PLAY_LAYERS * PLAY_SEQS * PLAY_Q_ROW * 2);
    service_graph_free(graph);
    play_end(&a, 0);
    play_end(&b, IN_TIME_MS);
    end();
}
END_TEST

// What libattnd refuses, it refuses at once; nothing of it goes into the stream.
START_TEST(wrong_attends_are_refused) {
    static uint16_t out[PLAY_OUT];
    play b;
    play_begin(&b, d.url, PLAY_COPIED);
    service_stream *other = service_stream_create();
    play_forward(&b, 2, out);
    uint64_t step = play_step(&b, 1);
    play_fill(&b, b.len, 1);
    ATTND_CK_ERR(play_attend(&b, step, 0, 2), ATTND_EINVAL);
    ck_assert_str_eq(b.info.field, "rows");
    ATTND_CK_ERR(play_attend(&b, step + 77, 0, 1), ATTND_ESTALE);
    ATTND_CK_OK(play_attend(&b, step, 0, 1));
    service_stream *own = b.stream;
    b.stream = other;
    ATTND_CK_ERR(play_attend(&b, step, 1, 1), ATTND_EINVAL);
    ck_assert_str_eq(b.info.field, "stream");
    b.stream = own;
    attnd_attend_args a = {.step = step, .model = b.model, .rows = PLAY_SEQS, .q = out, .out = out};
    ATTND_CK_ERR(attnd_attend_start(b.c, &a, NULL, NULL, &b.info), ATTND_ENOTSUP);
    attnd_memory *m;
    ATTND_CK_ERR(attnd_memory_create(b.c, &m, 1u << 30, &b.info), ATTND_ENOSPC);
    ATTND_CK_OK(attnd_step_cancel(b.c, step, &b.info));
    ck_assert(service_sync(b.stream, IN_TIME_MS));
    service_stream_free(other);
    play_end(&b, IN_TIME_MS);
    end();
}
END_TEST

START_TEST(region_over_the_bound_is_an_error_by_name) {
    static const char *const small[] = {"--set", "cache.memory=64MiB", "--set",
                                        "limits.region_memory=4MiB", NULL};
    e2e_stop(&d);
    memset(&d, 0, sizeof(d));
    e2e_dir(&d);
    e2e_start(&d, small);
    play p; // asks for 8 MiB
    ATTND_CK_ERR(play_dial(&p, d.url, PLAY_REGION), ATTND_EMSGSIZE);
    ck_assert_str_eq(p.info.field, "region_bytes");
    ck_assert_ptr_nonnull(strstr(p.info.text, "8388608"));
    ck_assert_ptr_nonnull(strstr(p.info.text, "4194304"));
    end();
}
END_TEST

START_TEST(who_has_no_region_gets_no_memory) {
    play a;
    attnd_memory *m;
    play_begin(&a, d.url, PLAY_MESSAGES);
    ATTND_CK_ERR(attnd_memory_create(a.c, &m, 1, &a.info), ATTND_ENOTSUP);
    play_end(&a, 0);
    end();
}
END_TEST

// A daemon on the CPU has no region to give.
START_TEST(without_a_gpu_there_is_no_service_mode) {
    play b;
    const char *device = getenv("ATTND_E2E_DEVICE");
    char was[32];
    snprintf(was, sizeof(was), "%s", device ? device : "cpu");
    setenv("ATTND_E2E_DEVICE", "cpu", 1);
    memset(&d, 0, sizeof(d));
    e2e_dir(&d);
    e2e_start(&d, flags);
    ATTND_CK_ERR(play_dial(&b, d.url, PLAY_COPIED), ATTND_ENOTSUP);
    ck_assert_str_eq(b.info.field, "engine");
    setenv("ATTND_E2E_DEVICE", was, 1);
    e2e_stop(&d);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_streams");
    TCase *tc = tcase_create("service"), *none = tcase_create("none");
    tcase_set_timeout(tc, 120);
    tcase_set_timeout(none, 60);
    tcase_add_checked_fixture(tc, setup, NULL);
    tcase_add_loop_test(tc, outputs_have_the_bits_of_messages, 0, 3);
    tcase_add_loop_test(tc, masked_outputs_have_the_bits_of_messages, 0, 2); // not with buffers
    tcase_add_test(tc, wrong_masks_are_refused);
    tcase_add_test(tc, the_memory_of_masks_comes_back);
    tcase_add_loop_test(tc, a_graph_is_replayed_with_growing_lengths, 0, 2);
    tcase_add_test(tc, clients_do_not_mix);
    tcase_add_test(tc, a_replay_that_comes_to_nothing_leaves_nothing);
    tcase_add_test(tc, wrong_attends_are_refused);
    tcase_add_test(tc, region_over_the_bound_is_an_error_by_name);
    tcase_add_test(tc, who_has_no_region_gets_no_memory);
    tcase_add_test(none, without_a_gpu_there_is_no_service_mode);
    tcase_add_test(none, masked_prompts_go_in_chunks);
    suite_add_tcase(s, tc);
    suite_add_tcase(s, none);
    return s;
}

CHECK_MAIN(suite)
