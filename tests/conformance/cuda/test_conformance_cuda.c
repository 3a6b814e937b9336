// The CUDA kernels against the float64 reference: types x features x shapes, in automatic, forced
// and deterministic splits, and what only a GPU has: graphs that replay with other lengths, pools
// beyond 2^31 bytes, 70000 sequences.
//
//     test_conformance_cuda [--short] [--kernel bulk|portable|prefill|default|plans]
// bulk and portable decode all rows, prefill prefills all of them, default is what a user gets:
// rows of few and of many query tokens in one launch; plans launches nothing.  --short is what a
// memory checker gets through.  Exit code 77: no GPU.  Oracles are computed by a thread per
// processor while the GPU works; the fact that a launch belongs to is printed with it when it
// fails.
#include <cuda_runtime_api.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/conformance/conf_oracle.h"
#include "tests/conformance/cuda/conf_cases.h"
#include "tests/conformance/cuda/conf_device.h"

enum { MAX_CASES = 1024, MAX_RECORDS = 4096, MAX_THREADS = 32, AHEAD = 48 };

typedef struct test_case {
    const char *fact;
    conf_spec spec;
    conf_layout layout;
    int modes;
    conf_launch launch;
    conf_oracle oracle;
    bool is_ready;
} test_case;

static test_case *cases[MAX_CASES];
static int num_cases;
static int num_failed;
static bool is_short;
static const char *kernel_name;
static bool is_prefill; // all rows are prefilled
static attn_cuda *engine;

// --- oracles, ahead of the GPU

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; // guards next_case, num_done, is_ready
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static int next_case, num_done;

static void *prepare(void *unused) {
    (void)unused;
    for (;;) {
        pthread_mutex_lock(&lock);
        while (next_case < num_cases && next_case >= num_done + AHEAD) {
            pthread_cond_wait(&moved, &lock);
        }
        int i = next_case++;
        pthread_mutex_unlock(&lock);
        if (i >= num_cases) {
            return NULL;
        }
        conf_launch_init(&cases[i]->launch, &cases[i]->spec);
        conf_oracle_init(&cases[i]->oracle, &cases[i]->launch);
        pthread_mutex_lock(&lock);
        cases[i]->is_ready = true;
        pthread_cond_broadcast(&moved);
        pthread_mutex_unlock(&lock);
    }
}

// --- running a case

static void fail(const char *fact, const conf_spec *spec, const char *mode, const char *wrong) {
    num_failed++;
    printf("FAILED %s: %s, %s: %s\n", fact, kernel_name, mode, wrong);
    if (spec) {
        printf("    %s\n", conf_text(spec));
    }
}

static bool ok(attnd_err err, const attnd_errinfo *info, const char *fact) {
    if (err != ATTND_OK) {
        num_failed++;
        printf("FAILED %s: %s %s: %s\n", fact, attnd_errname(err), info->field, info->text);
    }
    return err == ATTND_OK;
}

// run computes a launch on the GPU in one mode.
static bool run(test_case *c, conf_device *d, attn_cuda_plan *plan, int32_t num_splits,
                bool deterministic) {
    attnd_errinfo info = {0};
    conf_launch_reset(&c->launch);
    conf_device_put(d, &c->launch);
    d->params.num_splits = num_splits;
    d->params.deterministic = deterministic;
    if (!ok(attn_cuda_run(plan, &d->params, NULL, NULL, &info), &info, c->fact)) {
        return false;
    }
    cudaError_t code = cudaDeviceSynchronize();
    if (code != cudaSuccess) {
        fail(c->fact, &c->spec, "sync", cudaGetErrorString(code));
        exit(1);
    }
    conf_device_get(d, &c->launch);
    return true;
}

static double worst_ratio;

static void check(test_case *c, const char *mode) {
    conf_worst_ratio = 0;
    const char *wrong = conf_oracle_check(&c->oracle, &c->launch);
    if (conf_worst_ratio > worst_ratio) {
        worst_ratio = conf_worst_ratio;
        printf("    error / bound %.3f, %s: ", worst_ratio, mode);
        printf("    %s\n", conf_text(&c->spec));
    }
    if (wrong) {
        fail(c->fact, &c->spec, mode, wrong);
    }
}

static void run_splits(test_case *c, conf_device *d, attn_cuda_plan *plan) {
    const bool all = c->modes & CONF_MODE_ALL_SPLITS;
    for (int32_t n = all ? 1 : 2; n <= (all ? 128 : 3); n++) {
        char mode[32];
        snprintf(mode, sizeof(mode), "%d splits", n);
        if (run(c, d, plan, n, false)) {
            check(c, mode);
        }
    }
}

static void run_case(test_case *c) {
    attnd_errinfo info = {0};
    attn_cuda_plan *plan = NULL;
    conf_device d;
    conf_device_init(&d, &c->launch, c->layout);
    if (!ok(attn_cuda_plan_create(&plan, engine, &d.params.shape, MAX_RECORDS, &info), &info,
            c->fact)) {
        conf_device_fini(&d);
        return;
    }
    if (c->modes & CONF_MODE_AUTO && run(c, &d, plan, 0, false)) {
        check(c, "automatic");
    }
    if (c->modes & CONF_MODE_DETERMINISTIC && run(c, &d, plan, 0, true)) {
        check(c, "deterministic");
    }
    if (c->modes & (CONF_MODE_SPLITS | CONF_MODE_ALL_SPLITS) &&
        !is_prefill) { // splits are decode's
        run_splits(c, &d, plan);
    }
    attn_cuda_plan_free(plan);
    conf_device_fini(&d);
}

static void run_cases(void) {
    pthread_t threads[MAX_THREADS];
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    int num = online > MAX_THREADS ? MAX_THREADS : (int)online;
    for (int i = 0; i < num; i++) {
        pthread_create(&threads[i], NULL, prepare, NULL);
    }
    const char *fact = "";
    for (int i = 0; i < num_cases; i++) {
        pthread_mutex_lock(&lock);
        while (!cases[i]->is_ready) {
            pthread_cond_wait(&moved, &lock);
        }
        pthread_mutex_unlock(&lock);
        if (strcmp(fact, cases[i]->fact) != 0) {
            fact = cases[i]->fact;
            printf("%s: %s\n", kernel_name, fact);
            fflush(stdout);
        }
        run_case(cases[i]);
        conf_oracle_fini(&cases[i]->oracle);
        conf_launch_fini(&cases[i]->launch);
        free(cases[i]);
        pthread_mutex_lock(&lock);
        num_done = i + 1;
        pthread_cond_broadcast(&moved);
        pthread_mutex_unlock(&lock);
    }
    for (int i = 0; i < num; i++) {
        pthread_join(threads[i], NULL);
    }
    num_cases = next_case = num_done = 0;
}

conf_spec *conf_add(const char *fact, int modes, const conf_spec *spec) {
    test_case *c = calloc(1, sizeof(*c));
    if (!c || num_cases == MAX_CASES) {
        abort();
    }
    c->fact = fact;
    c->modes = modes;
    c->spec = *spec;
    c->layout = (conf_layout){0, 1};
    cases[num_cases++] = c;
    return &c->spec;
}

void conf_lay_out(conf_layout layout) {
    cases[num_cases - 1]->layout = layout;
}

// --- facts of their own

typedef struct outputs {
    unsigned char bytes[1 << 20];
    size_t num;
} outputs;

static void copy_row(const conf_launch *l, uint32_t i, outputs *o) {
    const attn_row *row = &l->rows[conf_launch_row(l, i)];
    o->num = l->out_bytes[i] + l->lse_bytes[i];
    memcpy(o->bytes, row->out, l->out_bytes[i]);
    memcpy(o->bytes + l->out_bytes[i], row->lse, l->lse_bytes[i]);
}

static void run_alone(const char *fact, const conf_spec *spec, uint32_t row, outputs *o) {
    test_case *c = calloc(1, sizeof(*c));
    attnd_errinfo info = {0};
    attn_cuda_plan *plan = NULL;
    conf_device d;
    c->fact = fact;
    conf_launch_init(&c->launch, spec);
    conf_device_init(&d, &c->launch, (conf_layout){0, 1});
    if (ok(attn_cuda_plan_create(&plan, engine, &d.params.shape, MAX_RECORDS, &info), &info,
           fact) &&
        run(c, &d, plan, 0, true)) {
        copy_row(&c->launch, row, o);
    }
    attn_cuda_plan_free(plan);
    conf_device_fini(&d);
    conf_launch_fini(&c->launch);
    free(c);
}

static void bits_depend_on_the_sequence_alone_when_deterministic(void) {
    static const char fact[] = "bits_depend_on_the_sequence_alone_when_deterministic";
    static outputs alone, among;
    printf("%s: %s\n", kernel_name, fact);
    conf_spec s = conf_base(ATTND_BF16, 128, 800);
    s.features |= CONF_ROPE | CONF_SINKS;
    s.rows[0] = (conf_row){5000, 2, 2, 0, 2};
    s.num_rows = 1;
    run_alone(fact, &s, 0, &alone);
    s.num_rows = 20;
    uint64_t state = 800;
    for (uint32_t r = 1; r < s.num_rows; r++) {
        s.rows[r] = (conf_row){1 + conf_below(&state, 4000), 1, 1, 0, 1};
    }
    for (int order = 0; order < 2; order++) {
        s.is_reversed = order == 1;
        s.placement = 77 + (uint64_t)order;
        run_alone(fact, &s, 0, &among);
        if (among.num != alone.num || memcmp(among.bytes, alone.bytes, alone.num) != 0) {
            fail(fact, &s, "deterministic", "other bits among other sequences");
        }
    }
}

// A row's tokens computed in chunks have the bits that they have when computed at once.
static void chunks_of_a_prefill_have_the_bits_of_the_whole(void) {
    static const char fact[] = "chunks_of_a_prefill_have_the_bits_of_the_whole";
    static outputs whole, chunk;
    printf("%s: %s\n", kernel_name, fact);
    for (int i = 0; i < CONF_CHUNKED; i++) {
        conf_spec s = conf_chunked(i);
        const int32_t dim = s.head_dim, pad = s.is_dense ? 0 : 8; // see take_tensor
        run_alone(fact, &s, 0, &whole);
        for (int32_t first = 0; first < 400; first += 150) {
            int32_t count = first + 150 > 400 ? 400 - first : 150;
            s.rows[0] = (conf_row){900, 400, 0, first, count};
            run_alone(fact, &s, 0, &chunk);
            size_t token = (size_t)(4 * (dim + pad) + pad) * 2, begin = (size_t)first * token;
            size_t bytes = (size_t)count * token - (size_t)pad * 4;
            if (memcmp(whole.bytes + begin, chunk.bytes + begin, bytes) != 0) {
                fail(fact, &s, "chunk", "other bits than the whole");
            }
        }
    }
}

static void graphs_replay_with_other_lengths(void) {
    static const char fact[] = "graphs_replay_with_other_lengths";
    printf("%s: %s\n", kernel_name, fact);
    attnd_errinfo info = {0};
    attn_cuda_plan *plan = NULL;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec = NULL;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) {
        fail(fact, NULL, "graph", "no stream");
        return;
    }
    for (uint64_t i = 0; i < 3; i++) {
        test_case *c = calloc(1, sizeof(*c));
        conf_device d;
        c->fact = fact;
        c->spec = conf_base(ATTND_BF16, 128, 810 + i);
        c->spec.num_rows = (uint32_t)(4 - i);
        c->spec.rows[0].kv_len = 77 + 900 * (int32_t)i;
        conf_launch_init(&c->launch, &c->spec);
        conf_oracle_init(&c->oracle, &c->launch);
        conf_launch_reset(&c->launch);
        conf_device_init(&d, &c->launch, (conf_layout){0, 1});
        conf_device_put(&d, &c->launch);
        if (i == 0) {
            ok(attn_cuda_plan_create(&plan, engine, &d.params.shape, 64, &info), &info, fact);
            ok(attn_cuda_plan_set(plan, &d.params, NULL, &info), &info, fact);
            cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
            ok(attn_cuda_launch(plan, stream, &info), &info, fact);
            cudaStreamEndCapture(stream, &graph);
            if (cudaGraphInstantiate(&exec, graph, 0) != cudaSuccess) {
                fail(fact, NULL, "graph", "not instantiated");
            }
        }
        ok(attn_cuda_plan_set(plan, &d.params, NULL, &info), &info, fact);
        ok(attn_cuda_plan_upload(plan, stream, &info), &info, fact);
        cudaGraphLaunch(exec, stream);
        if (cudaStreamSynchronize(stream) != cudaSuccess) {
            fail(fact, &c->spec, "graph", "launch failed");
        }
        conf_device_get(&d, &c->launch);
        check(c, "graph");
        conf_oracle_fini(&c->oracle);
        conf_launch_fini(&c->launch);
        conf_device_fini(&d);
        free(c);
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    attn_cuda_plan_free(plan);
    cudaStreamDestroy(stream);
}

// read_pool computes a launch whose new tokens are in `pool` already, on the CPU or on the GPU.
static void read_pool(test_case *c, attn_cpu *cpu, attn_cuda_plan *plan, const void *pool) {
    attnd_errinfo info = {0};
    conf_launch *l = &c->launch;
    int32_t new_len[CONF_MAX_ROWS];
    conf_launch_reset(l);
    memcpy(l->params.pool, pool, l->pool_bytes);
    for (uint32_t r = 0; r < l->params.num_rows; r++) {
        new_len[r] = l->rows[r].new_len;
        l->rows[r].new_len = 0;
    }
    if (cpu) {
        ok(attn_cpu_run(cpu, &l->params, NULL, &info), &info, c->fact);
    } else {
        conf_device d;
        conf_device_init(&d, l, c->layout);
        conf_device_put(&d, l);
        ok(attn_cuda_run(plan, &d.params, NULL, NULL, &info), &info, c->fact);
        conf_device_get(&d, l);
        conf_device_fini(&d);
    }
    for (uint32_t r = 0; r < l->params.num_rows; r++) {
        l->rows[r].new_len = new_len[r];
    }
    check(c, cpu ? "the CPU on the GPU's pool" : "the GPU on the CPU's pool");
}

static void cpu_and_gpu_work_on_the_same_pool_image(void) {
    static const char fact[] = "cpu_and_gpu_work_on_the_same_pool_image";
    printf("%s: %s\n", kernel_name, fact);
    for (uint64_t i = 0; i < 4; i++) {
        test_case *c = calloc(1, sizeof(*c));
        attnd_errinfo info = {0};
        attn_cuda_plan *plan = NULL;
        attn_cpu *cpu = NULL;
        conf_device d;
        c->fact = fact;
        c->layout = (conf_layout){0, 1};
        c->spec = conf_base(conf_dtype_of(i), conf_head_dim_of(i), 830 + i);
        c->spec.features |= CONF_ROPE;
        c->spec.block_tokens = i % 2 ? 64 : 16;
        conf_launch_init(&c->launch, &c->spec);
        conf_oracle_init(&c->oracle, &c->launch);
        conf_device_init(&d, &c->launch, c->layout);
        void *pool = malloc(c->launch.pool_bytes);
        if (ok(attn_cpu_create(&cpu, &(attn_cpu_opts){0}, &info), &info, fact) &&
            ok(attn_cuda_plan_create(&plan, engine, &d.params.shape, MAX_RECORDS, &info), &info,
               fact) &&
            pool && run(c, &d, plan, 0, false)) {
            check(c, "the GPU");
            memcpy(pool, c->launch.params.pool, c->launch.pool_bytes);
            read_pool(c, cpu, plan, pool);
            conf_launch_reset(&c->launch);
            ok(attn_cpu_run(cpu, &c->launch.params, NULL, &info), &info, fact);
            check(c, "the CPU");
            memcpy(pool, c->launch.params.pool, c->launch.pool_bytes);
            read_pool(c, NULL, plan, pool);
        }
        free(pool);
        attn_cuda_plan_free(plan);
        attn_cpu_free(cpu);
        conf_device_fini(&d);
        conf_oracle_fini(&c->oracle);
        conf_launch_fini(&c->launch);
        free(c);
    }
}

// A stream whose capture was broken refuses the launch; the next launch in another stream is fine.
static void errors_belong_to_the_launch_that_has_them(void) {
    static const char fact[] = "errors_belong_to_the_launch_that_has_them";
    printf("%s: %s\n", kernel_name, fact);
    attnd_errinfo info = {0};
    attn_cuda_plan *plan = NULL;
    cudaStream_t broken;
    cudaGraph_t graph = NULL;
    void *memory = NULL;
    conf_device d;
    test_case *c = calloc(1, sizeof(*c));
    c->fact = fact;
    c->spec = conf_base(ATTND_BF16, 128, 840);
    conf_launch_init(&c->launch, &c->spec);
    conf_oracle_init(&c->oracle, &c->launch);
    conf_device_init(&d, &c->launch, (conf_layout){0, 1});
    ok(attn_cuda_plan_create(&plan, engine, &d.params.shape, MAX_RECORDS, &info), &info, fact);
    ok(attn_cuda_plan_set(plan, &d.params, NULL, &info), &info, fact);
    cudaStreamCreateWithFlags(&broken, cudaStreamNonBlocking);
    cudaStreamBeginCapture(broken, cudaStreamCaptureModeGlobal);
    cudaMalloc(&memory, 16); // no call of a capture
    attnd_err err = attn_cuda_launch(plan, broken, &info);
    if (err != ATTND_ECUDA || info.detail != (int32_t)cudaErrorStreamCaptureInvalidated) {
        fail(fact, NULL, "launch", "the broken capture is not reported");
    }
    cudaStreamEndCapture(broken, &graph);
    cudaStreamDestroy(broken);
    cudaFree(memory);
    (void)cudaGetLastError();
    if (run(c, &d, plan, 0, false)) {
        check(c, "after an error");
    }
    attn_cuda_plan_free(plan);
    conf_device_fini(&d);
    conf_oracle_fini(&c->oracle);
    conf_launch_fini(&c->launch);
    free(c);
}

// One token a sequence: the output is its value, whatever the logit; the LSE is the logit.
static void seventy_thousand_sequences_of_one_token_give_their_values(void) {
    static const char fact[] = "seventy_thousand_sequences_of_one_token_give_their_values";
    enum { NUM = 70000, HEADS = 2, DIM = 64, BLOCK = 16 };
    printf("%s: %s\n", kernel_name, fact);
    const uint64_t half = (uint64_t)HEADS * BLOCK * DIM; // elements of K of a block
    const uint64_t block_bytes = 2 * half * 2;
    attnd_errinfo info = {0};
    attn_cuda_plan *plan = NULL;
    attn_shape shape = {.q_dtype = ATTND_BF16,
                        .kv_dtype = ATTND_BF16,
                        .q_heads = HEADS,
                        .kv_heads = HEADS,
                        .head_dim = DIM,
                        .v_head_dim = DIM,
                        .block_tokens = BLOCK,
                        .stride_k_token = DIM,
                        .stride_k_head = BLOCK * DIM,
                        .stride_v_token = DIM,
                        .stride_v_head = BLOCK * DIM,
                        .block_stride = block_bytes};
    uint16_t *pool = malloc(NUM * block_bytes);
    uint16_t *out = malloc((size_t)NUM * HEADS * DIM * 2);
    uint32_t *table = malloc(NUM * sizeof(*table));
    attn_row *rows = calloc(NUM, sizeof(*rows));
    char *g_pool, *g_q, *g_out, *g_table;
    memset(pool, 0xff, NUM * block_bytes);
    uint64_t state = 900;
    for (uint64_t i = 0; i < NUM; i++) {
        table[i] = (uint32_t)(NUM - 1 - i);
        for (uint64_t h = 0; h < HEADS; h++) {
            for (uint64_t d = 0; d < DIM; d++) {
                uint16_t *block = pool + table[i] * 2 * half;
                block[h * BLOCK * DIM + d] = 0x3f80;
                block[half + h * BLOCK * DIM + d] =
                    attnd_f32_to_bf16((float)conf_below(&state, 1000));
            }
        }
    }
    if (cudaMalloc((void **)&g_pool, NUM * block_bytes) != cudaSuccess ||
        cudaMalloc((void **)&g_q, (size_t)NUM * HEADS * DIM * 2) != cudaSuccess ||
        cudaMalloc((void **)&g_out, (size_t)NUM * HEADS * DIM * 2) != cudaSuccess ||
        cudaMalloc((void **)&g_table, NUM * sizeof(*table)) != cudaSuccess) {
        abort();
    }
    cudaMemcpy(g_pool, pool, NUM * block_bytes, cudaMemcpyHostToDevice);
    cudaMemcpy(g_table, table, NUM * sizeof(*table), cudaMemcpyHostToDevice);
    cudaMemset(g_q, 0, (size_t)NUM * HEADS * DIM * 2);
    for (uint64_t i = 0; i < NUM; i++) {
        rows[i] = (attn_row){.q = g_q + i * HEADS * DIM * 2,
                             .out = g_out + i * HEADS * DIM * 2,
                             .table = (const uint32_t *)(const void *)g_table + i,
                             .stride_q_token = HEADS * DIM,
                             .stride_q_head = DIM,
                             .stride_out_token = HEADS * DIM,
                             .stride_out_head = DIM,
                             .v_offset = half * 2,
                             .kv_len = 1,
                             .q_len = 1,
                             .q_count = 1,
                             .window_left = -1,
                             .window_right = -1};
    }
    attn_params p = {.shape = shape,
                     .pool = g_pool,
                     .pool_bytes = NUM * block_bytes,
                     .num_blocks = NUM,
                     .rows = rows,
                     .num_rows = NUM};
    for (int deterministic = 0; deterministic < 2; deterministic++) {
        p.deterministic = deterministic != 0;
        cudaMemset(g_out, 0xff, (size_t)NUM * HEADS * DIM * 2);
        if ((!plan && !ok(attn_cuda_plan_create(&plan, engine, &shape, NUM, &info), &info, fact)) ||
            !ok(attn_cuda_run(plan, &p, NULL, NULL, &info), &info, fact)) {
            break;
        }
        if (cudaMemcpy(out, g_out, (size_t)NUM * HEADS * DIM * 2, cudaMemcpyDeviceToHost) !=
            cudaSuccess) {
            fail(fact, NULL, "run", "launch failed");
            break;
        }
        for (uint64_t i = 0; i < NUM; i++) {
            for (uint64_t h = 0; h < HEADS; h++) {
                if (memcmp(out + (i * HEADS + h) * DIM,
                           pool + table[i] * 2 * half + half + h * BLOCK * DIM, DIM * 2) != 0) {
                    fail(fact, NULL, "run", "an output is not the value");
                    i = NUM;
                    break;
                }
            }
        }
    }
    attn_cuda_plan_free(plan);
    cudaFree(g_pool);
    cudaFree(g_q);
    cudaFree(g_out);
    cudaFree(g_table);
    free(pool);
    free(out);
    free(table);
    free(rows);
}

static void run_kernel(const char *name) {
    attnd_errinfo info = {0};
    kernel_name = name;
    is_prefill = strcmp(name, "prefill") == 0;
    const bool is_default = strcmp(name, "default") == 0;
    attn_cuda_opts opts = {.kernel = is_prefill   ? "bulk"
                                     : is_default ? NULL
                                                  : name,
                           .prefill_rows = is_prefill   ? 1
                                           : is_default ? 0
                                                        : -1};
    if (!ok(attn_cuda_create(&engine, &opts, &info), &info, "an engine is made")) {
        return;
    }
    worst_ratio = 0;
    conf_add_many(name, is_short);
    if (!is_default) {
        conf_add_few(is_short);
    }
    run_cases();
    if (!is_default) {
        bits_depend_on_the_sequence_alone_when_deterministic();
        graphs_replay_with_other_lengths();
        cpu_and_gpu_work_on_the_same_pool_image();
    }
    if (is_prefill) {
        chunks_of_a_prefill_have_the_bits_of_the_whole();
    }
    if (!is_short && !is_default) {
        errors_belong_to_the_launch_that_has_them(); // a memory checker would count the error
        seventy_thousand_sequences_of_one_token_give_their_values();
    }
    printf("%s: largest error / bound %.3f\n", name, worst_ratio);
    attn_cuda_free(engine);
}

static void check_plans(void) {
    const char *wrong = conf_long_rows_are_planned();
    kernel_name = "plans";
    if (wrong) {
        fail("long_rows_are_planned", NULL, "plan", wrong);
    }
    wrong = conf_checked_masks_are_planned();
    if (wrong) {
        fail("checked_masks_are_planned", NULL, "plan", wrong);
    }
}

int main(int argc, char **argv) {
    static const char *const names[] = {"bulk", "portable", "prefill", "default"};
    const char *only = NULL;
    for (int i = 1; i < argc; i++) {
        is_short = is_short || strcmp(argv[i], "--short") == 0;
        only = strcmp(argv[i], "--kernel") == 0 && i + 1 < argc ? argv[i + 1] : only;
    }
    struct cudaDeviceProp prop;
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 ||
        cudaGetDeviceProperties(&prop, 0) != cudaSuccess) {
        printf("no GPU here\n");
        return 77;
    }
    for (int i = 0; i < 4; i++) {
        bool is_there = (i != 0 || prop.major >= 9) && (i < 2 || prop.major == 9);
        if (only ? strcmp(only, names[i]) == 0 : is_there) {
            run_kernel(names[i]);
        }
    }
    if (!only || strcmp(only, "plans") == 0) {
        check_plans();
    }
    printf("%d failed\n", num_failed);
    return num_failed ? 1 : 0;
}
