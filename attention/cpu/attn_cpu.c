// The CPU engine: one launch at a time on a team of threads.
//
//   check -> plan -> append tasks -> all appended? -> attend tasks -> all done?
//
// Rows of a launch may read what others append (layers that share K and V, forks), so no attend
// starts before the last append has ended.  Threads take tasks from two counters; nobody waits for
// a helper that has not woken.  A folded task walks the splits of its query rows in order and
// finishes them.  The tasks of spread rows leave a state each, and who leaves the last one of a
// group merges them in order and finishes.  Both do the same arithmetic, so which one it was never
// shows.
//
// Memory is taken at create: plan O(max_rows), states of spread rows up to a bound (when they do
// not fit, rows are folded), scratch per thread.  One caller at a time.
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "attention/attn.h"
#include "attention/attn_plan.h"
#include "attention/cpu/attn_cpu_ops.h"
#include "attention/cpu/attn_cpu_task.h"
#include "attention/cpu/attn_cpu_team.h"

enum {
    DEFAULT_ROWS = 4096,
    MAX_ROWS = 1 << 20,
    MAX_THREADS = 1024,
    MAX_GROUPS = 1 << 16,     // groups of tasks that are spread
    INLINE_COST = 8192,       // of a plan: below, waking others costs more than it gives
    INLINE_APPENDS = 4,       // append tasks
    BIG_PAGE_BYTES = 2 << 20, // scratch is worth huge pages
    DEFAULT_STATE_BYTES = 16 << 20,
    DEFAULT_STATE_BYTES_THREAD = 1 << 20,
    DEFAULT_STATE_BYTES_ROW = 1 << 10,
};

// A state of ATTN_TASK_ROWS rows, rounded up to ATTN_CPU_ALIGN.
#define STATE_FLOATS ((size_t)ATTN_TASK_ROWS * (ATTN_MAX_HEAD_DIM + 2))
// A thread's memory: what a kernel needs, the running state, and the state of the next split.
#define THREAD_BYTES (ATTN_CPU_SCRATCH_BYTES + 2 * STATE_FLOATS * sizeof(float))

// counter has a cache line for itself.
typedef struct counter {
    _Alignas(64) _Atomic uint64_t value;
} counter;

struct attn_cpu {
    counter append_next, append_done, next, done;
    attn_cpu_ops ops;
    attn_cpu_team *team;
    uint32_t num_threads;
    bool prints_plan;
    attn_plan plan;
    const attn_params *params; // of the launch that runs
    _Atomic uint64_t saturated;
    _Atomic uint32_t *groups; // [MAX_GROUPS], splits that are still to come
    float *states;            // [state_floats]
    uint64_t state_floats;
    char *threads; // [num_threads, THREAD_BYTES]
    void *plan_storage;
};

// state_at lays a state of num rows over floats: acc, m, d.
static attn_state state_at(float *floats, const attn_params *p, int32_t rows) {
    float *m = floats + (int64_t)rows * p->shape.v_head_dim;
    return (attn_state){.acc = floats, .m = m, .d = m + rows};
}

static void run_appends(attn_cpu *cpu, char *scratch) {
    const attn_params *p = cpu->params;
    uint64_t num = cpu->plan.num_appends;
    uint64_t saturated = 0;
    for (uint64_t i; (i = atomic_fetch_add(&cpu->append_next.value, 1)) < num;) {
        attn_append_task task = attn_plan_append(&cpu->plan, p, i);
        saturated += cpu->ops.append(p, &task, scratch);
        atomic_fetch_add(&cpu->append_done.value, 1);
    }
    if (saturated > 0) {
        atomic_fetch_add(&cpu->saturated, saturated);
    }
    for (uint32_t turns = 0; atomic_load(&cpu->append_done.value) < num;) {
        attn_cpu_relax(&turns);
    }
}

// run_folded computes all splits of its query rows one after the other.
static void run_folded(attn_cpu *cpu, const attn_plan_part *part, const attn_cpu_kernel *kernel,
                       char *memory) {
    const attn_params *p = cpu->params;
    int32_t rows = part->task.head_count * part->task.q_count;
    float *floats = (float *)(void *)(memory + ATTN_CPU_SCRATCH_BYTES);
    attn_state running = state_at(floats, p, rows);
    attn_state more = state_at(floats + STATE_FLOATS, p, rows);
    attn_task task = part->task;
    for (int32_t split = 0; split < part->row->num_splits; split++) {
        attn_plan_split(part->row, split, &task.key_first, &task.key_end);
        attn_span span = attn_task_span(p, &task);
        if (split == 0) {
            kernel->attend(p, &task, &running, memory);
        } else if (span.first < span.end) {
            kernel->attend(p, &task, &more, memory);
            cpu->ops.merge(&running, &more, rows, p->shape.v_head_dim);
        }
    }
    cpu->ops.finish(p, &task, &running);
}

// run_spread computes one split, and when it is the last of its group to come, the result.
static void run_spread(attn_cpu *cpu, const attn_plan_part *part, const attn_cpu_kernel *kernel,
                       char *memory) {
    const attn_params *p = cpu->params;
    const attn_plan_row *row = part->row;
    int32_t rows = part->task.head_count * part->task.q_count;
    float *first = cpu->states + part->state_first;
    attn_state own = state_at(first + (uint64_t)part->split * row->state_stride, p, rows);
    kernel->attend(p, &part->task, &own, memory);
    if (atomic_fetch_sub(&cpu->groups[part->group], 1) > 1) {
        return;
    }
    attn_state result = state_at(first, p, rows);
    for (int32_t split = 1; split < row->num_splits; split++) {
        attn_state more = state_at(first + (uint64_t)split * row->state_stride, p, rows);
        cpu->ops.merge(&result, &more, rows, p->shape.v_head_dim);
    }
    cpu->ops.finish(p, &part->task, &result);
}

static void run_task(attn_cpu *cpu, uint64_t index, char *memory) {
    const attn_params *p = cpu->params;
    attn_plan_part part = attn_plan_task(&cpu->plan, p, index);
    if (part.task.q_count == 0) {
        return;
    }
    const attn_cpu_kernel *kernels = part.row->decode ? cpu->ops.decode : cpu->ops.prefill;
    const attn_cpu_kernel *kernel = &kernels[p->shape.kv_dtype];
    if (part.row->spread) {
        run_spread(cpu, &part, kernel, memory);
    } else {
        run_folded(cpu, &part, kernel, memory);
    }
}

static void work(void *arg, uint32_t worker) {
    attn_cpu *cpu = arg;
    char *memory = cpu->threads + worker * THREAD_BYTES;
    uint64_t num = cpu->plan.num_tasks;
    run_appends(cpu, memory);
    for (uint64_t i; (i = atomic_fetch_add(&cpu->next.value, 1)) < num;) {
        run_task(cpu, i, memory);
        atomic_fetch_add(&cpu->done.value, 1);
    }
    for (uint32_t turns = 0; worker == 0 && atomic_load(&cpu->done.value) < num;) {
        attn_cpu_relax(&turns);
    }
}

// reset prepares the counters for the plan.
static void reset(attn_cpu *cpu, const attn_params *p) {
    cpu->params = p;
    atomic_store(&cpu->append_next.value, 0);
    atomic_store(&cpu->append_done.value, 0);
    atomic_store(&cpu->next.value, 0);
    atomic_store(&cpu->done.value, 0);
    atomic_store(&cpu->saturated, 0);
    for (uint32_t i = 0; i < cpu->plan.num_rows && cpu->plan.num_groups > 0; i++) {
        const attn_plan_row *row = &cpu->plan.rows[i];
        uint64_t groups = row->spread ? row->num_tasks / (uint64_t)row->num_splits : 0;
        for (uint64_t g = 0; g < groups; g++) {
            atomic_store(&cpu->groups[row->group_first + g], (uint32_t)row->num_splits);
        }
    }
}

// choose names what runs: the kernel of the row whose tasks cost most.
static attn_choice choose(const attn_cpu *cpu, const attn_params *p) {
    const attn_plan *plan = &cpu->plan;
    uint32_t decodes = 0;
    uint32_t prefills = 0;
    for (uint32_t i = 0; i < plan->num_rows; i++) {
        decodes += plan->rows[i].num_tasks > 0 && plan->rows[i].decode;
        prefills += plan->rows[i].num_tasks > 0 && !plan->rows[i].decode;
    }
    attn_choice choice = {.kernel = "cpu_append",
                          .why = "no query rows",
                          .splits = (uint32_t)plan->max_splits,
                          .rows = p->num_rows};
    if (decodes + prefills > 0) {
        bool is_decode = plan->rows[plan->order[0]].decode;
        choice.kernel = (is_decode ? cpu->ops.decode : cpu->ops.prefill)[p->shape.kv_dtype].name;
        choice.why = prefills == 0  ? "q_len <= 8 and the query rows of a KV head fit one pass"
                     : decodes == 0 ? "q_len > 8 or too many query rows for one pass"
                     : is_decode    ? "decode and prefill rows, decode tasks cost most"
                                    : "decode and prefill rows, prefill tasks cost most";
    }
    return choice;
}

attnd_err attn_cpu_run(attn_cpu *cpu, const attn_params *p, attn_choice *choice,
                       attnd_errinfo *info) {
    attnd_err err = attn_check(p, info);
    if (err != ATTND_OK) {
        return err;
    }
    attn_machine machine = {
        .workers = cpu->num_threads,
        .decode_rows = cpu->ops.decode[p->shape.kv_dtype].rows,
        .prefill_rows = cpu->ops.prefill[p->shape.kv_dtype].rows,
        .state_floats = cpu->state_floats,
        .max_groups = MAX_GROUPS,
    };
    err = attn_plan_make(&cpu->plan, p, &machine, info);
    if (err != ATTND_OK) {
        return err;
    }
    if (cpu->prints_plan) {
        attn_plan_print(&cpu->plan, stderr);
    }
    reset(cpu, p);
    if (cpu->num_threads == 1 ||
        (cpu->plan.cost < INLINE_COST && cpu->plan.num_appends <= INLINE_APPENDS)) {
        work(cpu, 0);
    } else {
        attn_cpu_team_run(cpu->team, work, cpu);
    }
    if (p->saturated) {
        *p->saturated += atomic_load(&cpu->saturated);
    }
    if (choice) {
        *choice = choose(cpu, p);
    }
    return ATTND_OK;
}

// choose_ops picks the instruction set by name, or the best that the machine has.
static attnd_err choose_ops(attn_cpu *cpu, const attn_cpu_opts *opts, attnd_errinfo *info) {
    const char *name = opts->isa ? opts->isa : getenv("ATTND_CPU");
    uint32_t features = attn_cpu_detect();
    if (name) {
        attnd_err err = attn_cpu_features_of(&features, name, features, info);
        if (err != ATTND_OK) {
            return err;
        }
    } else {
        features = attn_cpu_prefer(features);
    }
    attn_cpu_init(&cpu->ops, features);
    return ATTND_OK;
}

// count_processors returns the processors that this thread may run on.
static uint32_t count_processors(void) {
    cpu_set_t set;
    int num = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
    return (uint32_t)(num < 1 ? 1 : num);
}

// take_memory is aligned to huge pages, and asks for them; it is used as it is when there are none.
static void *take_memory(size_t bytes) {
    size_t rounded = (bytes / BIG_PAGE_BYTES + 1) * BIG_PAGE_BYTES;
    void *memory = aligned_alloc(BIG_PAGE_BYTES, rounded);
    if (memory) {
        madvise(memory, rounded, MADV_HUGEPAGE);
    }
    return memory;
}

// set_sizes reads the options, and decides how many bytes states get.
static attnd_err set_sizes(attn_cpu *cpu, const attn_cpu_opts *opts, uint32_t *max_rows,
                           attnd_errinfo *info) {
    if (opts->num_threads < 0 || opts->num_threads > MAX_THREADS) {
        return attnd_fail(info, ATTND_EINVAL, "num_threads", "num_threads %d is not from 0 to %d",
                          opts->num_threads, MAX_THREADS);
    }
    if (opts->max_rows > MAX_ROWS) {
        return attnd_fail(info, ATTND_EINVAL, "max_rows", "max_rows %u is above %d", opts->max_rows,
                          MAX_ROWS);
    }
    cpu->num_threads = opts->num_threads > 0 ? (uint32_t)opts->num_threads : count_processors();
    *max_rows = opts->max_rows > 0 ? opts->max_rows : DEFAULT_ROWS;
    uint64_t fixed = cpu->num_threads * THREAD_BYTES;
    uint64_t state_bytes = DEFAULT_STATE_BYTES +
                           (uint64_t)DEFAULT_STATE_BYTES_THREAD * cpu->num_threads +
                           (uint64_t)DEFAULT_STATE_BYTES_ROW * *max_rows;
    if (opts->scratch_bytes > 0) {
        if (opts->scratch_bytes < fixed) {
            return attnd_fail(info, ATTND_EINVAL, "scratch_bytes",
                              "scratch_bytes %llu: %u threads need %llu",
                              (unsigned long long)opts->scratch_bytes, cpu->num_threads,
                              (unsigned long long)fixed);
        }
        state_bytes = opts->scratch_bytes - fixed;
    }
    cpu->state_floats = state_bytes / sizeof(float);
    return ATTND_OK;
}

attnd_err attn_cpu_create(attn_cpu **out, const attn_cpu_opts *opts, attnd_errinfo *info) {
    attn_cpu *cpu = aligned_alloc(_Alignof(attn_cpu), sizeof(*cpu));
    if (!cpu) {
        return attnd_fail(info, ATTND_ENOMEM, NULL, "no memory for the engine");
    }
    memset(cpu, 0, sizeof(*cpu));
    uint32_t max_rows = 0;
    attnd_err err = choose_ops(cpu, opts, info);
    if (err == ATTND_OK) {
        err = set_sizes(cpu, opts, &max_rows, info);
    }
    if (err != ATTND_OK) {
        goto fail;
    }
    cpu->prints_plan = getenv("ATTND_PRINT_PLAN") != NULL;
    cpu->groups = calloc(MAX_GROUPS, sizeof(*cpu->groups));
    cpu->plan_storage = malloc(attn_plan_bytes(max_rows));
    cpu->states = take_memory(cpu->state_floats * sizeof(float));
    cpu->threads = take_memory(cpu->num_threads * THREAD_BYTES);
    if (!cpu->groups || !cpu->plan_storage || !cpu->states || !cpu->threads ||
        attn_cpu_team_create(&cpu->team, cpu->num_threads) != ATTND_OK) {
        err = attnd_fail(info, ATTND_ENOMEM, NULL, "no memory for %u rows and %u threads", max_rows,
                         cpu->num_threads);
        goto fail;
    }
    attn_plan_init(&cpu->plan, cpu->plan_storage, max_rows);
    *out = cpu;
    return ATTND_OK;
fail:
    attn_cpu_free(cpu);
    return err;
}

void attn_cpu_free(attn_cpu *cpu) {
    if (!cpu) {
        return;
    }
    attn_cpu_team_free(cpu->team);
    free(cpu->threads);
    free(cpu->states);
    free(cpu->plan_storage);
    free(cpu->groups);
    free(cpu);
}

const char *attn_cpu_isa(const attn_cpu *cpu) {
    return cpu->ops.isa;
}
