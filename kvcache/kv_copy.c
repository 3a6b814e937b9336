// Copies of token rows: which ones gather an accepted path, and running them in host memory.
//
// A path goes up, so a row only ever moves down (path[j] >= j): in ascending order no copy
// overwrites a row that a later one still reads, and one copy may overlap itself (memmove).
#include <string.h>

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

// move_rows moves num_tokens rows of every head of a layer's K or V, heads [kv_heads, block_tokens,
// row_bytes] at off in both blocks.
static void move_rows(const kv_group_spec *group, const kv_copy *copy, char *dst, const char *src,
                      uint32_t row_bytes) {
    for (uint32_t h = 0; h < group->kv_heads; h++) {
        uint64_t head = (uint64_t)h * group->block_tokens;
        memmove(dst + (head + copy->dst_token) * row_bytes,
                src + (head + copy->src_token) * row_bytes, (uint64_t)copy->num_tokens * row_bytes);
    }
}

void kv_copy_run(const kv_cache *kv, const kv_copy *copies, uint32_t num_copies) {
    ATTND_ASSERT(!kv->arena->on_device);
    char *base = kv->arena->base;
    for (uint32_t n = 0; n < num_copies; n++) {
        const kv_copy *copy = &copies[n];
        const kv_group_spec *group = &kv->models[copy->model].spec.groups[copy->group];
        char *dst = base + (uint64_t)copy->dst * KV_BLOCK_UNIT;
        const char *src = base + (uint64_t)copy->src * KV_BLOCK_UNIT;
        for (uint32_t layer = 0; layer < group->layers; layer++) {
            uint64_t k_off, v_off;
            kv_layer_offset(group, layer, &k_off, &v_off);
            move_rows(group, copy, dst + k_off, src + k_off, group->k_row_bytes);
            move_rows(group, copy, dst + v_off, src + v_off, group->v_row_bytes);
        }
    }
}
