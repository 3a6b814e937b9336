// How a launch is cut.  Per row: which kernel, how its query rows tile, which keys any of them
// sees, and into how many splits those go.
//
// Cost of a piece of work: keys * KV heads * (query rows + ROW_COST).  ROW_COST stands for fetching
// and converting one key of K and V, which a decode pays whatever the number of rows.  A worker
// should find TASKS_PER_WORKER tasks, so that the last ones to finish differ by little; no task is
// made smaller than MIN_TASK_COST for it.  Rows are ordered costliest task first (longest
// processing time first), to a quarter of an octave: a counting sort, since a plan of 128 rows has
// 5 us.
//
// A decode row that is much of its launch is cut in rounds: a split for every worker, all splits of
// a round together half of the keys that are left (factoring; Hummel, Schonberg, Flynn, 1992).  So
// there are few states to merge, and yet the last tasks are short: a helper that comes late, or is
// slower, costs little.  Each task costs some 5 us beside its keys, so where halves become small
// the round before the last two takes all but those, if the row is alone: with others its workers
// would begin that round too far apart.
//
// MAX_ROW_COST keeps sums over all rows inside 64 bits.  A task is found from its index by
// bisection over the running sums, so that a plan takes O(rows) memory however many tiles a long
// prefill has.
#include "attention/attn_plan.h"

#include <inttypes.h>
#include <string.h>

#include "attention/attn_mask.h"

enum {
    ROW_COST = 4,
    TASKS_PER_WORKER = 8,
    MIN_TASK_COST = 8192,
    MIN_SPLIT_KEYS = 256,
    LAST_ROUNDS = 2,   // with splits of the least size
    SHORT_ROUNDS = 16, // so many times the keys of such a round are no longer halved
    ROUND_PARTS = 64, // a split of a round is no less than this part of what a worker gets of a row
    STATE_ALIGN_FLOATS = 16, // 64 bytes
    NUM_BUCKETS = 256,       // of the order: 64 octaves in quarters
};

#define MAX_ROW_COST (1ull << 44)

static int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

static int32_t min_i32(int32_t a, int32_t b) {
    return a < b ? a : b;
}

size_t attn_plan_bytes(uint32_t max_rows) {
    size_t row_bytes = sizeof(attn_plan_row) + sizeof(uint32_t) + 2 * sizeof(uint64_t);
    return (size_t)max_rows * row_bytes;
}

void attn_plan_init(attn_plan *plan, void *storage, uint32_t max_rows) {
    memset(plan, 0, sizeof(*plan));
    plan->max_rows = max_rows;
    plan->rows = storage;
    plan->task_end = (uint64_t *)(plan->rows + max_rows);
    plan->append_end = plan->task_end + max_rows;
    plan->order = (uint32_t *)(plan->append_end + max_rows);
}

// steps is what all rows of a launch have in common: query rows a tile, whole tokens where a kernel
// takes that many.
typedef struct steps {
    int32_t group;
    int32_t decode_rows, decode, prefill;
} steps;

static steps steps_of(const attn_shape *s, const attn_machine *m) {
    int32_t group = s->q_heads / s->kv_heads;
    return (steps){
        .group = group,
        .decode_rows = m->decode_rows,
        .decode = m->decode_rows >= group ? m->decode_rows / group * group : m->decode_rows,
        .prefill = m->prefill_rows >= group ? m->prefill_rows / group * group : m->prefill_rows,
    };
}

// set_tiles cuts the query rows of a row into tiles.  With a block mask tiles begin anew in each
// query block, else where the chunk of the row begins.
static void set_tiles(attn_plan_row *r, const attn_row *row, const attn_shape *s, const steps *st) {
    r->decode = row->q_len <= ATTN_DECODE_TOKENS && row->q_len * st->group <= st->decode_rows;
    r->q_end = (row->q_first + row->q_count) * st->group;
    r->block_first = 0;
    r->num_blocks = row->q_count > 0;
    int32_t block = row->q_count;
    if (row->block_mask && row->q_count > 0) {
        block = min_i32(row->block_mask->q_block, row->q_len);
        r->block_first = row->q_first / block;
        r->num_blocks = (row->q_first + row->q_count - 1) / block - r->block_first + 1;
    }
    r->q_block = block * st->group;
    r->q_step = min_i32(r->decode ? st->decode : st->prefill, r->q_block);
    r->block_tiles = r->q_step == r->q_block ? r->num_blocks > 0 : 1 + (r->q_block - 1) / r->q_step;
    r->head_step = 1;
    if (r->decode) {
        int32_t head_rows = r->q_step < ATTN_HEAD_ROWS ? ATTN_HEAD_ROWS : r->q_step;
        r->head_step = min_i32(s->kv_heads, ATTN_TASK_ROWS / head_rows);
    }
}

// set_keys finds the keys that the row sees, and its cost.
static void set_keys(attn_plan_row *r, const attn_row *row, const attn_shape *s, const steps *st) {
    r->key_first = 0;
    r->key_end = 0;
    r->cost = 0;
    if (row->q_count == 0) {
        return;
    }
    attn_span low = attn_mask_span(row, row->q_first, row->q_first);
    attn_span high = low;
    if (row->q_count > 1) {
        int32_t last = row->q_first + row->q_count - 1;
        high = attn_mask_span(row, last, last);
    }
    r->key_first = low.first - low.first % ATTN_STEP_KEYS;
    r->key_end = high.end;
    uint64_t mean = ((uint64_t)(low.end - low.first) + (uint64_t)(high.end - high.first)) / 2;
    uint64_t num_rows = (uint64_t)row->q_count * (uint64_t)st->group;
    uint64_t tiles = (uint64_t)r->block_tiles * (uint64_t)r->num_blocks;
    uint64_t cost = 0;
    bool is_huge = __builtin_mul_overflow((mean + 1) * (uint64_t)s->kv_heads,
                                          num_rows + ROW_COST * tiles, &cost);
    r->cost = is_huge || cost > MAX_ROW_COST ? MAX_ROW_COST : cost;
}

// round_keys returns the keys of a split when so many of its row are left; of equal splits too.
static int32_t round_keys(const attn_plan_row *r, int64_t left) {
    if (r->round_splits == 0) {
        return r->split_keys;
    }
    int64_t last = LAST_ROUNDS * (int64_t)r->round_splits * r->split_keys;
    int64_t keys = ceil_div(left <= r->short_keys ? left - last : left / 2, r->round_splits);
    keys = ceil_div(keys, ATTN_STEP_KEYS) * ATTN_STEP_KEYS;
    return keys < r->split_keys ? r->split_keys : (int32_t)keys;
}

// set_rounds cuts a row in rounds, if it has the keys for them and that gives no more splits than
// there may be.
static bool set_rounds(attn_plan_row *r, int32_t workers, bool is_alone) {
    int64_t keys = r->key_end - r->key_first;
    int64_t least = ceil_div(MIN_TASK_COST * keys, (int64_t)r->cost);
    int64_t part = keys / (ROUND_PARTS * (int64_t)workers);
    least = least < part ? part : least;
    least = ceil_div(least, ATTN_STEP_KEYS) * ATTN_STEP_KEYS;
    if (keys < 2 * least * workers) {
        return false;
    }
    r->split_keys = (int32_t)least;
    r->round_splits = workers;
    r->short_keys = is_alone ? SHORT_ROUNDS * workers * r->split_keys : 0;
    int64_t num = 0;
    for (int64_t left = keys; left > 0;) {
        int64_t each = round_keys(r, left);
        num += each * workers < left ? workers : ceil_div(left, each);
        left -= each * workers;
    }
    r->num_splits = (int32_t)num;
    r->round_splits = num > ATTN_MAX_SPLITS ? 0 : workers;
    return num <= ATTN_MAX_SPLITS;
}

// set_equal cuts a row in equal splits, as many as tasks are wanted of each of its tiles.
static void set_equal(attn_plan_row *r, uint64_t tasks, uint64_t tasks_wanted) {
    int32_t keys = r->key_end - r->key_first;
    int64_t wanted = 1;
    if (tasks > 0 && tasks_wanted > tasks) {
        wanted = ceil_div((int64_t)tasks_wanted, (int64_t)tasks);
    }
    int64_t most = keys / MIN_SPLIT_KEYS;
    wanted = wanted > most ? most : wanted;
    wanted = wanted > ATTN_MAX_SPLITS ? ATTN_MAX_SPLITS : wanted;
    int64_t split = wanted > 1 ? ceil_div(keys, wanted) : keys;
    split = ceil_div(split, ATTN_STEP_KEYS) * ATTN_STEP_KEYS;
    r->split_keys = (int32_t)(split > keys ? keys : split);
    r->num_splits = split < keys ? (int32_t)ceil_div(keys, split) : 1;
}

// set_splits decides where the splits begin, given how many tasks the row should give.
static void set_splits(attn_plan_row *r, const attn_params *p, uint64_t tasks_wanted,
                       uint32_t workers) {
    uint64_t tasks = (uint64_t)r->head_parts * (uint64_t)r->block_tiles * (uint64_t)r->num_blocks;
    bool is_much = r->decode && workers > 1 && tasks_wanted >= 2 * (uint64_t)workers;
    r->round_splits = 0;
    if (p->deterministic) {
        r->key_first -= r->key_first % ATTN_SPLIT_TOKENS;
        r->split_keys = ATTN_SPLIT_TOKENS;
        r->num_splits = (int32_t)ceil_div(r->key_end - r->key_first, ATTN_SPLIT_TOKENS);
    } else if (p->num_splits > 0) {
        r->split_keys = (int32_t)ceil_div(r->key_end - r->key_first, p->num_splits);
        r->num_splits = p->num_splits;
    } else if (tasks != 1 || !is_much || !set_rounds(r, (int32_t)workers, p->num_rows == 1)) {
        set_equal(r, tasks, tasks_wanted);
    }
    r->num_splits = r->num_splits < 1 ? 1 : r->num_splits;
}

// set_tasks gives a row its tasks: heads are parted only when splits alone do not give enough,
// since a block's KV heads lie side by side and are best walked together.
static void set_tasks(attn_plan_row *r, attn_plan *plan, const attn_params *p,
                      const attn_machine *m, uint64_t target) {
    uint64_t wanted = r->cost <= target ? 1 : (r->cost + target - 1) / target;
    uint64_t tiles = (uint64_t)r->block_tiles * (uint64_t)r->num_blocks;
    r->head_parts =
        r->head_step == p->shape.kv_heads ? 1 : (int32_t)ceil_div(p->shape.kv_heads, r->head_step);
    set_splits(r, p, wanted, m->workers);
    uint64_t tasks = tiles * (uint64_t)r->head_parts;
    if (r->round_splits == 0 && tasks * (uint64_t)r->num_splits < wanted && r->head_step > 1 &&
        tasks > 0) {
        uint64_t parts = wanted / (tiles * (uint64_t)r->num_splits);
        int64_t step = ceil_div(p->shape.kv_heads, (int64_t)(parts ? parts : 1));
        r->head_step = min_i32(r->head_step, (int32_t)(step < 1 ? 1 : step));
        r->head_parts = (int32_t)ceil_div(p->shape.kv_heads, r->head_step);
        tasks = tiles * (uint64_t)r->head_parts;
    }
    uint64_t states = (uint64_t)r->head_step * (uint64_t)r->q_step;
    uint64_t floats = states * ((uint64_t)p->shape.v_head_dim + 2);
    r->state_stride = (floats + STATE_ALIGN_FLOATS - 1) / STATE_ALIGN_FLOATS * STATE_ALIGN_FLOATS;
    uint64_t need = tasks * (uint64_t)r->num_splits * r->state_stride;
    r->spread = r->num_splits > 1 && tasks < wanted && m->workers > 1 &&
                need <= m->state_floats - plan->state_floats &&
                tasks <= m->max_groups - plan->num_groups;
    r->state_first = plan->state_floats;
    r->group_first = plan->num_groups;
    if (r->spread) {
        plan->state_floats += need;
        plan->num_groups += (uint32_t)tasks;
    } else if (!p->deterministic && p->num_splits == 0 && r->num_splits > 1) {
        r->split_keys = r->key_end - r->key_first; // nobody asked for splits
        r->num_splits = 1;
        r->round_splits = 0;
    }
    r->num_tasks = r->spread ? tasks * (uint64_t)r->num_splits : tasks;
}

// bucket_of is the cost of a task in quarters of an octave, the costliest first; of a row in rounds
// that of its last tasks, which even out what came before.
static uint32_t bucket_of(const attn_plan_row *r) {
    uint64_t cost = r->num_tasks > 1 ? r->cost / r->num_tasks : r->cost;
    if (r->round_splits > 0) {
        cost = r->cost / (uint64_t)(r->key_end - r->key_first) * (uint64_t)r->split_keys;
    }
    if (cost < 4) {
        return NUM_BUCKETS - 1;
    }
    uint32_t log2 = 63u - (uint32_t)__builtin_clzll(cost);
    uint32_t quarter = (uint32_t)(cost >> (log2 - 2)) & 3u;
    return NUM_BUCKETS - 1 - (log2 * 4 + quarter);
}

// set_order sorts by bucket, rows of one bucket in launch order, and sums up the tasks.
static void set_order(attn_plan *plan) {
    uint32_t first[NUM_BUCKETS + 1] = {0};
    for (uint32_t i = 0; i < plan->num_rows; i++) {
        plan->rows[i].bucket = bucket_of(&plan->rows[i]);
        first[plan->rows[i].bucket + 1]++;
    }
    for (uint32_t b = 0; b < NUM_BUCKETS; b++) {
        first[b + 1] += first[b];
    }
    for (uint32_t i = 0; i < plan->num_rows; i++) {
        plan->order[first[plan->rows[i].bucket]++] = i;
    }
    for (uint32_t i = 0; i < plan->num_rows; i++) {
        plan->num_tasks += plan->rows[plan->order[i]].num_tasks;
        plan->task_end[i] = plan->num_tasks;
    }
}

attnd_err attn_plan_make(attn_plan *plan, const attn_params *p, const attn_machine *machine,
                         attnd_errinfo *info) {
    if (p->num_rows > plan->max_rows) {
        return attnd_fail(info, ATTND_EMSGSIZE, "rows", "%u rows, at most %u in one launch",
                          p->num_rows, plan->max_rows);
    }
    plan->num_rows = p->num_rows;
    plan->num_tasks = plan->num_appends = plan->cost = plan->state_floats = 0;
    plan->num_groups = 0;
    plan->max_splits = 0;
    steps st = steps_of(&p->shape, machine);
    for (uint32_t i = 0; i < p->num_rows; i++) {
        attn_plan_row *r = &plan->rows[i];
        r->row = i;
        set_tiles(r, &p->rows[i], &p->shape, &st);
        set_keys(r, &p->rows[i], &p->shape, &st);
        plan->cost += r->cost;
        plan->num_appends += (uint64_t)ceil_div(p->rows[i].new_len, ATTN_APPEND_TOKENS);
        plan->append_end[i] = plan->num_appends;
    }
    uint64_t target = plan->cost / ((uint64_t)machine->workers * TASKS_PER_WORKER);
    target = target < MIN_TASK_COST ? MIN_TASK_COST : target;
    for (uint32_t i = 0; i < p->num_rows; i++) {
        set_tasks(&plan->rows[i], plan, p, machine, target);
        if (plan->rows[i].num_splits > plan->max_splits) {
            plan->max_splits = plan->rows[i].num_splits;
        }
    }
    set_order(plan);
    return ATTND_OK;
}

// find returns the first i with ends[i] > index.
static uint32_t find(const uint64_t *ends, uint32_t num, uint64_t index) {
    uint32_t low = 0;
    for (uint32_t high = num; low < high;) {
        uint32_t middle = low + (high - low) / 2;
        if (ends[middle] <= index) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

void attn_plan_split(const attn_plan_row *row, int32_t split, int32_t *key_first,
                     int32_t *key_end) {
    int64_t left = row->key_end - row->key_first;
    for (; row->round_splits > 0 && split >= row->round_splits && left > 0;
         split -= row->round_splits) {
        left -= (int64_t)round_keys(row, left) * row->round_splits;
    }
    int64_t keys = round_keys(row, left);
    int64_t first = row->key_end - left + split * keys;
    int64_t end = first + keys;
    *key_first = (int32_t)(first < row->key_end ? first : row->key_end);
    *key_end = (int32_t)(end < row->key_end ? end : row->key_end);
}

// set_q finds the query rows of a tile; tiles count down, since a causal row's last ones cost most.
static void set_q(attn_task *t, const attn_plan_row *r, const attn_row *row, int32_t group,
                  uint64_t tile) {
    int64_t first_row = (int64_t)row->q_first * group;
    int64_t block = r->block_first + r->num_blocks - 1 - (int64_t)tile / r->block_tiles;
    int64_t in_block = r->block_tiles - 1 - (int64_t)tile % r->block_tiles;
    int64_t base = row->block_mask ? block * r->q_block : first_row;
    int64_t first = base + in_block * r->q_step;
    int64_t end = first + r->q_step;
    end = end > base + r->q_block ? base + r->q_block : end;
    end = end > r->q_end ? r->q_end : end;
    first = first < first_row ? first_row : first;
    t->q_first = (int32_t)first;
    t->q_count = end > first ? (int32_t)(end - first) : 0;
}

attn_plan_part attn_plan_task(const attn_plan *plan, const attn_params *p, uint64_t index) {
    uint32_t i = find(plan->task_end, plan->num_rows, index);
    const attn_plan_row *r = &plan->rows[plan->order[i]];
    uint64_t local = index - (i > 0 ? plan->task_end[i - 1] : 0);
    attn_plan_part part = {.row = r};
    attn_task *t = &part.task;
    t->row = r->row;
    t->key_first = r->key_first;
    t->key_end = r->key_end;
    if (r->spread) {
        part.split = (int32_t)(local % (uint64_t)r->num_splits);
        local /= (uint64_t)r->num_splits;
        part.group = r->group_first + (uint32_t)local;
        part.state_first = r->state_first + local * (uint64_t)r->num_splits * r->state_stride;
        attn_plan_split(r, part.split, &t->key_first, &t->key_end);
    }
    uint64_t tiles = (uint64_t)r->block_tiles * (uint64_t)r->num_blocks;
    t->head_first = (int32_t)(local / tiles) * r->head_step;
    t->head_count = min_i32(r->head_step, p->shape.kv_heads - t->head_first);
    set_q(t, r, &p->rows[r->row], p->shape.q_heads / p->shape.kv_heads, local % tiles);
    return part;
}

attn_append_task attn_plan_append(const attn_plan *plan, const attn_params *p, uint64_t index) {
    uint32_t i = find(plan->append_end, plan->num_rows, index);
    uint64_t local = index - (i > 0 ? plan->append_end[i - 1] : 0);
    int32_t first = (int32_t)local * ATTN_APPEND_TOKENS;
    return (attn_append_task){
        .row = i,
        .token_first = first,
        .token_count = min_i32(ATTN_APPEND_TOKENS, p->rows[i].new_len - first),
    };
}

void attn_plan_print(const attn_plan *plan, FILE *out) {
    fprintf(out,
            "plan: %u rows, %" PRIu64 " tasks, %" PRIu64 " append tasks, cost %" PRIu64 ", %" PRIu64
            " bytes of states\n",
            plan->num_rows, plan->num_tasks, plan->num_appends, plan->cost,
            plan->state_floats * sizeof(float));
    for (uint32_t i = 0; i < plan->num_rows; i++) {
        const attn_plan_row *r = &plan->rows[plan->order[i]];
        fprintf(out,
                "  row %u: %s, keys %d to %d in %d splits of %s%d %s, %d head parts of %d, "
                "%d x %d tiles of %d rows, %" PRIu64 " tasks, cost %" PRIu64 "\n",
                r->row, r->decode ? "decode" : "prefill", r->key_first, r->key_end, r->num_splits,
                r->round_splits > 0 ? "at least " : "", r->split_keys,
                r->spread ? "spread" : "folded", r->head_parts, r->head_step, r->num_blocks,
                r->block_tiles, r->q_step, r->num_tasks, r->cost);
    }
}
