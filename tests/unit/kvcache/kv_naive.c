// The naive model: see kv_naive.h.  Slow where it can be plain.
#include "tests/unit/kvcache/kv_naive.h"

#include <check.h>
#include <string.h>

uint32_t naive_new_block(naive *n, uint32_t tenant, uint32_t shape) {
    while (n->users[n->next_block] > 0) {
        n->next_block = (n->next_block + 1) % NAIVE_BLOCKS;
    }
    uint32_t block = n->next_block;
    n->users[block] = 1;
    n->tenant[block] = (uint8_t)tenant;
    n->shape[block] = (uint8_t)shape;
    n->in_use[shape]++;
    n->tenant_blocks[tenant]++;
    return block;
}

void naive_hold(naive *n, uint32_t block) {
    n->users[block]++;
}

void naive_drop(naive *n, uint32_t block) {
    if (n->users[block] == 0) {
        ck_abort_msg("block %u has no user", block);
    }
    if (--n->users[block] == 0) {
        n->in_use[n->shape[block]]--;
        n->tenant_blocks[n->tenant[block]]--;
    }
}

uint32_t naive_blocks(uint32_t len, uint32_t block_tokens) {
    uint32_t blocks = 0;
    while (blocks * block_tokens < len) {
        blocks++;
    }
    return blocks;
}

uint32_t naive_first(const naive_model *m, uint32_t g, uint32_t at) {
    uint32_t block = 0;
    while (m->window[g] >= 0 &&
           (block + 1) * m->block_tokens[g] + (uint32_t)m->window[g] + NAIVE_MARGIN <= at) {
        block++;
    }
    return block;
}

uint32_t naive_found(const naive *n, const naive_step_seq *in, uint32_t g) {
    const naive_seq *s = &n->seqs[in->seq];
    const naive_model *m = &n->models[s->model];
    uint32_t have = naive_blocks(s->len, m->block_tokens[g]);
    uint32_t whole = in->cached / m->block_tokens[g];
    uint32_t first = naive_first(m, g, s->len + whole * m->block_tokens[g]);
    return whole > 0 && first > have ? first : have;
}

bool naive_sees(const naive *n, uint32_t seq, int64_t at) {
    const naive_seq *s = &n->seqs[seq];
    const naive_model *m = &n->models[s->model];
    bool all = true;
    for (uint32_t g = 0; g < m->num_groups; g++) {
        int64_t gone = (int64_t)s->first[g] * m->block_tokens[g];
        all = all && (gone == 0 || at - m->window[g] >= gone);
    }
    return all;
}

// copies_last says whether writing behind the sequence's tokens writes into a block of others.
static bool copies_last(const naive *n, const naive_seq *s, uint32_t g) {
    uint32_t block_tokens = n->models[s->model].block_tokens[g];
    uint32_t last = s->len % block_tokens ? s->blocks[g][s->len / block_tokens] : 0;
    return s->len % block_tokens != 0 && (n->users[last] > 1 || n->indexed[last]);
}

void naive_need(const naive *n, const naive_step_seq *seqs, uint32_t num, uint32_t need[4]) {
    memset(need, 0, 4 * sizeof(need[0]));
    for (uint32_t i = 0; i < num; i++) {
        const naive_seq *s = &n->seqs[seqs[i].seq];
        const naive_model *m = &n->models[s->model];
        uint32_t grow = seqs[i].new_len + seqs[i].reserve;
        for (uint32_t g = 0; g < m->num_groups; g++) {
            need[m->shape[g]] += naive_blocks(s->len + grow, m->block_tokens[g]) -
                                 naive_blocks(s->len, m->block_tokens[g]);
            need[m->shape[g]] += grow > 0 && copies_last(n, s, g);
        }
    }
}

void naive_held(const naive *n, const naive_step_seq *seqs, uint32_t num, uint32_t held[4]) {
    bool seen[NAIVE_BLOCKS] = {false};
    memset(held, 0, 4 * sizeof(held[0]));
    for (uint32_t i = 0; i < num; i++) {
        const naive_seq *s = &n->seqs[seqs[i].seq];
        const naive_model *m = &n->models[s->model];
        for (uint32_t g = 0; g < m->num_groups; g++) {
            for (uint32_t b = s->first[g]; b < naive_blocks(s->len, m->block_tokens[g]); b++) {
                held[m->shape[g]] += !seen[s->blocks[g][b]];
                seen[s->blocks[g][b]] = true;
            }
        }
    }
}

// An open step's view has a number for every block that it sees: the sequence's own, except for
// copied and new ones, of which the step is the user.  Who copies is decided for all sequences of
// the step before any takes a block.
void naive_open(naive *n, int step) {
    naive_step *st = &n->steps[step];
    bool copies[NAIVE_STEP_SEQS][NAIVE_GROUPS];
    for (uint32_t i = 0; i < st->num_seqs; i++) {
        for (uint32_t g = 0; g < NAIVE_GROUPS; g++) {
            const naive_seq *s = &n->seqs[st->seqs[i].seq];
            copies[i][g] = g < n->models[s->model].num_groups &&
                           st->seqs[i].new_len + st->seqs[i].reserve > 0 && copies_last(n, s, g);
        }
    }
    for (uint32_t i = 0; i < st->num_seqs; i++) {
        naive_step_seq *in = &st->seqs[i];
        naive_seq *s = &n->seqs[in->seq];
        const naive_model *m = &n->models[s->model];
        s->step = step;
        for (uint32_t g = 0; g < m->num_groups; g++) {
            uint32_t have = naive_blocks(s->len, m->block_tokens[g]);
            uint32_t want = naive_blocks(s->len + in->new_len + in->reserve, m->block_tokens[g]);
            uint32_t found = in->cached / m->block_tokens[g];
            for (uint32_t b = 0; b < want; b++) {
                if (b >= have && b < have + found) {
                    continue;
                }
                bool own = b >= have || (b == have - 1 && copies[i][g]);
                in->blocks[g][b] =
                    own ? naive_new_block(n, m->tenant, m->shape[g]) : s->blocks[g][b];
            }
        }
    }
}

static void end_seq(naive *n, naive_step_seq *in, uint32_t accepted, const uint32_t *path) {
    naive_seq *s = &n->seqs[in->seq];
    const naive_model *m = &n->models[s->model];
    uint32_t before = s->len, found[NAIVE_GROUPS];
    for (uint32_t g = 0; g < m->num_groups; g++) {
        found[g] = naive_found(n, in, g);
    }
    for (uint32_t j = 0; j < accepted; j++) {
        s->tokens[before + j] = in->tokens[path ? path[j] : j];
    }
    if (s->known == before && in->with_ids) {
        s->known = before + accepted;
    }
    s->len = before + accepted;
    s->step = -1;
    for (uint32_t g = 0; g < NAIVE_GROUPS; g++) {
        if (in->copied[g]) {
            naive_drop(n, in->copied[g] - 1);
        }
        in->copied[g] = 0;
    }
    for (uint32_t g = 0; g < m->num_groups; g++) {
        uint32_t taken = found[g];
        uint32_t have = naive_blocks(before, m->block_tokens[g]);
        uint32_t keep = naive_blocks(s->len, m->block_tokens[g]);
        uint32_t want = naive_blocks(before + in->new_len + in->reserve, m->block_tokens[g]);
        for (uint32_t b = s->first[g]; b < want; b++) {
            if (b >= have && b < taken) {
                continue;
            }
            uint32_t old = b < have ? s->blocks[g][b] : NAIVE_BLOCKS;
            bool goes_on = b < keep && (accepted > 0 || old == in->blocks[g][b]);
            if (goes_on) {
                s->blocks[g][b] = in->blocks[g][b];
                if (old != NAIVE_BLOCKS && old != in->blocks[g][b]) {
                    naive_drop(n, old);
                }
            } else if (old != in->blocks[g][b]) {
                naive_drop(n, in->blocks[g][b]);
            }
        }
        uint32_t whole = in->cached / m->block_tokens[g] * m->block_tokens[g];
        uint32_t first = accepted > 0 ? naive_first(m, g, before + whole) : 0;
        for (uint32_t b = s->first[g]; b < first; b++) {
            if (b < have || b >= taken) {
                naive_drop(n, s->blocks[g][b]);
            }
        }
        s->first[g] = first > s->first[g] ? first : s->first[g];
    }
}

void naive_end(naive *n, int step, const uint32_t *accepted, const uint32_t *const *path) {
    naive_step *st = &n->steps[step];
    for (uint32_t i = 0; i < st->num_seqs; i++) {
        end_seq(n, &st->seqs[i], accepted ? accepted[i] : 0, path ? path[i] : NULL);
    }
    st->live = false;
}

void naive_fork(naive *n, uint32_t from, uint32_t to) {
    naive_seq *s = &n->seqs[to];
    uint64_t handle = s->handle;
    *s = n->seqs[from];
    s->handle = handle;
    s->name = -1;
    s->ttl = 0;
    s->step = -1;
    const naive_model *m = &n->models[s->model];
    for (uint32_t g = 0; g < m->num_groups; g++) {
        for (uint32_t b = s->first[g]; b < naive_blocks(s->len, m->block_tokens[g]); b++) {
            naive_hold(n, s->blocks[g][b]);
        }
    }
}

void naive_truncate(naive *n, uint32_t seq, uint32_t len) {
    naive_seq *s = &n->seqs[seq];
    const naive_model *m = &n->models[s->model];
    for (uint32_t g = 0; g < m->num_groups; g++) {
        uint32_t from = len > 0 ? naive_blocks(len, m->block_tokens[g]) : s->first[g];
        for (uint32_t b = from; b < naive_blocks(s->len, m->block_tokens[g]); b++) {
            naive_drop(n, s->blocks[g][b]);
        }
        s->first[g] = len > 0 ? s->first[g] : 0;
    }
    s->len = len;
    s->known = s->known < len ? s->known : len;
}

void naive_free(naive *n, uint32_t seq) {
    naive_truncate(n, seq, 0);
    n->seqs[seq].live = false;
}
