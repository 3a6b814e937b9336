// Attention in the client's own streams, over the daemon's arena on a GPU: the bits of the
// daemon's, as it comes, with block masks, and by a CUDA graph that is replayed with growing
// lengths; and clients that are killed.  Needs a GPU: run by tests/gpu_daemon.sh, with
// ATTND_E2E_DEVICE=cuda:0.
//
// CUDA does not survive fork: it is first used in the process of each test, behind its children.
#include <cuda_runtime_api.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "attention/attn_engine.h"
#include "proto/client/attnd.h"
#include "tests/e2e/harness.h"

enum {
    LAYERS = 3,
    HEADS = 8,
    KV_HEADS = 2,
    DIM = 64,
    SEQS = 3,
    PROMPT = 70,
    TOKENS = 1000, // replayed
    MAX_ROWS = SEQS * PROMPT,
    MAX_BLOCKS = 16,
    Q_ROW = HEADS * DIM,
    KV_ROW = KV_HEADS * DIM,
};

#define CUDA_OK(call) ck_assert_int_eq((call), cudaSuccess)

static char in_process[64];
static const char *const flags[] = {
    "--set", "cache.memory=256MiB",      "--set", "cache.slab=4MiB", "--set", in_process,
    "--set", "compute.deterministic=on", NULL};
static e2e_daemon d;
static attnd_errinfo info;
static atomic_uint *turns; // shared with children

static void setup(void) {
    memset(&d, 0, sizeof(d));
    snprintf(in_process, sizeof(in_process), "server.in_process_uids=%u", (unsigned)getuid());
    e2e_dir(&d);
    e2e_start(&d, flags);
}

// tensors is a layer's, in host memory for the daemon, or on the GPU.
typedef struct tensors {
    uint16_t *q, *k, *v, *out;
} tensors;

typedef struct player {
    attnd_client *c;
    uint32_t model;
    uint64_t seqs[SEQS];
    uint32_t len;
    bool here;
    cudaStream_t stream;
    const attnd_block_mask *masks; // [LAYERS], of the attends that follow; NULL = none
    tensors host[LAYERS], device[LAYERS];
} player;

static uint16_t value(uint32_t token, uint32_t kind, uint32_t i) {
    uint32_t h = (token * 1024 + i) * 4 + kind;
    h = (h ^ h >> 15) * UINT32_C(2246822519);
    h = (h ^ h >> 13) * UINT32_C(3266489917);
    uint16_t x;
    attnd_store(&x, ATTND_BF16, 0, (double)(h >> 8) / (1 << 23) - 1);
    return x;
}

static void make_tensors(player *p) {
    for (int l = 0; l < LAYERS; l++) {
        tensors *h = &p->host[l], *t = &p->device[l];
        uint16_t **to[] = {&h->q, &h->k, &h->v, &h->out}, **dev[] = {&t->q, &t->k, &t->v, &t->out};
        const size_t rows[] = {Q_ROW, KV_ROW, KV_ROW, Q_ROW};
        for (int i = 0; i < 4; i++) {
            *to[i] = calloc(MAX_ROWS * rows[i], sizeof(uint16_t));
            if (p->here) {
                CUDA_OK(cudaMalloc((void **)dev[i], MAX_ROWS * rows[i] * sizeof(uint16_t)));
            }
        }
    }
}

static void open_model(player *p) {
    static float inv_freq[DIM / 2], sinks[HEADS];
    attnd_layer_opts layers[LAYERS];
    for (int i = 0; i < DIM / 2; i++) {
        inv_freq[i] = 1 / (float)(1 + i);
    }
    for (int h = 0; h < HEADS; h++) {
        sinks[h] = (float)h / 4 - 1;
    }
    for (int l = 0; l < LAYERS; l++) {
        layers[l] = ATTND_LAYER_DEFAULT;
        layers[l].rope = (attnd_rope_opts){.inv_freq = inv_freq, .num_inv_freq = DIM / 2};
    }
    layers[1].softcap = 5; // so in a graph layers 0 and 2 share a plan, and 1 has its own
    layers[1].sinks = sinks;
    attnd_model_opts opts = {.name = "m",
                             .dtype = ATTND_BF16,
                             .kv_dtype = ATTND_BF16,
                             .layers = LAYERS,
                             .q_heads = HEADS,
                             .kv_heads = KV_HEADS,
                             .head_dim = DIM,
                             .block_tokens = 16,
                             .per_layer = layers};
    ATTND_CK_OK(attnd_model_open(p->c, &opts, &p->model, &info));
}

static void begin(player *p, bool here) {
    memset(p, 0, sizeof(*p));
    p->here = here;
    attnd_connect_opts opts = {.transport = ATTND_TRANSPORT_RING,
                               .engine = here ? attn_engine_cuda() : NULL};
    ATTND_CK_OK(attnd_connect(&p->c, d.url, &opts, &info));
    if (here) {
        CUDA_OK(cudaStreamCreateWithFlags(&p->stream, cudaStreamNonBlocking));
    }
    make_tensors(p);
    open_model(p);
    for (int i = 0; i < SEQS; i++) {
        ATTND_CK_OK(attnd_seq_create(p->c, p->model, &p->seqs[i], &info));
    }
}

// fill writes the tensors of rows tokens of each sequence, the first of which is `first`.
static void fill(player *p, uint32_t first, uint32_t rows) {
    for (uint32_t l = 0; l < LAYERS; l++) {
        const tensors *h = &p->host[l], *t = &p->device[l];
        for (uint32_t r = 0; r < SEQS * rows; r++) {
            uint32_t token = (first + r % rows) * SEQS + r / rows;
            for (uint32_t i = 0; i < Q_ROW; i++) {
                h->q[r * Q_ROW + i] = value(token, 0, i + l);
            }
            for (uint32_t i = 0; i < KV_ROW; i++) {
                h->k[r * KV_ROW + i] = value(token, 1, i + l);
                h->v[r * KV_ROW + i] = value(token, 2, i + l);
            }
        }
        if (p->here) {
            size_t q = SEQS * rows * Q_ROW * 2, kv = SEQS * rows * KV_ROW * 2;
            CUDA_OK(cudaMemcpyAsync(t->q, h->q, q, cudaMemcpyHostToDevice, p->stream));
            CUDA_OK(cudaMemcpyAsync(t->k, h->k, kv, cudaMemcpyHostToDevice, p->stream));
            CUDA_OK(cudaMemcpyAsync(t->v, h->v, kv, cudaMemcpyHostToDevice, p->stream));
        }
    }
}

static attnd_err attend(player *p, uint64_t step, uint32_t layer, uint32_t rows) {
    const tensors *t = p->here ? &p->device[layer] : &p->host[layer];
    attnd_attend_args args = {.step = step,
                              .model = p->model,
                              .layer = layer,
                              .rows = SEQS * rows,
                              .new_rows = SEQS * rows,
                              .q = t->q,
                              .k = t->k,
                              .v = t->v,
                              .out = t->out,
                              .block_mask = p->masks ? &p->masks[layer] : NULL,
                              .stream = p->stream};
    return attnd_attend(p->c, &args, NULL, &info);
}

static uint64_t open_step(player *p, uint32_t rows) {
    attnd_step_seq s[SEQS];
    uint64_t step = 0;
    for (int i = 0; i < SEQS; i++) {
        s[i] = (attnd_step_seq){.seq = p->seqs[i], .new_len = rows};
    }
    attnd_step_opts opts = {.deadline_ms = 10000};
    ATTND_CK_OK(attnd_step_open(p->c, p->model, s, SEQS, &opts, &step, &info));
    return step;
}

static void commit(player *p, uint64_t step, uint32_t rows) {
    attnd_accept accept[SEQS];
    for (int i = 0; i < SEQS; i++) {
        accept[i] = (attnd_accept){.accepted = rows};
    }
    ATTND_CK_OK(attnd_step_commit(p->c, step, accept, SEQS, NULL, &info));
    p->len += rows;
}

// read_out copies the outputs of all layers to out [LAYERS, SEQS * rows, Q_ROW], in the stream.
static void read_out(player *p, uint32_t rows, uint16_t *out) {
    size_t bytes = SEQS * rows * Q_ROW * sizeof(*out);
    for (uint32_t l = 0; l < LAYERS; l++) {
        uint16_t *to = out + l * SEQS * rows * Q_ROW;
        if (p->here) {
            CUDA_OK(
                cudaMemcpyAsync(to, p->device[l].out, bytes, cudaMemcpyDeviceToHost, p->stream));
        } else {
            memcpy(to, p->host[l].out, bytes);
        }
    }
}

static void forward(player *p, uint32_t rows, uint16_t *out) {
    uint64_t step = open_step(p, rows);
    fill(p, p->len, rows);
    for (uint32_t l = 0; l < LAYERS; l++) {
        ATTND_CK_OK(attend(p, step, l, rows));
    }
    read_out(p, rows, out);
    commit(p, step, rows);
    if (p->here) {
        CUDA_OK(cudaStreamSynchronize(p->stream)); // host tensors and out are used again
    }
}

static double stat_of(const char *path) {
    e2e_client c;
    e2e_connect(&c, d.admin_url);
    free(e2e_json(&c, PROTO_HELLO, "{}"));
    double x = e2e_stat(&c, path);
    e2e_close(&c);
    return x;
}

static void await_stat(const char *path, double want, int ms) {
    e2e_client c;
    e2e_connect(&c, d.admin_url);
    free(e2e_json(&c, PROTO_HELLO, "{}"));
    e2e_await_stat(&c, path, want, ms);
    e2e_close(&c);
}

START_TEST(outputs_have_the_bits_of_the_daemons) {
    static uint16_t there[LAYERS * MAX_ROWS * Q_ROW], here[LAYERS * MAX_ROWS * Q_ROW];
    static const uint32_t rows[] = {PROMPT, 1, 1, 5, 1, 33, 1}; // by prefill and decode
    player a, b;
    begin(&a, false);
    begin(&b, true);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        forward(&a, rows[i], there);
        forward(&b, rows[i], here);
        ck_assert_mem_eq(there, here, LAYERS * SEQS * rows[i] * Q_ROW * sizeof(uint16_t));
    }
    uint64_t step = open_step(&b, 1);
    attnd_accept accept[SEQS] = {{.accepted = 1}, {.accepted = 1}, {.accepted = 1}};
    fill(&b, b.len, 1);
    ATTND_CK_OK(attend(&b, step, 1, 1));
    ATTND_CK_ERR(attnd_step_commit(b.c, step, accept, SEQS, NULL, &info), ATTND_EINVAL);
    ck_assert_int_eq(info.detail, 0);
    attnd_close(a.c);
    attnd_close(b.c);
    await_stat("blocks.in_use", 0, 1000);
    e2e_stop(&d);
}
END_TEST

// make_mask lists about half of the blocks of each sequence, whose len will be `len`, for each of
// its query blocks.
static void make_mask(attnd_block_mask *mask, uint32_t *start, uint32_t *kv_blocks, uint32_t len,
                      uint32_t rows, uint32_t q_block) {
    uint32_t num = 0, listed = 0;
    start[0] = 0;
    for (uint32_t i = 0; i < SEQS; i++) {
        for (uint32_t b = 0; b * q_block < rows; b++) {
            for (uint32_t n = 0; n <= (len - 1) / 16; n++) {
                if (rand() & 1) {
                    kv_blocks[listed++] = n;
                }
            }
            start[++num] = listed;
        }
    }
    *mask = (attnd_block_mask){q_block, num, start, kv_blocks};
}

// refuse_masks: lists that lead out of a sequence, and a capture, of which a replay would not know
// other lists.
static void refuse_masks(player *p) {
    const uint32_t start[SEQS + 1] = {0, 1, 2, 3}, kv_blocks[SEQS] = {0, MAX_BLOCKS, 0};
    const attnd_block_mask bad = {1, SEQS, start, kv_blocks};
    const attnd_block_mask masks[LAYERS] = {bad, bad, bad};
    cudaGraph_t graph;
    uint64_t step = open_step(p, 1);
    fill(p, p->len, 1);
    p->masks = masks;
    ATTND_CK_ERR(attend(p, step, 0, 1), ATTND_EINVAL);
    ck_assert_str_eq(info.field, "block_mask");
    const uint32_t none[SEQS + 1] = {0};
    const attnd_block_mask empty = {1, SEQS, none, NULL}, empties[LAYERS] = {empty, empty, empty};
    p->masks = empties;
    CUDA_OK(cudaStreamBeginCapture(p->stream, cudaStreamCaptureModeGlobal));
    ATTND_CK_ERR(attend(p, step, 0, 1), ATTND_ENOTSUP);
    ck_assert_str_eq(info.field, "block_mask");
    CUDA_OK(cudaStreamEndCapture(p->stream, &graph));
    CUDA_OK(cudaGraphDestroy(graph));
    for (uint32_t l = 0; l < LAYERS; l++) { // no key at all
        ATTND_CK_OK(attend(p, step, l, 1));
    }
    commit(p, step, 1);
    p->masks = NULL;
}

START_TEST(masked_outputs_have_the_bits_of_the_daemons) {
    static uint16_t there[LAYERS * MAX_ROWS * Q_ROW], here[LAYERS * MAX_ROWS * Q_ROW];
    static uint32_t start[LAYERS][MAX_ROWS + 1], kv_blocks[LAYERS][MAX_ROWS * MAX_BLOCKS];
    static const uint32_t rows[] = {PROMPT, 1, 5, 33, 1, 70}, q_blocks[] = {16, 1, 3, 7, 1, 1};
    attnd_block_mask masks[LAYERS];
    player a, b;
    begin(&a, false);
    begin(&b, true);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        for (uint32_t l = 0; l < LAYERS; l++) {
            make_mask(&masks[l], start[l], kv_blocks[l], a.len + rows[i], rows[i], q_blocks[i]);
        }
        a.masks = b.masks = masks;
        forward(&a, rows[i], there);
        forward(&b, rows[i], here);
        ck_assert_mem_eq(there, here, LAYERS * SEQS * rows[i] * Q_ROW * sizeof(uint16_t));
    }
    refuse_masks(&b);
    a.masks = NULL;
    attnd_close(a.c);
    attnd_close(b.c);
    await_stat("blocks.in_use", 0, 1000);
    e2e_stop(&d);
}
END_TEST

static cudaGraphExec_t make_graph(player *p, uint64_t step) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA_OK(cudaStreamBeginCapture(p->stream, cudaStreamCaptureModeGlobal));
    for (uint32_t l = 0; l < LAYERS; l++) {
        ATTND_CK_OK(attend(p, step, l, 1));
    }
    CUDA_OK(cudaStreamEndCapture(p->stream, &graph));
    CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
    CUDA_OK(cudaGraphDestroy(graph));
    return exec;
}

// The host runs ahead of the GPU: nothing waits for it before the last token.  The inputs of all
// tokens are there before.
START_TEST(a_graph_is_replayed_with_growing_lengths) {
    enum { BYTES = LAYERS * SEQS * Q_ROW * sizeof(uint16_t) };
    static uint16_t first[LAYERS * MAX_ROWS * Q_ROW], there[BYTES / 2], *here, *q, *k, *v;
    player a, b;
    begin(&a, false);
    begin(&b, true);
    forward(&a, PROMPT, first);
    forward(&b, PROMPT, first);
    double before = stat_of("scheduler.launches");
    const size_t q_bytes = SEQS * Q_ROW * 2, kv_bytes = SEQS * KV_ROW * 2;
    CUDA_OK(cudaHostAlloc((void **)&here, (size_t)TOKENS * BYTES, cudaHostAllocDefault));
    CUDA_OK(cudaMalloc((void **)&q, TOKENS * LAYERS * q_bytes));
    CUDA_OK(cudaMalloc((void **)&k, TOKENS * LAYERS * kv_bytes));
    CUDA_OK(cudaMalloc((void **)&v, TOKENS * LAYERS * kv_bytes));
    for (size_t t = 0; t < TOKENS; t++) {
        fill(&b, b.len + (uint32_t)t, 1);
        CUDA_OK(cudaStreamSynchronize(b.stream));
        for (size_t l = 0; l < LAYERS; l++) {
            size_t at = t * LAYERS + l;
            CUDA_OK(cudaMemcpy((char *)q + at * q_bytes, b.host[l].q, q_bytes, cudaMemcpyDefault));
            CUDA_OK(
                cudaMemcpy((char *)k + at * kv_bytes, b.host[l].k, kv_bytes, cudaMemcpyDefault));
            CUDA_OK(
                cudaMemcpy((char *)v + at * kv_bytes, b.host[l].v, kv_bytes, cudaMemcpyDefault));
        }
    }
    CUDA_OK(cudaDeviceSynchronize()); // b.stream does not wait for copies
    uint64_t captured = open_step(&b, 1), step = captured;
    cudaGraphExec_t exec = make_graph(&b, captured);
    attnd_accept accept[SEQS] = {{.accepted = 1}, {.accepted = 1}, {.accepted = 1}};
    ATTND_CK_ERR(attnd_step_commit(b.c, step, accept, SEQS, NULL, &info), ATTND_EINVAL);
    for (size_t t = 0; t < TOKENS; t++) {
        for (size_t l = 0; l < LAYERS; l++) {
            size_t at = t * LAYERS + l;
            CUDA_OK(cudaMemcpyAsync(b.device[l].q, (char *)q + at * q_bytes, q_bytes,
                                    cudaMemcpyDeviceToDevice, b.stream));
            CUDA_OK(cudaMemcpyAsync(b.device[l].k, (char *)k + at * kv_bytes, kv_bytes,
                                    cudaMemcpyDeviceToDevice, b.stream));
            CUDA_OK(cudaMemcpyAsync(b.device[l].v, (char *)v + at * kv_bytes, kv_bytes,
                                    cudaMemcpyDeviceToDevice, b.stream));
        }
        ATTND_CK_OK(attnd_step_replay(b.c, captured, step, b.stream, &info));
        CUDA_OK(cudaGraphLaunch(exec, b.stream));
        read_out(&b, 1, here + t * BYTES / 2);
        attnd_step_seq s[SEQS];
        for (int i = 0; i < SEQS; i++) {
            s[i] = (attnd_step_seq){.seq = b.seqs[i], .new_len = 1};
        }
        attnd_step_opts opts = {
            .deadline_ms = 10000, .commit_step = step, .commit_accept = accept, .num_commit = SEQS};
        ATTND_CK_OK(attnd_step_open(b.c, b.model, s, SEQS, &opts, &step, &info));
        ck_assert_uint_eq(s[0].committed, PROMPT + t + 1);
    }
    CUDA_OK(cudaStreamSynchronize(b.stream));
    ck_assert_double_eq(stat_of("scheduler.launches"), before); // nothing of it was the daemon's
    for (size_t t = 0; t < TOKENS; t++) {
        forward(&a, 1, there);
        ck_assert_mem_eq(there, here + t * BYTES / 2, BYTES);
    }
    attnd_close(a.c);
    attnd_close(b.c);
    await_stat("blocks.in_use", 0, 1000);
    e2e_stop(&d);
}
END_TEST

static void play_for_ever(void) {
    static uint16_t out[LAYERS * MAX_ROWS * Q_ROW];
    player p;
    begin(&p, true);
    for (;;) {
        forward(&p, p.len ? 1 : PROMPT, out);
        atomic_fetch_add(turns, 1);
        if (p.len > 300) {
            for (int i = 0; i < SEQS; i++) {
                ATTND_CK_OK(attnd_seq_truncate(p.c, p.seqs[i], 0, &info));
            }
            p.len = 0;
        }
    }
}

START_TEST(a_killed_client_leaves_nothing) {
    enum { KILLS = 4 };
    static uint16_t there[LAYERS * MAX_ROWS * Q_ROW], here[LAYERS * MAX_ROWS * Q_ROW];
    for (int i = 0; i < KILLS; i++) {
        atomic_store(turns, 0);
        pid_t pid = fork();
        ck_assert_int_ge(pid, 0);
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            play_for_ever();
            _exit(1);
        }
        uint64_t until = e2e_now_ms() + 20000;
        while (atomic_load(turns) < 3 && e2e_now_ms() < until) {
            usleep(200);
        }
        ck_assert_uint_ge(atomic_load(turns), 3);
        usleep((useconds_t)(rand() % 3000));
        kill(pid, SIGKILL);
        ck_assert_int_eq(waitpid(pid, NULL, 0), pid);
    }
    await_stat("blocks.in_use", 0, 1000);
    ck_assert(!e2e_log_has(&d, "accounting"));
    player a, b;
    begin(&a, false);
    begin(&b, true);
    forward(&a, PROMPT, there);
    forward(&b, PROMPT, here);
    ck_assert_mem_eq(there, here, sizeof(here));
    attnd_close(a.c);
    attnd_close(b.c);
    e2e_stop(&d);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_inproc_cuda");
    TCase *tc = tcase_create("inproc_cuda");
    turns = mmap(NULL, sizeof(*turns), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, setup, NULL);
    tcase_add_test(tc, outputs_have_the_bits_of_the_daemons);
    tcase_add_test(tc, masked_outputs_have_the_bits_of_the_daemons);
    tcase_add_test(tc, a_graph_is_replayed_with_growing_lengths);
    tcase_add_test(tc, a_killed_client_leaves_nothing);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
