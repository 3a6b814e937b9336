// The plan of the prefill kernel (attn_prefill.h).  Rows are sorted by the keys that their
// longest tile sees, in buckets of an eighth of a power of two, so that a plan takes time linear in
// the rows and no memory.
#include "attention/cuda/attn_prefill.h"

#include <math.h>
#include <string.h>

#include "attention/attn_mask.h"

#define LOG2_E 1.4426950408889634

enum {
    NUM_BUCKETS = 256,
    DECODE_TOKENS = 8,                          // rows of up to so many are decoded
    PARTS = 4,                                  // of a row at the end of a launch
    END_TASKS = 2,                              // a CTA, that the end has at least
    LEAST_SHARED_KEYS = 16 * ATTN_PREFILL_KEYS, // of a task, far more than joining takes
};

static int32_t min_of(int32_t a, int32_t b) {
    return a < b ? a : b;
}

static int32_t max_of(int32_t a, int32_t b) {
    return a > b ? a : b;
}

static int32_t ceil_div(int32_t a, int32_t b) {
    return (int32_t)(((int64_t)a + b - 1) / b);
}

// query_rows returns how many query rows a KV head has.  By q_len and not q_count, so that the
// chunks of a row are computed alike.
static int64_t query_rows(const attn_params *p, const attn_row *row) {
    return (int64_t)row->q_len * (p->shape.q_heads / p->shape.kv_heads);
}

// row_slices is what a row adds to attn_prefill_count.
static uint64_t row_slices(const attn_params *p, const attn_row *row) {
    if (row->q_len <= DECODE_TOKENS) {
        return 0;
    }
    int64_t slices = (query_rows(p, row) - 1) / ATTN_PREFILL_SLICE_ROWS + 1;
    return (uint64_t)slices * (uint64_t)p->shape.kv_heads;
}

uint64_t attn_prefill_count(const attn_params *p) {
    uint64_t slices = 0;
    for (uint32_t i = 0; p->rows && i < p->num_rows; i++) {
        slices += row_slices(p, &p->rows[i]);
    }
    return slices;
}

// has_few_keys says whether a row has few keys for its query rows.
static bool has_few_keys(const attn_params *p, const attn_row *row) {
    const int64_t rows = query_rows(p, row);
    return rows >= ATTN_PREFILL_LEAST_ROWS && row->kv_len <= ATTN_PREFILL_MOST_KEYS &&
           row->kv_len <= rows * ATTN_PREFILL_ROW_KEYS;
}

// least_slices returns how many slices a launch has to have.  Two CTAs share the keys of a row that
// is alone, mostly (share_end).
static uint64_t least_slices(const attn_params *p, uint64_t own, uint64_t launch) {
    return !p->deterministic && own == launch ? ATTN_PREFILL_ALONE_SLICES
                                              : ATTN_PREFILL_LEAST_SLICES;
}

bool attn_prefill_takes(const attn_params *p, const attn_row *row,
                        const attn_prefill_limits *limits) {
    if (limits->least_rows == 0 || row->q_count == 0) {
        return false;
    }
    if (row->block_mask || (row->tree_mask && row->q_len > 32)) {
        return true; // the decode kernel has neither
    }
    if (p->num_splits != 0) {
        return false;
    }
    if (limits->least_rows != ATTN_PREFILL_MEASURED) {
        return query_rows(p, row) >= limits->least_rows;
    }
    uint64_t own = row_slices(p, row);
    uint64_t slices = p->deterministic ? own : limits->launch_slices; // no batch mates there
    return own > 0 && (has_few_keys(p, row) || slices >= least_slices(p, own, slices));
}

// bucket_of returns a row's place in the order: 0 for the most keys.
static uint32_t bucket_of(const attn_row *row) {
    attn_span span =
        attn_mask_span(row, row->q_first + row->q_count - 1, row->q_first + row->q_count - 1);
    uint32_t keys = (uint32_t)(span.end - span.first);
    if (keys < 8) {
        return NUM_BUCKETS - 1 - keys;
    }
    uint32_t log2 = 31 - (uint32_t)__builtin_clz(keys);
    return NUM_BUCKETS - 1 - (8 * (log2 - 2) + (keys >> (log2 - 3) & 7));
}

static void set_tensors(const attn_params *p, const attn_row *row, attn_prefill_record *r) {
    r->q = row->q;
    r->out = row->out;
    r->lse = row->lse;
    r->k_new = row->k_new;
    r->v_new = row->v_new;
    r->table = row->table;
    r->k = (char *)p->pool + row->k_offset;
    r->v = (char *)p->pool + row->v_offset;
    r->sinks = row->sinks;
    r->alibi_slopes = row->alibi_slopes;
    r->tree_mask = row->tree_mask;
    r->mask_start = row->block_mask ? row->block_mask->start : NULL;
    r->mask_blocks = row->block_mask ? row->block_mask->kv_blocks : NULL;
    r->inv_freq = row->rope ? row->rope->inv_freq : NULL;
    r->q_positions = row->q_positions;
    r->k_positions = row->k_positions;
    r->q_token_bytes = row->stride_q_token * 2;
    r->q_head_bytes = row->stride_q_head * 2;
    r->out_token = row->stride_out_token;
    r->out_head = row->stride_out_head;
    r->lse_head = row->stride_lse_head;
    r->k_new_token_bytes = row->stride_k_new_token * 2;
    r->k_new_head_bytes = row->stride_k_new_head * 2;
    r->v_new_token_bytes = row->stride_v_new_token * 2;
    r->v_new_head_bytes = row->stride_v_new_head * 2;
}

// has_tokens says whether queries of that stride, in elements, can be moved token by token by a
// map, is_dense whether queries or outputs can be moved all at once.
static bool has_tokens(const attn_params *p, int64_t stride_head) {
    return ATTN_PREFILL_ROWS % (p->shape.q_heads / p->shape.kv_heads) == 0 &&
           stride_head == p->shape.head_dim;
}

static bool is_dense(const attn_params *p, int64_t stride_token, int64_t stride_head) {
    return has_tokens(p, stride_head) &&
           stride_token == (int64_t)p->shape.q_heads * p->shape.head_dim;
}

static void set_logits(const attn_params *p, const attn_row *row, attn_prefill_record *r) {
    double scale = row->scale != 0 ? (double)row->scale : 1 / sqrt((double)p->shape.head_dim);
    const attn_span seen = attn_mask_seen(row, 0);
    r->seen_first = seen.first;
    r->seen_end = seen.end;
    r->flags = row->flags | (scale < 0 ? ATTN_PREFILL_NEGATIVE : 0) |
               (row->rope && row->rope->interleaved ? ATTN_PREFILL_INTERLEAVED : 0);
    r->flags |= is_dense(p, row->stride_q_token, row->stride_q_head) ? ATTN_PREFILL_DENSE_Q : 0;
    r->flags |= has_tokens(p, row->stride_q_head) ? ATTN_PREFILL_TOKENS_Q : 0;
    r->flags |=
        is_dense(p, row->stride_out_token, row->stride_out_head) ? ATTN_PREFILL_DENSE_OUT : 0;
    r->flags |= scale < 0 || row->softcap > 0 || row->alibi_slopes || row->tree_mask
                    ? ATTN_PREFILL_BENT
                    : 0;
    r->scale_log2 = (float)(fabs(scale) * LOG2_E);
    r->cap_log2 = (float)((double)row->softcap * LOG2_E);
    r->cap_scale = row->softcap > 0 ? r->scale_log2 / r->cap_log2 : 0;
    r->rotary_dim = row->rope ? row->rope->rotary_dim : 0;
    r->attention_factor = row->rope ? row->rope->attention_factor : 0;
    r->kv_len = row->kv_len;
    r->new_len = row->new_len;
    r->q_len = row->q_len;
    r->q_first = row->q_first;
    r->q_end = row->q_first + row->q_count;
    r->tree_words = ceil_div(row->q_len, 64);
}

// section_heads returns how many KV heads a section has: as many as fit, in sections of equal size.
static int32_t section_heads(const attn_shape *shape, int32_t kv_len) {
    int64_t bytes = (int64_t)kv_len * shape->head_dim * 4; // keys and values of a head
    int64_t sections = (shape->kv_heads * bytes - 1) / ATTN_PREFILL_SECTION_BYTES + 1;
    return sections >= shape->kv_heads ? 1 : ceil_div(shape->kv_heads, (int32_t)sections);
}

// set_tiles cuts the query rows.  A tile that is not full is the first one, which sees the fewest
// keys of causal rows; with a block mask it is the last of a query block.
static void set_tiles(const attn_params *p, const attn_row *row, int32_t tile_rows,
                      attn_prefill_record *r) {
    int32_t group = p->shape.q_heads / p->shape.kv_heads;
    r->tile_heads = min_of(group, tile_rows);
    r->head_parts = ceil_div(group, r->tile_heads);
    r->heads_inverse = 65536 / (uint32_t)r->tile_heads + 1;
    r->tile_tokens = tile_rows / r->tile_heads;
    r->q_block = row->block_mask ? row->block_mask->q_block : ATTN_MAX_TOKENS;
    r->block_tiles = ceil_div(row->q_count, r->tile_tokens);
    r->num_tiles = r->block_tiles;
    r->block_first = row->q_first + row->q_count - r->num_tiles * r->tile_tokens;
    if (row->block_mask) {
        r->block_first = row->q_first / r->q_block * r->q_block;
        r->block_tiles = ceil_div(min_of(r->q_block, r->q_end - r->block_first), r->tile_tokens);
        r->num_tiles = r->block_tiles * ceil_div(r->q_end - r->block_first, r->q_block);
    }
    r->section_heads = section_heads(&p->shape, row->kv_len);
    r->section_lacks =
        ceil_div(p->shape.kv_heads, r->section_heads) * r->section_heads - p->shape.kv_heads;
}

static uint64_t tasks_of(const attn_params *p, const attn_prefill_record *r) {
    return (uint64_t)r->num_tiles * (uint64_t)(r->head_parts * p->shape.kv_heads) << r->shares_keys;
}

// has_parts says whether a row's first tiles see far fewer keys than its last ones, and can be
// taken by themselves.
static bool has_parts(const attn_prefill_record *r) {
    int64_t most = (int64_t)r->seen_end + r->q_end - 1;
    return (r->flags & ATTN_CAUSAL) && !r->mask_start && r->num_tiles >= PARTS &&
           r->seen_first + r->q_end <= 0 && 2 * (int64_t)(r->q_end - r->q_first) > most;
}

// tiles_of returns a part of a record: tiles [first, end).  That with the last ones has the new
// tokens, too.
static attn_prefill_record tiles_of(const attn_prefill_record *r, int32_t first, int32_t end) {
    attn_prefill_record x = *r;
    x.block_first = r->block_first + first * r->tile_tokens;
    x.q_first = max_of(x.block_first, r->q_first);
    x.q_end = r->block_first + end * r->tile_tokens;
    x.block_tiles = x.num_tiles = end - first;
    x.new_len = end == r->num_tiles ? r->new_len : 0;
    return x;
}

// part_end cuts the rows at the end of a launch, so that the last tasks are its shortest: where a
// row has few tasks, the first and longest ones of the last row would be begun when other CTAs have
// nothing else to do.  The rows are so few that the L2 holds their keys until all parts are done.
static void part_end(attn_prefill_head *head, const attn_params *p,
                     const attn_prefill_limits *limits) {
    attn_prefill_record *records = attn_prefill_records(head);
    uint32_t num = 0;
    uint64_t tasks = 0;
    while (num < head->num_records && tasks < (uint64_t)limits->ctas * END_TASKS &&
           has_parts(&records[head->num_records - 1 - num])) {
        tasks += tasks_of(p, &records[head->num_records - 1 - num]);
        num++;
    }
    if (num < 2 || limits->max_records - head->num_records < num * (PARTS - 1)) {
        return; // the tasks of a row alone are in that order
    }
    attn_prefill_record *end = &records[head->num_records - num];
    for (int32_t part = PARTS - 1; part >= 0; part--) { // part 0 lies where the rows do
        for (uint32_t i = 0; i < num; i++) {
            int32_t tiles = end[i].num_tiles;
            end[(uint32_t)part * num + i] = tiles_of(&end[i], tiles * (PARTS - 1 - part) / PARTS,
                                                     tiles * (PARTS - part) / PARTS);
        }
    }
    head->num_records += num * (PARTS - 1);
}

// keys_of returns how many keys a tile of a record sees: its first one, or its last.
static int64_t keys_of(const attn_prefill_record *r, bool is_last) {
    int64_t first = is_last ? r->q_end - 1 : r->q_first;
    int64_t low = first + r->seen_first > 0 ? first + r->seen_first : 0;
    int64_t high = first + r->seen_end < r->kv_len ? first + r->seen_end : r->kv_len;
    return high - low;
}

// are_alike says whether the tasks of a launch are all about as long.
static bool are_alike(const attn_prefill_record *records, uint32_t num) {
    int64_t most = 0, least = INT64_MAX;
    for (uint32_t i = 0; i < num; i++) {
        int64_t first = keys_of(&records[i], false), last = keys_of(&records[i], true);
        most = first > most ? first : last > most ? last : most;
        least = first < least ? first : last < least ? last : least;
        if (records[i].mask_start) {
            return false;
        }
    }
    return least >= most - most / 4;
}

// share_end lets two CTAs share the keys of the last tasks where these are all about as long, and
// so few that half of the CTAs would have nothing to do.  Sums are rounded otherwise then than of
// keys that one CTA has, so not in deterministic mode.
static void share_end(attn_prefill_head *head, const attn_params *p,
                      const attn_prefill_limits *limits) {
    attn_prefill_record *records = attn_prefill_records(head);
    uint64_t tasks = 0;
    for (uint32_t i = 0; i < head->num_records; i++) {
        tasks += tasks_of(p, &records[i]);
    }
    if (p->deterministic || limits->ctas == 0 || tasks % limits->ctas == 0 ||
        !are_alike(records, head->num_records)) {
        return;
    }
    attn_prefill_record *last = &records[head->num_records - 1];
    uint64_t tile = tasks_of(p, last) / (uint64_t)last->num_tiles;
    uint64_t tiles = (tasks % limits->ctas + tile - 1) / tile; // of the last row
    if (tiles > (uint64_t)last->num_tiles || tiles * tile > limits->max_joins ||
        2 * tiles * tile > limits->ctas || keys_of(last, false) < LEAST_SHARED_KEYS) {
        return;
    }
    if (tiles < (uint64_t)last->num_tiles) {
        if (head->num_records == limits->max_records) {
            return;
        }
        last[1] = tiles_of(last, 0, (int32_t)tiles);
        last[0] = tiles_of(last, (int32_t)tiles, last->num_tiles);
        head->num_records++;
        last++;
    }
    last->shares_keys = 1;
}

// place counts the rows of each bucket, and turns the counts into first places.
static uint32_t place(const attn_params *p, const attn_prefill_limits *limits, uint32_t *first) {
    memset(first, 0, NUM_BUCKETS * sizeof(*first));
    for (uint32_t i = 0; i < p->num_rows; i++) {
        if (attn_prefill_takes(p, &p->rows[i], limits)) {
            first[bucket_of(&p->rows[i])]++;
        }
    }
    uint32_t num = 0;
    for (uint32_t i = 0; i < NUM_BUCKETS; i++) {
        uint32_t count = first[i];
        first[i] = num;
        num += count;
    }
    return num;
}

// add_up makes the ends of a plan whose records are there, and gives out the table of angles.
static attnd_err add_up(attn_prefill_head *head, const attn_params *p,
                        const attn_prefill_limits *limits, attnd_errinfo *info) {
    attn_prefill_record *records = attn_prefill_records(head);
    attn_prefill_ends *ends = attn_prefill_ends_of(head);
    uint64_t tasks = 0;
    uint64_t units = 0;
    uint64_t angles = 0;
    for (uint32_t i = 0; i < head->num_records; i++) {
        attn_prefill_record *r = &records[i];
        tasks += tasks_of(p, r);
        units += (uint64_t)r->new_len;
        r->angles_first = angles;
        if (r->inv_freq) {
            units += (uint64_t)(r->q_end - r->q_first);
            angles += (uint64_t)(r->q_end - r->q_first) * (uint64_t)(r->rotary_dim / 2);
            angles += angles % 2; // rows of the table are read in 16-byte pieces
        }
        if (tasks > INT32_MAX || units > INT32_MAX) {
            return attnd_fail(info, ATTND_EMSGSIZE, "rows", "the rows have more than %d tiles",
                              INT32_MAX);
        }
        ends[i] = (attn_prefill_ends){(uint32_t)tasks, (uint32_t)units};
    }
    if (angles > limits->max_angles) {
        return attnd_fail(info, ATTND_EMSGSIZE, "rows",
                          "RoPE's angles of the rows need %llu bytes of the workspace's %llu",
                          (unsigned long long)angles * 8,
                          (unsigned long long)limits->max_angles * 8);
    }
    head->num_tasks = (uint32_t)tasks;
    head->num_units = (uint32_t)units;
    return ATTND_OK;
}

attnd_err attn_prefill_make(attn_prefill_head *head, uint32_t at, const attn_params *p,
                            const attn_prefill_limits *limits, attnd_errinfo *info) {
    uint32_t next[NUM_BUCKETS];
    memset(head, 0, sizeof(*head));
    uint32_t num = place(p, limits, next);
    if (num > limits->max_records) {
        return attnd_fail(info, ATTND_EMSGSIZE, "rows",
                          "the rows need more than the %u records of the plan",
                          limits->max_records);
    }
    head->records_at = at;
    for (uint32_t i = 0; i < p->num_rows && num > 0; i++) {
        const attn_row *row = &p->rows[i];
        if (attn_prefill_takes(p, row, limits)) {
            attn_prefill_record *r = &attn_prefill_records(head)[next[bucket_of(row)]++];
            memset(r, 0, sizeof(*r));
            set_tensors(p, row, r);
            set_logits(p, row, r);
            set_tiles(p, row, limits->tile_rows, r);
        }
    }
    head->num_records = num;
    part_end(head, p, limits);
    share_end(head, p, limits);
    head->ends_at = at + head->num_records * (uint32_t)sizeof(attn_prefill_record);
    attnd_err err = add_up(head, p, limits, info);
    if (err != ATTND_OK) {
        memset(head, 0, sizeof(*head));
    }
    return err;
}
