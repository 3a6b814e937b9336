// How fast blocks are taken and given back: a million blocks, half of them outstanding and spread
// at random, each round gives a random one back and takes another.  One line a case, the median of
// 9 runs and the best, which others on the machine disturbed least.  With --check the exit status
// is 1 when the best is below the target of 10 million pairs a second.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kvcache/kv_pool.h"

enum { BLOCKS = 1 << 20, PAIRS = 1 << 20, RUNS = 9 };
#define BLOCK_BYTES UINT64_C(16384)
#define TARGET      10e6

static uint32_t outstanding[BLOCKS];
static uint64_t rng = 88172645463325252;

static uint32_t random_below(uint32_t n) {
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return (uint32_t)((rng >> 32) * n >> 32);
}

// cpu_us is this process's own time: what others do on the machine does not count.
static uint64_t cpu_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

static void must(attnd_err err) {
    ATTND_ASSERT(err == ATTND_OK);
}

static kv_cache *make(const kv_arena *arena) {
    const kv_opts opts = {
        .slab_bytes = 32 << 20,
        .max_blocks = BLOCKS,
        .max_seqs = 16,
        .max_seq_blocks = 16,
        .max_models = 1,
        .max_tenants = 1,
        .max_sessions = 1,
        .max_steps = 1,
        .max_step_seqs = 1,
    };
    const kv_model_spec spec = {.name = "m",
                                .num_groups = 1,
                                .groups = {{.layers = 1,
                                            .kv_heads = 1,
                                            .k_row_bytes = 512,
                                            .v_row_bytes = 512,
                                            .block_tokens = 16,
                                            .window_left = -1}}};
    kv_cache *kv;
    uint32_t tenant, model;
    must(kv_create(&kv, arena, &opts, NULL));
    must(kv_tenant_set(kv, "t", 0, &tenant));
    must(kv_model_open(kv, &spec, &model, NULL));
    return kv;
}

// run returns pairs a second.
static double run(kv_cache *kv, bool near) {
    uint64_t start = cpu_us();
    uint32_t last = KV_NONE;
    for (int i = 0; i < PAIRS; i++) {
        uint32_t at = random_below(BLOCKS / 2);
        if (near) {
            last = outstanding[random_below(BLOCKS / 2)]; // the last block of some sequence
            last = last == outstanding[at] ? KV_NONE : last;
        }
        kv_pool_rele(kv, outstanding[at]);
        outstanding[at] = kv_pool_take(kv, 0, last);
    }
    return PAIRS * 1e6 / (double)(cpu_us() - start);
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double report(kv_cache *kv, const char *name, bool near) {
    double rates[RUNS];
    for (int i = 0; i < RUNS; i++) {
        rates[i] = run(kv, near);
    }
    qsort(rates, RUNS, sizeof(rates[0]), compare);
    double median = rates[RUNS / 2], best = rates[RUNS - 1];
    printf("kv_pool %s blocks=%d outstanding=%d | %.1f ns | %.1f M pairs/s | best %.1f\n", name,
           BLOCKS, BLOCKS / 2, 1e9 / median, median / 1e6, best / 1e6);
    return best;
}

int main(int argc, char **argv) {
    const kv_arena arena = {.bytes = BLOCKS * BLOCK_BYTES, .fd = -1, .on_device = true};
    kv_cache *kv = make(&arena);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        outstanding[i] = kv_pool_take(kv, 0, KV_NONE);
        ATTND_ASSERT(outstanding[i] != KV_NONE);
    }
    for (uint32_t left = BLOCKS; left > BLOCKS / 2; left--) {
        uint32_t at = random_below(left);
        kv_pool_rele(kv, outstanding[at]);
        outstanding[at] = outstanding[left - 1];
    }
    double any = report(kv, "take+give", false);
    double near = report(kv, "take near+give", true);
    kv_free(kv);
    bool check = argc > 1 && strcmp(argv[1], "--check") == 0;
    return check && (any < TARGET || near < TARGET) ? EXIT_FAILURE : EXIT_SUCCESS;
}
