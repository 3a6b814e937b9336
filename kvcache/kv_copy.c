// Copies of token rows: which ones gather an accepted path, and running them in the arena.
//
// A path goes up, so a row only ever moves down (path[j] >= j): in ascending order no copy
// overwrites a row that a later one still reads.  A copy may overlap itself; it is run in parts
// that do not.
#include <stddef.h>

#include "kvcache/kv_ledger.h"

// gather is the list being made: of one sequence.
typedef struct gather {
    kv_copy *out;
    uint32_t max, num;
} gather;

// add lists the move of one row, as part of the copy before it when it goes on where that ends:
// rows that follow each other at the source do so at the destination, too.
static bool add(gather *list, kv_copy row) {
    kv_copy *last = list->num > 0 ? &list->out[list->num - 1] : NULL;
    if (last && last->group == row.group && last->src == row.src && last->dst == row.dst &&
        last->src_token + last->num_tokens == row.src_token) {
        last->num_tokens++;
        return true;
    }
    if (list->num == list->max) {
        return false;
    }
    list->out[list->num++] = row;
    return true;
}

static attnd_err check_path(const uint32_t *path, uint32_t num_path, uint32_t rows,
                            attnd_errinfo *info) {
    for (uint32_t j = 0; j < num_path; j++) {
        if (path[j] >= rows || (j > 0 && path[j] <= path[j - 1])) {
            return attnd_fail(info, ATTND_EINVAL, "path",
                              "node %u of the path is row %u: rows ascend and are below %u", j,
                              path[j], rows);
        }
    }
    return ATTND_OK;
}

// NOLINTNEXTLINE(readability-function-size): parameters
attnd_err kv_step_moves(const kv_cache *kv, uint64_t step, uint32_t i, const uint32_t *path,
                        uint32_t num_path, kv_copy *out, uint32_t max, uint32_t *num,
                        attnd_errinfo *info) {
    uint32_t num_seqs, model;
    const kv_step_seq *seqs = kv_step_get(kv, 0, step, &num_seqs, &model);
    if (!seqs) {
        return attnd_fail(info, ATTND_ESTALE, "step", "step %llx is not open",
                          (unsigned long long)step);
    }
    if (i >= num_seqs) {
        return attnd_fail(info, ATTND_EINVAL, "seqs", "the step has %u sequences", num_seqs);
    }
    attnd_err err = check_path(path, num_path, seqs[i].new_len - seqs[i].cached, info);
    if (err) {
        return err;
    }
    const kv_model_spec *spec = kv_model_get(kv, model);
    uint32_t first = seqs[i].committed + seqs[i].cached; // token of row 0
    gather list = {.out = out, .max = max};
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        uint32_t block_tokens = spec->groups[g].block_tokens;
        const uint32_t *table = kv_table(kv, (uint32_t)seqs[i].seq, g);
        for (uint32_t j = 0; j < num_path; j++) {
            uint32_t src = first + path[j], dst = first + j;
            kv_copy row = {
                .model = model,
                .group = g,
                .src = table[src / block_tokens],
                .dst = table[dst / block_tokens],
                .src_token = src % block_tokens,
                .dst_token = dst % block_tokens,
                .num_tokens = 1,
            };
            if (src != dst && !add(&list, row)) {
                return attnd_fail(info, ATTND_EMSGSIZE, "path", "more than %u copies", max);
            }
        }
    }
    *num = list.num;
    return ATTND_OK;
}

// spread lists the moves of one part of a copy: num tokens from src_token to dst_token on, of every
// layer and head.  A block is heads of rows, one behind the other, so that it is one move where the
// rows of K and V have one length, else one for K and one for V of each layer.
static attnd_err spread(const kv_cache *kv, const kv_copy *copy, uint32_t skip, uint32_t num,
                        attnd_errinfo *info) {
    const kv_arena *arena = kv->arena;
    const kv_group_spec *group = &kv->models[copy->model].spec.groups[copy->group];
    uint64_t src = (uint64_t)copy->src * KV_BLOCK_UNIT, dst = (uint64_t)copy->dst * KV_BLOCK_UNIT;
    bool is_even = group->k_row_bytes == group->v_row_bytes;
    attnd_err err = ATTND_OK;
    for (uint32_t layer = 0; layer < (is_even ? 1 : group->layers) && !err; layer++) {
        uint64_t off[2];
        const uint32_t row_bytes[2] = {group->k_row_bytes, group->v_row_bytes};
        kv_layer_offset(group, layer, &off[0], &off[1]);
        for (int part = 0; part < (is_even ? 1 : 2) && !err; part++) {
            uint64_t row = row_bytes[part];
            kv_move move = {
                .src = src + off[part] + (copy->src_token + skip) * row,
                .dst = dst + off[part] + (copy->dst_token + skip) * row,
                .row_bytes = num * row,
                .pitch = group->block_tokens * row,
                .num_rows =
                    is_even ? (uint64_t)2 * group->layers * group->kv_heads : group->kv_heads,
            };
            err = arena->ops->move(arena, &move, info);
        }
    }
    return err;
}

attnd_err kv_copy_run(const kv_cache *kv, const kv_copy *copies, uint32_t num_copies,
                      attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    for (uint32_t n = 0; n < num_copies && !err; n++) {
        const kv_copy *copy = &copies[n];
        uint32_t step = copy->num_tokens; // a copy down its own block goes in parts as long as that
        if (copy->src == copy->dst) {
            ATTND_ASSERT(copy->src_token > copy->dst_token);
            uint32_t down = copy->src_token - copy->dst_token;
            step = down < step ? down : step;
        }
        for (uint32_t skip = 0; skip < copy->num_tokens && !err; skip += step) {
            uint32_t left = copy->num_tokens - skip;
            err = spread(kv, copy, skip, left < step ? left : step, info);
        }
    }
    return err;
}
