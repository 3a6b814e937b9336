// kv_rows gives the rows of a token recognisable bytes: made from the token's value, the layer, the
// head, and whether it is K or V, so that no row of a sequence can stand in for another.
#ifndef ATTND_TESTS_KV_ROWS_H
#define ATTND_TESTS_KV_ROWS_H

#include <string.h>

#include "kvcache/kv_cache.h"

enum { ROWS_MAX_BYTES = 64 }; // of a row, a multiple of 4

static inline void rows_make(char *row, uint32_t bytes, uint32_t token, uint32_t layer,
                             uint32_t head, uint32_t kind) {
    uint32_t word = (token * 16 + layer * 4 + head) * 2 + kind;
    for (uint32_t i = 0; i < bytes; i += 4) {
        uint32_t mixed = (word + i) * UINT32_C(2654435761);
        memcpy(row + i, &mixed, 4);
    }
}

// rows_each writes all rows of the token at place at of a table, or says whether they are right.
static inline bool rows_each(const kv_model_spec *spec, uint32_t g, char *memory,
                             const uint32_t *table, uint32_t at, uint32_t token, bool write) {
    const kv_group_spec *group = &spec->groups[g];
    char *block = memory + (size_t)table[at / group->block_tokens] * KV_BLOCK_UNIT;
    const uint32_t bytes[2] = {group->k_row_bytes, group->v_row_bytes};
    bool right = true;
    for (uint32_t i = 0; i < group->layers * group->kv_heads * 2; i++) {
        uint32_t kind = i % 2, head = i / 2 % group->kv_heads, layer = i / 2 / group->kv_heads;
        uint64_t off[2];
        char want[ROWS_MAX_BYTES];
        kv_layer_offset(group, layer, &off[0], &off[1]);
        char *row = block + off[kind] +
                    ((size_t)head * group->block_tokens + at % group->block_tokens) * bytes[kind];
        rows_make(want, bytes[kind], token, layer, head, kind);
        if (write) {
            memcpy(row, want, bytes[kind]);
        }
        right = right && memcmp(row, want, bytes[kind]) == 0;
    }
    return right;
}

static inline void rows_write(const kv_model_spec *spec, uint32_t g, char *memory,
                              const uint32_t *table, uint32_t at, uint32_t token) {
    rows_each(spec, g, memory, table, at, token, true);
}

static inline bool rows_right(const kv_model_spec *spec, uint32_t g, char *memory,
                              const uint32_t *table, uint32_t at, uint32_t token) {
    return rows_each(spec, g, memory, table, at, token, false);
}

#endif
