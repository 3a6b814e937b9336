// The plan of the CUDA kernels: random launches are planned, all CTAs walk their shares, and the
// pieces together must be the launch, each tile once.
#include <stdlib.h>
#include <string.h>

#include "attention/cuda/attn_cuda_walk.h"
#include "tests/check_main.h"

enum {
    MAX_RECORDS = 4096,
    MAX_CTAS = 132,
    KV_HEADS = 3,
    TILE = ATTN_CUDA_TILE_TOKENS,
    MAX_ROWS = 64
};

static union {
    attn_cuda_head head;
    unsigned char room[sizeof(attn_cuda_head) + MAX_CTAS * sizeof(attn_cuda_start) +
                       MAX_RECORDS * (sizeof(attn_cuda_record) + sizeof(attn_cuda_mask))];
} plan __attribute__((aligned(16)));

static attn_row rows[MAX_ROWS];
static attn_params params;
static attn_cuda_limits limits;
static _Alignas(16) uint16_t memory[64]; // whatever needs an address
static uint32_t table[1];
static uint64_t state;

static int32_t below(int32_t n) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (int32_t)((state >> 33) % (uint64_t)n);
}

static attn_row *add_row(int32_t kv_len, int32_t q_len, int32_t new_len) {
    attn_row *row = &rows[params.num_rows++];
    *row = (attn_row){.q = memory,
                      .out = memory,
                      .k_new = memory,
                      .v_new = memory,
                      .table = table,
                      .kv_len = kv_len,
                      .q_len = q_len,
                      .new_len = new_len,
                      .q_count = q_len,
                      .flags = ATTN_CAUSAL,
                      .window_left = -1,
                      .window_right = -1};
    return row;
}

static void begin(int32_t group, uint32_t num_ctas) {
    params = (attn_params){.shape = {.q_dtype = ATTND_BF16,
                                     .kv_dtype = ATTND_BF16,
                                     .q_heads = KV_HEADS * group,
                                     .kv_heads = KV_HEADS,
                                     .head_dim = 128,
                                     .v_head_dim = 128,
                                     .block_tokens = 64,
                                     .stride_k_token = 128,
                                     .stride_k_head = 64 * 128,
                                     .stride_v_token = 128,
                                     .stride_v_head = 64 * 128,
                                     .block_stride = 2 * KV_HEADS * 64 * 128 * 2},
                           .pool = memory,
                           .pool_bytes = UINT64_MAX,
                           .num_blocks = UINT64_MAX,
                           .rows = rows};
    limits = (attn_cuda_limits){.num_ctas = num_ctas,
                                .max_records = MAX_RECORDS,
                                .slot_floats = 1ull << 40,
                                .min_part_tiles = 1};
}

static attnd_err make(attnd_errinfo *info) {
    return attn_cuda_plan_make(&plan.head, &params, &limits, NULL, info);
}

static attn_cuda_record *record_at(uint32_t i) {
    return &attn_cuda_records(&plan.head, limits.num_ctas)[i];
}

// seen is what the walk of all CTAs said of one KV head of one record.
typedef struct seen {
    int32_t next_tile, parts, num_parts, pieces, merges;
    uint32_t cta; // of the first piece
} seen;

static seen heads[MAX_RECORDS][KV_HEADS];
static unsigned char slots[1 << 20]; // slots in use

static void take_piece(uint32_t cta, const attn_cuda_record *r, const attn_cuda_piece *piece) {
    uint32_t i = (uint32_t)(r - record_at(0));
    ck_assert(piece->kv_head >= 0 && piece->kv_head < KV_HEADS);
    seen *h = &heads[i][piece->kv_head];
    if (h->pieces++ == 0) {
        h->next_tile = r->tile_first;
        h->num_parts = piece->num_parts;
        h->cta = cta;
    }
    ck_assert_int_eq(piece->tile_first,
                     r->tile_end > r->tile_first ? h->next_tile : piece->tile_first);
    ck_assert_int_eq(piece->part, h->parts);
    ck_assert_int_eq(piece->num_parts, h->num_parts);
    ck_assert(piece->merge != ATTN_CUDA_MERGE_LATER || (h->cta != cta && !piece->is_last));
    h->next_tile += piece->num_tiles;
    h->parts++;
    h->merges += piece->merge != 0;
    if (piece->merge == ATTN_CUDA_MERGE_SECOND) { // the last of its CTA, the other in the next one
        ck_assert_int_eq(piece->num_parts, 2);
        ck_assert_int_eq(piece->part, 0);
        ck_assert_int_eq(piece->is_last, 1);
    } else if (piece->merge == ATTN_CUDA_MERGE_ALL) {
        ck_assert_int_eq(piece->part, piece->num_parts - 1);
    }
    if (piece->num_parts > 1 && r->tokens > 0) {
        uint32_t slot = attn_cuda_slot(piece, piece->part);
        ck_assert_uint_lt(slot, sizeof(slots));
        ck_assert_msg(!slots[slot], "slot %u twice, cta %u", slot, cta);
        slots[slot] = 1;
    }
    if (params.deterministic && r->tile_end > r->tile_first) {
        int32_t step = ATTN_SPLIT_TOKENS / TILE;
        ck_assert(piece->tile_first == r->tile_first || piece->tile_first % step == 0);
        ck_assert_int_le(piece->tile_first % step + piece->num_tiles, step);
    }
}

// walk walks all CTAs, checks that the pieces are the launch, and returns the most tiles of a CTA.
static int32_t walk(void) {
    int32_t most = 0;
    memset(heads, 0, sizeof(heads));
    memset(slots, 0, sizeof(slots));
    for (uint32_t cta = 0; cta < limits.num_ctas; cta++) {
        attn_cuda_walk w;
        attn_cuda_piece piece = {0};
        int32_t tiles = 0;
        attn_cuda_walk_init(&w, &plan.head, limits.num_ctas, cta, KV_HEADS);
        for (const attn_cuda_record *r; (r = attn_cuda_walk_next(&w, &piece));) {
            take_piece(cta, r, &piece);
            tiles += piece.num_tiles;
        }
        ck_assert_int_eq(piece.kv_head, -1);
        most = tiles > most ? tiles : most;
    }
    for (uint32_t i = 0; i < plan.head.num_records; i++) {
        for (int32_t h = 0; h < KV_HEADS; h++) {
            ck_assert_int_ge(heads[i][h].pieces, 1);
            ck_assert_int_eq(heads[i][h].parts, heads[i][h].num_parts);
            ck_assert_int_eq(heads[i][h].merges, heads[i][h].num_parts > 1);
            ck_assert_int_eq(heads[i][h].next_tile, record_at(i)->tile_end);
        }
    }
    return most;
}

static uint32_t lists[1000];
static uint64_t tree[1]; // an address: a plan reads no mask
static attn_block_mask masks[MAX_ROWS];

// add_masks gives a row masks that only the portable kernel takes.
static void add_masks(attn_row *row) {
    attn_block_mask *mask = &masks[row - rows];
    limits.masks = ATTN_CUDA_MASKS_DECODE;
    *mask = (attn_block_mask){lists + below(100), lists + below(100), 1 + below(30)};
    row->block_mask = below(3) ? mask : NULL;
    row->tree_mask = below(2) ? tree : NULL;
}

// check_masks holds a record's masks against its row: its tokens lie in one query block, whose list
// it has.
static void check_masks(const attn_row *row, const attn_cuda_record *r) {
    int32_t token = r->position - (row->kv_len - row->q_len);
    const attn_block_mask *mask = row->block_mask;
    ck_assert_int_eq(r->mask != 0, mask && r->tokens > 0);
    if (row->tree_mask && r->tokens > 0) { // 64 tokens a word
        ck_assert_int_eq(r->tree_mask - row->tree_mask, token * ((row->q_len + 63) / 64));
    }
    if (r->mask != 0) {
        const attn_cuda_mask *own = attn_cuda_masks_of(&plan.head, limits.num_ctas) + r->mask - 1;
        ck_assert_uint_le(r->mask, plan.head.num_masks);
        ck_assert_ptr_eq(own,
                         (const attn_cuda_mask *)record_at(plan.head.num_records) + r->mask - 1);
        ck_assert_int_eq(token / mask->q_block, (token + r->tokens - 1) / mask->q_block);
        ck_assert_ptr_eq(own->start, mask->start + token / mask->q_block);
        ck_assert_ptr_eq(own->kv_blocks, mask->kv_blocks);
    }
}

// check_records holds the records against the rows: each query row once, the keys that it sees and
// the tokens that are appended among the tiles.
static void check_records(void) {
    int32_t group = params.shape.q_heads / KV_HEADS;
    uint32_t i = 0;
    for (uint32_t n = 0; n < params.num_rows; n++) {
        const attn_row *row = &rows[n];
        int64_t query_rows = 0;
        int appends = 0;
        for (; i < plan.head.num_records && record_at(i)->kv_len == row->kv_len &&
               query_rows < (int64_t)row->q_count * group + (row->q_count == 0 && !appends);
             i++) {
            const attn_cuda_record *r = record_at(i);
            ck_assert_int_le(r->tokens * r->heads, ATTN_CUDA_QUERY_ROWS);
            check_masks(row, r);
            query_rows += (int64_t)r->tokens * r->heads;
            int32_t first = row->window_left < 0 || r->position < row->window_left
                                ? 0
                                : r->position - row->window_left;
            int32_t first_new = row->kv_len - row->new_len;
            first = r->flags & ATTN_CUDA_APPENDS && first_new < first ? first_new : first;
            // No tile begins in a block that lies behind the window: its entry may name none.
            ck_assert(r->tile_end == r->tile_first || r->tile_first >= first / TILE);
            for (int32_t t = 0; t < r->tokens; t++) {
                int32_t at = r->position + t;
                bool good = true;
                for (int32_t key = 0; key < row->kv_len; key++) {
                    // Block masks hide keys from all of a record; the tree is not asked.
                    bool sees = key <= at && (row->window_left < 0 || key >= at - row->window_left);
                    bool is_read = key / TILE >= r->tile_first && key / TILE < r->tile_end;
                    good = good && (!sees || is_read);
                    good = good && (sees || key < r->full_first || key >= r->full_end);
                }
                ck_assert(good);
            }
            if (r->flags & ATTN_CUDA_APPENDS) {
                appends++;
                ck_assert_int_le(r->tile_first, (row->kv_len - row->new_len) / TILE);
                ck_assert_int_eq(r->tile_end, (row->kv_len - 1) / TILE + 1);
            }
            if (row->q_count == 0) {
                break;
            }
        }
        if (row->q_count == 0 && row->new_len > 0) {
            i++;
        }
        ck_assert_int_eq(query_rows, (int64_t)row->q_count * group);
        ck_assert_int_eq(appends, row->new_len > 0);
    }
    ck_assert_uint_eq(i, plan.head.num_records);
}

START_TEST(all_pieces_of_random_launches_are_the_launch) {
    static const int32_t groups[] = {1, 4, 7, 16, 64, 100};
    static const uint32_t ctas[] = {132, 1, 7};
    state = 17 + (uint64_t)_i;
    begin(groups[_i % 6], ctas[_i / 6 % 3]);
    limits.min_part_tiles = (uint32_t)(1 + below(32));
    params.deterministic = _i % 5 == 1;
    params.num_splits = _i % 5 == 2 ? 1 + below(ATTN_MAX_SPLITS) : 0;
    uint32_t num = (uint32_t)(1 + below(_i % 2 ? 3 : 40));
    for (uint32_t n = 0; n < num; n++) {
        int32_t kv_len = 1 + (int32_t)n + 50 * below(_i % 3 ? 30 : 300); // no two alike, see above
        int32_t q_len = below(_i % 7 == 0 ? 90 : 9);
        attn_row *row = add_row(kv_len, q_len, q_len < kv_len ? below(q_len + 1) : 0);
        row->window_left = below(3) ? -1 : below(500);
        if (_i % 3 == 2 && q_len > 0) {
            add_masks(row);
        }
    }
    ATTND_CK_OK(make(NULL));
    uint64_t records = 0;
    for (uint32_t n = 0; n < num; n++) {
        records += attn_cuda_row_records(&params.shape, &rows[n], limits.masks);
    }
    ck_assert_uint_eq(records, plan.head.num_records);
    walk();
    if (_i % 4 == 0) {
        check_records();
    }
}
END_TEST

START_TEST(masks_go_to_the_kernel_that_takes_them) {
    attnd_errinfo info = {0};
    attn_block_mask mask = {lists, lists, 8};
    begin(4, 132);
    attn_row *row = add_row(100, 32, 0);
    row->tree_mask = tree;
    ATTND_CK_OK(make(NULL)); // one word a token: any decode kernel
    ck_assert_uint_eq(plan.head.is_masked, 0);
    row->q_len = row->q_count = 33;
    ATTND_CK_ERR(make(&info), ATTND_ENOTSUP);
    ck_assert_str_eq(info.field, "tree_mask");
    limits.masks = ATTN_CUDA_MASKS_PREFILL;
    params.num_splits = 2;
    ATTND_CK_ERR(make(&info), ATTND_ENOTSUP);
    ck_assert_str_eq(info.field, "num_splits");
    limits.masks = ATTN_CUDA_MASKS_DECODE;
    ATTND_CK_OK(make(NULL));
    ck_assert_uint_eq(plan.head.is_masked, 1);
    ck_assert_uint_eq(plan.head.num_masks, 0);
    ck_assert_uint_eq(plan.head.num_records, 3); // 16 tokens of 4 heads
    row->block_mask = &mask;
    row->q_first = 5;
    row->q_count = 28;
    ATTND_CK_OK(make(NULL)); // tokens 5 to 7, 8 to 15, 16 to 23, 24 to 31, 32
    ck_assert_uint_eq(plan.head.num_records, 5);
    ck_assert_uint_eq(plan.head.num_masks, 5);
    ck_assert_int_eq(record_at(0)->tokens, 3);
    ck_assert_int_eq(record_at(4)->tokens, 1);
    ck_assert_uint_eq(attn_cuda_row_records(&params.shape, row, ATTN_CUDA_MASKS_DECODE), 5);
    ck_assert_uint_eq(attn_cuda_row_records(&params.shape, row, ATTN_CUDA_MASKS_PREFILL), 1);
    mask.q_block = 20; // 5 to 19, 20 to 32
    ck_assert_uint_eq(attn_cuda_row_records(&params.shape, row, ATTN_CUDA_MASKS_DECODE), 2);
    mask.q_block = 24; // 5 to 20, 21 to 23, 24 to 32
    ck_assert_uint_eq(attn_cuda_row_records(&params.shape, row, ATTN_CUDA_MASKS_DECODE), 3);
    mask.q_block = 8;
    limits.max_records = 4;
    ATTND_CK_ERR(make(&info), ATTND_EMSGSIZE);
}
END_TEST

START_TEST(empty_rows_get_one_piece_a_head) {
    begin(4, 132);
    add_row(0, 1, 0);
    add_row(0, 8, 0);
    add_row(3, 0, 0); // nothing to do
    ATTND_CK_OK(make(NULL));
    ck_assert_uint_eq(plan.head.num_records, 2);
    ck_assert_int_eq(walk(), 0);
}
END_TEST

START_TEST(no_cta_has_more_than_its_share) {
    begin(4, 132);
    int32_t tiles = 0;
    for (int i = 0; i < 60; i++) {
        int32_t kv_len = TILE * (1 + below(800));
        tiles += kv_len / TILE * KV_HEADS;
        add_row(kv_len, 1, 1);
    }
    ATTND_CK_OK(make(NULL));
    ck_assert_int_le(walk(), (tiles + 60 * KV_HEADS * 12) / 132 + 1);
}
END_TEST

START_TEST(one_sequence_is_cut_into_one_part_a_cta) {
    begin(4, 132);
    limits.min_part_tiles = 6;
    add_row(44 * 8 * TILE, 1, 1); // 44 parts a head
    ATTND_CK_OK(make(NULL));
    ck_assert_uint_eq(plan.head.is_parts, 1);
    ck_assert_int_eq(walk(), 8);
}
END_TEST

START_TEST(short_sequences_are_not_cut_below_the_least_part) {
    begin(4, 132);
    limits.min_part_tiles = 6;
    add_row(10 * TILE, 1, 1);
    ATTND_CK_OK(make(NULL));
    ck_assert_int_eq(walk(), 6);
}
END_TEST

// The daemon's pool: table entries count units of 256 bytes, and a block holds many layers.
START_TEST(a_layer_may_lie_behind_block_stride) {
    begin(4, 132);
    params.shape.block_stride = 256;
    attn_row *row = add_row(100, 2, 1);
    row->k_offset = 1u << 20;
    row->v_offset = 3u << 20;
    ATTND_CK_OK(make(NULL));
    ck_assert_ptr_eq(record_at(0)->k, (char *)params.pool + (1u << 20));
    ck_assert_ptr_eq(record_at(0)->v, (char *)params.pool + (3u << 20));
}
END_TEST

// refused plans the launch and expects an error about a field.
static void refused(attnd_err code, const char *field) {
    attnd_errinfo info = {0};
    ATTND_CK_ERR(make(&info), code);
    ck_assert_str_eq(info.field, field);
    ck_assert_uint_eq(plan.head.num_records, 0);
}

START_TEST(bad_rows_are_refused_by_name) {
#define REFUSED(change, code, field)            \
    do {                                        \
        begin(4, 132);                          \
        attn_row *row = add_row(100, 2, 1);     \
        (void)row; /* some change the launch */ \
        change;                                 \
        refused(code, field);                   \
    } while (0)
    attn_block_mask mask = {0};
    attn_rope rope = {.inv_freq = (const float *)(const void *)memory, 1, 128, false};
    float scale = 1;
    REFUSED(row->kv_len = -1, ATTND_EINVAL, "kv_len");
    REFUSED(row->new_len = 101, ATTND_EINVAL, "new_len");
    REFUSED(row->q_len = -1, ATTND_EINVAL, "q_len");
    REFUSED(row->q_first = 3, ATTND_EINVAL, "q_first");
    REFUSED(row->q_count = 3, ATTND_EINVAL, "q_count");
    REFUSED(row->table = NULL, ATTND_EINVAL, "table");
    REFUSED(row->flags = 4, ATTND_EINVAL, "flags");
    REFUSED(row->window_left = -2, ATTND_EINVAL, "window_left");
    REFUSED(row->window_right = -2, ATTND_EINVAL, "window_right");
    REFUSED(row->softcap = -1, ATTND_EINVAL, "softcap");
    REFUSED(row->scale = 1 / (scale - 1), ATTND_EINVAL, "scale");
    REFUSED(row->k_scale = &scale, ATTND_EINVAL, "k_scale");
    REFUSED(row->v_scale = &scale, ATTND_EINVAL, "v_scale");
    REFUSED(row->block_mask = &mask, ATTND_ENOTSUP, "block_mask");
    REFUSED((limits.masks = ATTN_CUDA_MASKS_DECODE, row->block_mask = &mask), ATTND_EINVAL,
            "q_block");
    mask.q_block = 1;
    REFUSED((limits.masks = ATTN_CUDA_MASKS_DECODE, row->block_mask = &mask), ATTND_EINVAL,
            "block_mask");
    REFUSED((row->tree_mask = tree, row->q_len = 33), ATTND_ENOTSUP, "tree_mask");
    REFUSED((row->rope = &rope, rope.rotary_dim = 130), ATTND_EINVAL, "rotary_dim");
    REFUSED((row->rope = &rope, rope.rotary_dim = 64, rope.inv_freq = NULL), ATTND_EINVAL,
            "inv_freq");
    REFUSED(row->q = NULL, ATTND_EINVAL, "q");
    REFUSED(row->q = memory + 1, ATTND_ENOTSUP, "q");
    REFUSED(row->stride_q_head = 12, ATTND_ENOTSUP, "q");
    REFUSED(row->out = NULL, ATTND_EINVAL, "out");
    REFUSED(row->k_new = NULL, ATTND_EINVAL, "k_new");
    REFUSED(row->v_new = NULL, ATTND_EINVAL, "v_new");
    REFUSED(row->k_offset = 8, ATTND_EINVAL, "k_offset");
    REFUSED((row->v_offset = 1u << 30, params.pool_bytes = 1u << 30), ATTND_EINVAL, "v_offset");
    REFUSED(params.num_splits = 129, ATTND_EINVAL, "num_splits");
    REFUSED((params.num_splits = 2, params.deterministic = true), ATTND_EINVAL, "num_splits");
    REFUSED(params.pool = NULL, ATTND_EINVAL, "pool");
    REFUSED(limits.max_records = 0, ATTND_EMSGSIZE, "rows");
    REFUSED((params.num_splits = 2, limits.slot_floats = 10), ATTND_EMSGSIZE, "rows");
#undef REFUSED
}
END_TEST

START_TEST(shapes_that_no_kernel_takes_are_refused_by_name) {
    begin(4, 132);
    const attn_shape good = params.shape;
    ATTND_CK_OK(attn_cuda_check_shape(&good, NULL));
#define REFUSED(change, code, name)                           \
    do {                                                      \
        attn_shape s = good;                                  \
        attnd_errinfo info = {0};                             \
        change;                                               \
        ATTND_CK_ERR(attn_cuda_check_shape(&s, &info), code); \
        ck_assert_str_eq(info.field, name);                   \
    } while (0)
    REFUSED(s.q_dtype = s.kv_dtype = ATTND_F32, ATTND_ENOTSUP, "q_dtype");
    REFUSED(s.kv_dtype = ATTND_F8E4M3, ATTND_ENOTSUP, "kv_dtype");
    REFUSED(s.head_dim = 96, ATTND_ENOTSUP, "head_dim");
    REFUSED(s.v_head_dim = 64, ATTND_ENOTSUP, "v_head_dim");
    REFUSED(s.q_heads = 7, ATTND_EINVAL, "q_heads");
    REFUSED(s.block_tokens = 0, ATTND_EINVAL, "block_tokens");
    REFUSED(s.block_tokens = 24, ATTND_ENOTSUP, "block_tokens");
    REFUSED(s.stride_k_token = 3 * 128, ATTND_ENOTSUP, "stride_k_token");
    REFUSED(s.stride_v_token = 3 * 128, ATTND_ENOTSUP, "stride_v_token");
    REFUSED(s.stride_k_head += 4, ATTND_ENOTSUP, "stride_k_head");
    REFUSED(s.stride_v_head = -8, ATTND_ENOTSUP, "stride_v_head");
    REFUSED(s.block_stride += 8, ATTND_ENOTSUP, "block_stride");
#undef REFUSED
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("attn_cuda_plan");
    TCase *t = tcase_create("plan");
    tcase_set_timeout(t, 60);
    tcase_add_loop_test(t, all_pieces_of_random_launches_are_the_launch, 0, 90);
    tcase_add_test(t, masks_go_to_the_kernel_that_takes_them);
    tcase_add_test(t, empty_rows_get_one_piece_a_head);
    tcase_add_test(t, no_cta_has_more_than_its_share);
    tcase_add_test(t, one_sequence_is_cut_into_one_part_a_cta);
    tcase_add_test(t, short_sequences_are_not_cut_below_the_least_part);
    tcase_add_test(t, bad_rows_are_refused_by_name);
    tcase_add_test(t, a_layer_may_lie_behind_block_stride);
    tcase_add_test(t, shapes_that_no_kernel_takes_are_refused_by_name);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
