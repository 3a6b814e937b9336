// The kernel benchmark: paged decode and prefill on the shapes of the grid, in CUDA graphs of calls
// over caches that together exceed the L2, beside what this GPU reads in the same run.
//
//     bench_cuda [--block N] [--grid decode|short|one|hot|prefill|crossover] [--lengths FILE]
//                [--kernel bulk|portable] [--reps N] [--case BATCH LEN Q_HEADS KV_HEADS] [--q N]
//                [--read-bytes N] [--min-part N] [--prefill-rows N]
// One line a case: time of a call (median over repetitions, their spread), GB/s of K and V, share
// of the read ceiling.  A sample of every case's outputs is compared with float64 before it is
// timed.
// --lengths: kv_len of 128 sequences, one a line, for the ragged rows; else lengths of a log-normal
// distribution.
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "attention/cuda/attn_cuda.h"
#include "tests/conformance/cuda/bench_cuda_device.h"

enum { MAX_ROWS = 1024, MAX_SETS = 8, MAX_REPS = 101, NUM_RAGGED = 128, SAMPLES = 6 };

typedef struct bench_case {
    const char *name; // "uniform", "ragged", "append"
    uint32_t rows;
    int32_t q_heads, kv_heads, head_dim, q_len;
    bool appends; // one token, RoPE on q and k; all of q_len in prefill
    bool is_full; // not causal
    int32_t block_tokens;
    int32_t lengths[MAX_ROWS];
} bench_case;

// set is one copy of a case's data.
typedef struct set {
    char *pool, *q, *out, *k_new, *v_new;
    uint32_t *table;
    attn_row rows[MAX_ROWS];
    attn_params params;
    attn_cuda_plan *plan;
} set;

static struct {
    int32_t block_tokens, reps, min_part;
    const char *kernel;
    double ceiling; // GB/s
    int32_t ragged[NUM_RAGGED];
    attn_cuda *engine;
    float *inv_freq; // device
    double *reference;
    int num_wrong;
    bool hot; // all tables list the same few blocks
} bench = {.block_tokens = 64, .reps = 15};

static void must(cudaError_t code, const char *what) {
    if (code != cudaSuccess) {
        fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(code));
        exit(1);
    }
}

static void must_attn(attnd_err err, const attnd_errinfo *info) {
    if (err != ATTND_OK) {
        fprintf(stderr, "%s %s: %s\n", attnd_errname(err), info->field, info->text);
        exit(1);
    }
}

static int32_t block_of(const bench_case *c) {
    return c->block_tokens ? c->block_tokens : bench.block_tokens;
}

static void *device_alloc(uint64_t bytes, bool random, uint64_t seed) {
    void *p = NULL;
    must(cudaMalloc(&p, bytes), "cudaMalloc");
    if (random) {
        bench_fill(p, bytes / 2, seed);
    }
    return p;
}

static uint64_t case_bytes(const bench_case *c) {
    uint64_t bytes = 0;
    for (uint32_t r = 0; r < c->rows; r++) {
        bytes += (uint64_t)c->lengths[r] * (uint64_t)(c->kv_heads * c->head_dim) * 4;
    }
    return bytes;
}

static uint32_t next_random(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

// set_tables deals the blocks to the rows in random order.
static uint32_t set_tables(set *s, const bench_case *c, uint32_t *first) {
    uint32_t num = 0;
    for (uint32_t r = 0; r < c->rows; r++) {
        first[r] = num;
        num += (uint32_t)((c->lengths[r] + block_of(c) - 1) / block_of(c));
    }
    uint32_t *table = malloc((num + 1) * sizeof(*table));
    uint32_t state = 1;
    for (uint32_t i = 0; i < num; i++) {
        uint32_t j = next_random(&state) % (i + 1);
        table[i] = table[j];
        table[j] = i;
    }
    for (uint32_t i = 0; bench.hot && i < num; i++) {
        table[i] %= 64;
    }
    s->table = device_alloc((num + 1) * sizeof(*table), false, 0);
    must(cudaMemcpy(s->table, table, num * sizeof(*table), cudaMemcpyHostToDevice), "cudaMemcpy");
    free(table);
    return num;
}

static void set_init(set *s, const bench_case *c, uint64_t seed) {
    static uint32_t first[MAX_ROWS];
    static attn_rope rope;
    attnd_errinfo info = {0};
    memset(s, 0, sizeof(*s));
    uint32_t blocks = set_tables(s, c, first);
    int64_t head = (int64_t)block_of(c) * c->head_dim;  // elements
    uint64_t half = (uint64_t)(head * c->kv_heads) * 2; // bytes
    uint64_t tokens = (uint64_t)c->rows * (uint64_t)c->q_len;
    uint64_t q_bytes = tokens * (uint64_t)(c->q_heads * c->head_dim) * 2;
    uint64_t new_bytes = tokens * (uint64_t)(c->kv_heads * c->head_dim) * 2;
    s->pool = device_alloc(blocks * 2 * half + 16, true, seed);
    s->q = device_alloc(q_bytes, true, seed + 1);
    s->out = device_alloc(q_bytes, true, seed + 2);
    s->k_new = device_alloc(new_bytes, true, seed + 3);
    s->v_new = device_alloc(new_bytes, true, seed + 4);
    rope = (attn_rope){bench.inv_freq, 1, c->head_dim, false};
    for (uint32_t r = 0; r < c->rows; r++) {
        uint64_t at = (uint64_t)r * (uint64_t)(c->q_len * c->q_heads * c->head_dim) * 2;
        uint64_t at_new = (uint64_t)r * (uint64_t)(c->q_len * c->kv_heads * c->head_dim) * 2;
        s->rows[r] = (attn_row){.q = s->q + at,
                                .out = s->out + at,
                                .table = s->table + first[r],
                                .stride_q_token = c->q_heads * c->head_dim,
                                .stride_q_head = c->head_dim,
                                .stride_out_token = c->q_heads * c->head_dim,
                                .stride_out_head = c->head_dim,
                                .v_offset = half,
                                .kv_len = c->lengths[r],
                                .q_len = c->q_len,
                                .q_count = c->q_len,
                                .flags = c->is_full ? 0 : ATTN_CAUSAL,
                                .window_left = -1,
                                .window_right = -1};
        if (c->appends) {
            s->rows[r].k_new = s->k_new + at_new;
            s->rows[r].v_new = s->v_new + at_new;
            s->rows[r].stride_k_new_token = s->rows[r].stride_v_new_token =
                c->kv_heads * c->head_dim;
            s->rows[r].stride_k_new_head = s->rows[r].stride_v_new_head = c->head_dim;
            s->rows[r].new_len = c->q_len;
            s->rows[r].rope = &rope;
        }
    }
    s->params = (attn_params){.shape = {.q_dtype = ATTND_BF16,
                                        .kv_dtype = ATTND_BF16,
                                        .q_heads = c->q_heads,
                                        .kv_heads = c->kv_heads,
                                        .head_dim = c->head_dim,
                                        .v_head_dim = c->head_dim,
                                        .block_tokens = block_of(c),
                                        .stride_k_token = c->head_dim,
                                        .stride_k_head = head,
                                        .stride_v_token = c->head_dim,
                                        .stride_v_head = head,
                                        .block_stride = 2 * half},
                              .pool = s->pool,
                              .pool_bytes = blocks * 2 * half,
                              .num_blocks = blocks,
                              .rows = s->rows,
                              .num_rows = c->rows};
    must_attn(attn_cuda_plan_create(&s->plan, bench.engine, &s->params.shape, MAX_ROWS, &info),
              &info);
}

static void set_fini(set *s) {
    attn_cuda_plan_free(s->plan);
    must(cudaFree(s->pool), "cudaFree");
    must(cudaFree(s->q), "cudaFree");
    must(cudaFree(s->out), "cudaFree");
    must(cudaFree(s->k_new), "cudaFree");
    must(cudaFree(s->v_new), "cudaFree");
    must(cudaFree(s->table), "cudaFree");
}

// check compares a sample of outputs with float64: within 2^-7 of the row's largest value.
static bool check(const set *s, const bench_case *c) {
    uint32_t state = 7;
    if (c->appends || case_bytes(c) == 0) {
        return true; // test_conformance_cuda does
    }
    for (int i = 0; i < SAMPLES; i++) {
        uint32_t r = next_random(&state) % c->rows;
        int32_t token = (int32_t)(next_random(&state) % (uint32_t)c->q_len);
        attn_row row = s->rows[r]; // with that token alone
        row.q = (const char *)row.q + token * row.stride_q_token * 2;
        row.kv_len -= c->is_full ? 0 : c->q_len - 1 - token;
        int32_t head = (int32_t)(next_random(&state) % (uint32_t)c->q_heads);
        double want[128];
        uint16_t got[128];
        uint64_t dims = (uint64_t)c->head_dim;
        bench_reference(&s->params, &row, head, bench.reference);
        must(cudaMemcpy(want, bench.reference, dims * 8, cudaMemcpyDeviceToHost), "reference");
        must(cudaMemcpy(got,
                        (char *)row.out + (token * row.stride_out_token + head * c->head_dim) * 2,
                        dims * 2, cudaMemcpyDeviceToHost),
             "cudaMemcpy");
        double largest = 0;
        double error = 0;
        for (uint64_t d = 0; d < dims; d++) {
            largest = fmax(largest, fabs(want[d]));
            double e = fabs((double)attnd_bf16_to_f32(got[d]) - want[d]);
            error = e > error || !(e == e) ? e : error;
        }
        if (!(error <= largest / 128)) {
            printf("WRONG row %u token %d head %d: error %g of %g\n", r, token, head, error,
                   largest);
            bench.num_wrong++;
            return false;
        }
    }
    return true;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

// plan_us is what attn_cuda_plan_set takes on the host.
static double plan_us(set *s, attn_choice *choice) {
    double times[11];
    attnd_errinfo info = {0};
    for (int i = 0; i < 11; i++) {
        double begin = now_us();
        must_attn(attn_cuda_plan_set(s->plan, &s->params, choice, &info), &info);
        times[i] = now_us() - begin;
    }
    qsort(times, 11, sizeof(*times), by_value);
    return times[5];
}

// time_graph returns the microseconds of a call, sorted, one a repetition.
static void time_graph(set *sets, int num_sets, double *times) {
    attnd_errinfo info = {0};
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
    int rounds = (8 + num_sets - 1) / num_sets;
    must(cudaStreamCreate(&stream), "stream");
    must(cudaEventCreate(&begin), "event");
    must(cudaEventCreate(&end), "event");
    must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < rounds * num_sets; i++) {
        must_attn(attn_cuda_launch(sets[i % num_sets].plan, stream, &info), &info);
    }
    must(cudaStreamEndCapture(stream, &graph), "capture");
    must(cudaGraphInstantiate(&exec, graph, 0), "graph");
    for (int i = 0; i < 3; i++) {
        must(cudaGraphLaunch(exec, stream), "graph");
    }
    for (int i = 0; i < bench.reps; i++) {
        float ms = 0;
        must(cudaEventRecord(begin, stream), "event");
        must(cudaGraphLaunch(exec, stream), "graph");
        must(cudaEventRecord(end, stream), "event");
        must(cudaEventSynchronize(end), "graph");
        must(cudaEventElapsedTime(&ms, begin, end), "event");
        times[i] = (double)ms * 1e3 / (rounds * num_sets);
    }
    qsort(times, (size_t)bench.reps, sizeof(*times), by_value);
    must(cudaGraphExecDestroy(exec), "graph");
    must(cudaGraphDestroy(graph), "graph");
    must(cudaStreamDestroy(stream), "stream");
    must(cudaEventDestroy(begin), "event");
    must(cudaEventDestroy(end), "event");
}

// case_flops counts both products, of the keys that causal shows.
static double case_flops(const bench_case *c) {
    double flops = 0;
    for (uint32_t r = 0; r < c->rows; r++) {
        double q = c->q_len;
        double seen = c->is_full ? q * c->lengths[r] : q * (c->lengths[r] - q) + q * q / 2;
        flops += 4 * seen * c->q_heads * c->head_dim;
    }
    return flops;
}

static void run_case(const bench_case *c) {
    static set sets[MAX_SETS];
    double times[MAX_REPS];
    attnd_errinfo info = {0};
    attn_choice choice = {0};
    uint64_t bytes = case_bytes(c);
    int num_sets = bytes == 0 ? 1 : (int)(300000000 / bytes) + 1;
    num_sets = num_sets > MAX_SETS ? MAX_SETS : num_sets;
    for (int i = 0; i < num_sets; i++) {
        set_init(&sets[i], c, (uint64_t)i * 1000 + 1);
    }
    double plan = plan_us(&sets[0], &choice);
    bool good = true;
    for (int i = 0; i < num_sets; i++) {
        must_attn(attn_cuda_run(sets[i].plan, &sets[i].params, NULL, &choice, &info), &info);
        must(cudaDeviceSynchronize(), "run");
        good = good && check(&sets[i], c);
    }
    time_graph(sets, num_sets, times);
    double us = times[bench.reps / 2];
    double gbs = (double)bytes / us / 1e3;
    if (c->q_len > 8) {
        printf(
            "%-8s B%u L%d %d/%d hd%d q%d block%d | %.2f us %.2f..%.2f | %.1f TFLOP/s | plan %.1f "
            "us, %s: %s%s\n",
            c->name, c->rows, c->lengths[0], c->q_heads, c->kv_heads, c->head_dim, c->q_len,
            block_of(c), us, times[0], times[bench.reps - 1], case_flops(c) / us / 1e6, plan,
            choice.kernel, choice.why, good ? "" : " | WRONG");
    } else {
        printf(
            "%-8s B%u L%d %d/%d hd%d q%d block%d | %.2f us %.2f..%.2f | %.0f GB/s | %.1f%% of read "
            "| plan %.1f us, %u splits | %s%s\n",
            c->name, c->rows, c->lengths[0], c->q_heads, c->kv_heads, c->head_dim, c->q_len,
            bench.block_tokens, us, times[0], times[bench.reps - 1], gbs, 100 * gbs / bench.ceiling,
            plan, choice.splits, choice.kernel, good ? "" : " | WRONG");
    }
    fflush(stdout);
    for (int i = 0; i < num_sets; i++) {
        set_fini(&sets[i]);
    }
}

static bench_case c_static;

static bench_case *uniform(const char *name, uint32_t rows, int32_t length, int32_t q_heads,
                           int32_t kv_heads) {
    c_static = (bench_case){.name = name,
                            .rows = rows,
                            .q_heads = q_heads,
                            .kv_heads = kv_heads,
                            .head_dim = 128,
                            .q_len = 1};
    for (uint32_t r = 0; r < rows; r++) {
        c_static.lengths[r] = length;
    }
    return &c_static;
}

static void run_ragged(int32_t times) {
    int64_t total = 0;
    bench_case *c = uniform("ragged", NUM_RAGGED, 0, 32, 8);
    for (int r = 0; r < NUM_RAGGED; r++) {
        c->lengths[r] = bench.ragged[r] * times;
        total += c->lengths[r];
    }
    run_case(c);
    run_case(uniform("equal", NUM_RAGGED, (int32_t)(total / NUM_RAGGED), 32, 8));
}

typedef struct cell {
    uint32_t rows;
    int32_t length;
} cell;

static const cell cells[] = {{1, 8192},  {1, 131072}, {8, 4096},  {32, 4096},
                             {64, 8192}, {128, 1024}, {128, 8192}};

static void run_decode(void) {
    for (size_t i = 0; i < sizeof(cells) / sizeof(*cells); i++) {
        run_case(uniform("decode", cells[i].rows, cells[i].length, 32, 8));
    }
    for (size_t i = 0; i < sizeof(cells) / sizeof(*cells); i++) {
        bench_case *c = uniform("append", cells[i].rows, cells[i].length, 32, 8);
        c->appends = true;
        run_case(c);
    }
    run_case(uniform("decode", 1, 8192, 64, 8));
    run_case(uniform("decode", 128, 8192, 64, 8));
    run_case(uniform("decode", 128, 8192, 32, 32));
    run_ragged(1);
    run_ragged(8);
}

static void run_short(void) {
    static const int32_t lengths[] = {1, 16, 128, 256, 1024};
    static const uint32_t rows[] = {1, 256};
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < 5; j++) {
            run_case(uniform("decode", rows[i], lengths[j], 32, 8));
        }
    }
    for (int i = 0; i < 3; i++) { // speculative steps, and head_dim 64
        bench_case *c = uniform("decode", 32, 4096, i == 2 ? 64 : 32, 8);
        c->q_len = i == 0 ? 4 : 8;
        run_case(c);
    }
    bench_case *c = uniform("decode", 64, 8192, 32, 8);
    c->head_dim = 64;
    run_case(c);
}

// prefill returns a case of q_len tokens behind a cached prefix.
static bench_case *prefill(const char *name, int32_t q_len, int32_t prefix, int32_t q_heads,
                           int32_t kv_heads) {
    bench_case *c = uniform(name, (uint32_t)(16384 / q_len), prefix + q_len, q_heads, kv_heads);
    c->q_len = q_len;
    return c;
}

// 16384 tokens in all: from contiguous tensors (one block a sequence), and from the paged pool.
static void run_prefill(void) {
    for (int32_t n = 512; n <= 16384; n *= 2) {
        for (int how = 0; how < 5; how++) {
            bool is_mha = how == 1 || how == 2;
            bench_case *c =
                prefill(how == 2 ? "full" : "causal", n, 0, is_mha ? 16 : 32, is_mha ? 16 : 8);
            c->is_full = how == 2;
            c->head_dim = how == 3 ? 64 : 128;
            c->block_tokens = how == 4 ? 0 : n;
            run_case(c);
        }
    }
    for (int32_t n = 512; n <= 8192; n *= 4) {
        for (int how = 0; how < 3; how++) { // contiguous, paged, appended to the pool
            bench_case *c = prefill(how == 2 ? "append" : "prefix", n, 4096, 32, 8);
            c->block_tokens = how == 0 ? n + 4096 : 0;
            c->appends = how == 2;
            run_case(c);
        }
    }
}

// Few tokens, for the choice between the kernels; run it with both ends of --prefill-rows.
static void run_crossover(void) {
    static const int32_t rows[] = {1, 8, 64}, prefixes[] = {0, 1024, 8192, 65536};
    for (int i = 0; i < 3; i++) {
        for (int j = 0; j < 4; j++) {
            for (int32_t q = 9; q <= 256; q = q == 9 ? 16 : q * 2) {
                if ((int64_t)rows[i] * prefixes[j] <= 1 << 19) {
                    bench_case *c = uniform("few", (uint32_t)rows[i], prefixes[j] + q, 32, 8);
                    c->q_len = q;
                    run_case(c);
                }
            }
        }
    }
}

static void run_hot(void) {
    static const int32_t shapes[][3] = {{32, 8, 1}, {64, 8, 1}, {32, 8, 4}, {32, 8, 8}, {64, 8, 8}};
    bench.hot = true;
    for (int i = 0; i < 5; i++) {
        bench_case *c = uniform("hot", 32, 4096, shapes[i][0], shapes[i][1]);
        c->q_len = shapes[i][2];
        run_case(c);
    }
    bench_case *c = uniform("hot", 32, 8192, 32, 8);
    c->head_dim = 64;
    run_case(c);
    c = uniform("nothing", 1, 0, 32, 8);
    run_case(c);
    bench.hot = false;
}

static void read_lengths(const char *path) {
    FILE *file = path ? fopen(path, "r") : NULL;
    uint32_t state = 3;
    for (int r = 0; r < NUM_RAGGED; r++) {
        double sum = 0;
        for (int k = 0; k < 12; k++) {
            sum += (double)next_random(&state) / (1 << 24);
        }
        bench.ragged[r] = (int32_t)exp(6.4 + (sum - 6));
        if (file && fscanf(file, "%d", &bench.ragged[r]) != 1) {
            fprintf(stderr, "%s holds fewer than %d lengths\n", path, NUM_RAGGED);
            exit(2);
        }
    }
    if (file) {
        fclose(file);
    }
}

static void measure_ceiling(uint64_t bytes) {
    static const char *const names[BENCH_READS] = {
        "1 x 16 KiB, 2 CTAs an SM", "1 x 16 KiB",       "4 x 4 KiB",
        "4 x 4 KiB set off",        "1 x 16 KiB at 64", "1 x 16 KiB, evict first"};
    void *data = device_alloc(bytes, true, 1);
    for (int how = 0; how < BENCH_READS; how++) {
        double gbs = bench_read(data, bytes, how);
        printf("read     %.1f GiB in 16 KiB runs, %s | %.0f GB/s\n", (double)bytes / (1 << 30),
               names[how], gbs);
        bench.ceiling = gbs > bench.ceiling ? gbs : bench.ceiling;
    }
    must(cudaFree(data), "cudaFree");
}

int main(int argc, char **argv) {
    const char *grid = "decode";
    const char *lengths = NULL;
    uint64_t read_bytes = 4ull << 30;
    int one[4] = {0};
    int q_len = 1;
    int prefill_rows = 0;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "--block") == 0) {
            bench.block_tokens = atoi(value);
        } else if (strcmp(argv[i], "--grid") == 0) {
            grid = value;
        } else if (strcmp(argv[i], "--kernel") == 0) {
            bench.kernel = value;
        } else if (strcmp(argv[i], "--lengths") == 0) {
            lengths = value;
        } else if (strcmp(argv[i], "--reps") == 0) {
            bench.reps = atoi(value);
        } else if (strcmp(argv[i], "--q") == 0) {
            q_len = atoi(value);
        } else if (strcmp(argv[i], "--prefill-rows") == 0) {
            prefill_rows = atoi(value);
        } else if (strcmp(argv[i], "--hot") == 0) {
            bench.hot = atoi(value) != 0;
        } else if (strcmp(argv[i], "--min-part") == 0) {
            bench.min_part = atoi(value);
        } else if (strcmp(argv[i], "--read-bytes") == 0) {
            read_bytes = strtoull(value, NULL, 10);
        } else if (strcmp(argv[i], "--case") == 0 && i + 4 < argc) {
            for (int k = 0; k < 4; k++) {
                one[k] = atoi(argv[i + 1 + k]);
            }
            grid = "one";
            i += 3;
        } else {
            fprintf(stderr, "unknown option %s\n", argv[i]);
            return 2;
        }
        i++;
    }
    bench.reps = bench.reps < 1 || bench.reps > MAX_REPS ? 15 : bench.reps;
    attnd_errinfo info = {0};
    attn_cuda_opts opts = {
        .kernel = bench.kernel, .min_part_tiles = bench.min_part, .prefill_rows = prefill_rows};
    must_attn(attn_cuda_create(&bench.engine, &opts, &info), &info);
    float inv_freq[64];
    for (int i = 0; i < 64; i++) {
        inv_freq[i] = (float)pow(10000, -i / 64.0);
    }
    bench.inv_freq = device_alloc(sizeof(inv_freq), false, 0);
    bench.reference = device_alloc(128 * sizeof(double), false, 0);
    must(cudaMemcpy(bench.inv_freq, inv_freq, sizeof(inv_freq), cudaMemcpyHostToDevice), "copy");
    read_lengths(lengths);
    if (read_bytes > 0) {
        measure_ceiling(read_bytes);
    }
    printf("kernel %s, medians of %d\n", attn_cuda_kernel(bench.engine), bench.reps);
    if (strcmp(grid, "one") == 0) {
        bench_case *c = uniform("decode", (uint32_t)one[0], one[1], one[2], one[3]);
        c->q_len = q_len;
        run_case(c);
    } else if (strcmp(grid, "ragged") == 0) {
        run_ragged(1);
        run_case(uniform("decode", 128, 1024, 32, 8));
    } else if (strcmp(grid, "hot") == 0) {
        run_hot();
    } else if (strcmp(grid, "prefill") == 0) {
        run_prefill();
    } else if (strcmp(grid, "crossover") == 0) {
        run_crossover();
    } else if (strcmp(grid, "short") == 0) {
        run_short();
    } else {
        run_decode();
    }
    attn_cuda_free(bench.engine);
    return bench.num_wrong ? 1 : 0;
}
