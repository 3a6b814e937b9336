// Token ids: see srv_prefix.h for which count.
#include "server/srv_prefix.h"

#include <string.h>

attnd_err srv_prefix_can(const srv_core *core, const srv_model *model, attnd_errinfo *info) {
    if (!core->conf.prefixes) {
        return ATTND_OK;
    }
    if (!model->attn->causal) {
        return attnd_fail(info, ATTND_ENOTSUP, "tokens_off",
                          "rows of a model that is not causal depend on the tokens behind them");
    }
    if (model->attn->block_tokens > core->conf.prefix_block_tokens) {
        return attnd_fail(info, ATTND_ENOTSUP, "tokens_off",
                          "the model has blocks of %u tokens: cache.prefix_block_tokens is %llu",
                          model->attn->block_tokens,
                          (unsigned long long)core->conf.prefix_block_tokens);
    }
    return ATTND_OK;
}

// at_default says whether rows [num] of a sequence of len tokens are where they are by default.
static bool at_default(const int32_t *positions, uint32_t num, uint32_t len) {
    for (uint32_t r = 0; positions && r < num; r++) {
        if (positions[r] != (int32_t)(len + r)) {
            return false;
        }
    }
    return true;
}

void srv_prefix_look_up(const srv_core *core, srv_step *step) {
    for (uint32_t i = 0; i < step->num_seqs; i++) {
        const attn_seq *s = &step->seqs[i];
        const uint32_t *tokens = step->ids[i].tokens;
        kv_step_seq *kv = &step->kv_seqs[i];
        kv_seq_info info;
        kv->tokens = NULL;
        if (tokens && !s->tree && kv_seq_get(core->kv, step->session->id, kv->seq, &info) == 0 &&
            at_default(s->positions, kv->new_len, info.committed)) {
            kv->tokens = tokens;
        }
    }
}

// is_chain says whether row path[j] of a tree sees the rows of the path up to itself, and no other.
static bool is_chain(const attn_seq *s, const uint32_t *path, uint32_t j) {
    uint32_t words = (s->rows + 63) / 64;
    uint64_t want[PROTO_MAX_TREE_ROWS / 64] = {0};
    for (uint32_t k = 0; k <= j; k++) {
        uint32_t row = path ? path[k] : k;
        want[row / 64] |= UINT64_C(1) << row % 64;
    }
    uint32_t row = path ? path[j] : j;
    return memcmp(s->tree + (size_t)row * words, want, words * sizeof(want[0])) == 0;
}

// is_sequence says whether the accepted rows [num], behind len tokens, are rows of a sequence.
static bool is_sequence(const attn_seq *s, const uint32_t *path, uint32_t num, uint32_t len) {
    if (!s->tree) {
        return at_default(s->positions, num, len);
    }
    for (uint32_t j = 0; j < num; j++) {
        uint32_t row = path ? path[j] : j;
        uint32_t position = s->positions ? (uint32_t)s->positions[row] : len + row;
        if (position != len + j || !is_chain(s, path, j)) {
            return false;
        }
    }
    return true;
}

void srv_prefix_ids(srv_step *step) {
    for (uint32_t i = 0; i < step->num_seqs; i++) {
        const srv_step_ids *ids = &step->ids[i];
        uint32_t cached = step->kv_seqs[i].cached, num = step->accepted[i] - cached;
        bool known = ids->tokens && is_sequence(&step->seqs[i], ids->path, num,
                                                step->kv_seqs[i].committed + cached);
        for (uint32_t j = 0; known && ids->path && j < num; j++) {
            ids->tokens[cached + j] = ids->tokens[cached + ids->path[j]];
        }
        step->accepted_ids[i] = known ? ids->tokens : NULL;
    }
}
