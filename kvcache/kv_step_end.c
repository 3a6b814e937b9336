// Steps end here: a commit makes tokens count, an abort gives all back (kv_step.c says what a step
// holds).
//
// Entries of blocks that are not gone on with are put back into tables first.  Then one record ends
// the step: lengths, checksums and beginnings of tables, the chains of cached blocks, the reply.
// References go last; a restart counts them anew.
#include "kvcache/kv_chain.h"
#include "kvcache/kv_redo.h"
#include "kvcache/kv_seq.h"
#include "kvcache/kv_session.h"
#include "kvcache/kv_step.h"
#include "kvcache/kv_sum.h"
#include "kvcache/kv_window.h"

typedef struct ending {
    kv_cache *kv;
    const kv_model_spec *spec;
    uint32_t step;
    const kv_step_seq *seqs;
    uint32_t num_seqs;
    const uint32_t *accepted;      // [num_seqs], NULL = nothing is
    const uint32_t *const *tokens; // [num_seqs], their ids; NULL = not known
} ending;

static attnd_err check_end(kv_cache *kv, kv_request rq, uint64_t step, ending *e,
                           attnd_errinfo *info) {
    uint32_t session_idx, model;
    attnd_err err = kv_request_check(kv, rq, true, &session_idx, info);
    if (err) {
        return err;
    }
    *e = (ending){.kv = kv, .step = (uint32_t)step};
    e->seqs = kv_step_get(kv, rq.session, step, &e->num_seqs, &model);
    if (!e->seqs) {
        attnd_fail(info, ATTND_ESTALE, "step", "step %llx is not open", (unsigned long long)step);
        return ATTND_ESTALE;
    }
    e->spec = &kv->models[model].spec;
    return ATTND_OK;
}

static uint32_t accepted_of(const ending *e, uint32_t i) {
    return e->accepted ? e->accepted[i] : 0;
}

static const uint32_t *tokens_of(const ending *e, uint32_t i) {
    return e->tokens ? e->tokens[i] : NULL;
}

// put_back puts the committed entry back where a copy is not gone on with.
static void put_back(const ending *e) {
    for (uint32_t n = 0; n < e->kv->step_aux[e->step].num_copies; n++) {
        const kv_copy *copy = &kv_step_copies(e->kv, e->step)[n];
        uint32_t i, idx = kv_step_copied(e->kv, e->step, n, &i);
        if (accepted_of(e, i) == 0 && !kv_step_is_found(e->kv, e->step, i)) {
            kv_step_set_last(e->kv, idx, copy->group, copy->src);
        }
    }
}

// window_of returns the first block of a group that sequence i of a step has once the step is
// committed.
static uint32_t window_of(const kv_cache *kv, const kv_model_spec *spec, uint32_t step, uint32_t i,
                          uint32_t g) {
    const kv_step_hit *hit = kv_step_hit_of(kv, step, i);
    uint32_t idx = (uint32_t)kv->step_seqs[(uint64_t)step * kv->opts.max_step_seqs + i].seq;
    uint64_t at = kv->seqs[idx].committed + (uint64_t)hit->blocks * spec->groups[g].block_tokens;
    uint32_t first = kv_window_first(kv, &spec->groups[g], at);
    return first > hit->first[g] ? first : hit->first[g];
}

// put_tables puts where the tables of sequence i begin and their checksums, if these change.  *n
// counts the step's copies, which are in the order of sequences and groups.
static void put_tables(const ending *e, uint32_t i, uint32_t *n) {
    kv_cache *kv = e->kv;
    uint32_t idx = (uint32_t)e->seqs[i].seq, committed = e->seqs[i].committed;
    for (uint32_t g = 0; g < e->spec->num_groups; g++) {
        uint32_t block_tokens = e->spec->groups[g].block_tokens;
        uint32_t have = kv_blocks_of(committed, block_tokens);
        uint32_t want = kv_blocks_of(committed + accepted_of(e, i), block_tokens);
        uint32_t before = kv->seqs[idx].first[g], first = before;
        const uint32_t *table = kv_table(kv, idx, g);
        uint64_t sum = kv->seqs[idx].table_sums[g];
        if (accepted_of(e, i) > 0) {
            first = window_of(kv, e->spec, e->step, i, g);
        }
        if (first != before) {
            kv_redo_put(kv, &kv->seqs[idx].first[g], first);
        }
        sum -= kv_sum_entries(table, before, first < have ? first : have);
        sum += kv_sum_entries(table, first > have ? first : have, want);
        const kv_copy *copy = &kv_step_copies(kv, e->step)[*n];
        uint32_t of = KV_NONE;
        if (*n < kv->step_aux[e->step].num_copies) {
            kv_step_copied(kv, e->step, *n, &of);
        }
        if (of == i && copy->group == g) {
            ++*n;
            if (accepted_of(e, i) > 0 && !kv_step_is_found(kv, e->step, i)) {
                sum += kv_sum_entry(have - 1, copy->dst) - kv_sum_entry(have - 1, copy->src);
            }
        }
        if (sum != kv->seqs[idx].table_sums[g]) {
            kv_redo_put64(kv, &kv->seqs[idx].table_sums[g], sum);
        }
    }
}

// publish_end ends the step: every length and the reply, in the committing store of kv_step_commit
// and kv_step_abort.
static void publish_end(const ending *e, kv_request rq, kv_op op, uint64_t step) {
    kv_cache *kv = e->kv;
    kv_redo_begin(kv);
    kv_redo_put(kv, &kv->steps[e->step].state, KV_FREE);
    for (uint32_t n = 0; n < kv->step_aux[e->step].num_copies; n++) {
        uint32_t i, idx = kv_step_copied(kv, e->step, n, &i);
        if (!kv_step_is_found(kv, e->step, i)) {
            kv_redo_put(kv, &kv->seqs[idx].old_last[kv_step_copies(kv, e->step)[n].group], KV_NONE);
        }
    }
    uint32_t *values = kv_reply_put(kv, rq, op, step, op == KV_OP_COMMIT ? e->num_seqs : 0);
    for (uint32_t i = 0, copies = 0; i < e->num_seqs; i++) {
        put_tables(e, i, &copies);
        kv_chain_put(kv, (uint32_t)e->seqs[i].seq, accepted_of(e, i), tokens_of(e, i),
                     kv_step_hit_of(kv, e->step, i));
        uint32_t len = e->seqs[i].committed + accepted_of(e, i);
        kv_redo_put(kv, &kv->seqs[(uint32_t)e->seqs[i].seq].committed, len);
        if (values && op == KV_OP_COMMIT) {
            kv_redo_put(kv, values++, len);
        }
    }
    kv_redo_commit(kv);
}

// finish gives back what the sequences do not go on with.
static void finish(const ending *e) {
    kv_cache *kv = e->kv;
    for (uint32_t n = 0; n < kv->step_aux[e->step].num_copies; n++) {
        const kv_copy *copy = &kv_step_copies(kv, e->step)[n];
        uint32_t i;
        kv_step_copied(kv, e->step, n, &i);
        bool goes_on = accepted_of(e, i) > 0 || kv_step_is_found(kv, e->step, i);
        kv_seq_give_block(kv, e->spec->tenant, goes_on ? copy->src : copy->dst);
    }
    for (uint32_t i = 0; i < e->num_seqs; i++) {
        const kv_step_seq *s = &e->seqs[i];
        uint32_t idx = (uint32_t)s->seq;
        for (uint32_t g = 0; g < e->spec->num_groups; g++) {
            uint32_t block_tokens = e->spec->groups[g].block_tokens;
            kv_seq_give_blocks(kv, idx, g,
                               kv_blocks_of(s->committed + accepted_of(e, i), block_tokens),
                               kv_blocks_of(s->committed + s->new_len + s->reserve, block_tokens));
        }
        kv_step_hit *hit = kv_step_hit_of(kv, e->step, i);
        kv_chain_committed(kv, idx, s->committed, tokens_of(e, i), hit);
        for (uint32_t g = 0; g < e->spec->num_groups; g++) {
            kv_window_give(kv, idx, g, hit->first[g], kv->seqs[idx].first[g]);
        }
        kv_step_drop_hit(kv, hit);
        kv->seq_aux[idx].step = 0;
    }
    kv->session_aux[(uint32_t)kv->step_aux[e->step].session].steps--;
    kv_slots_give_handle(&kv->lists->steps, kv->step_next, e->step, kv->steps[e->step].generation);
}

static void end_step(const ending *e, kv_request rq, kv_op op, uint64_t step) {
    put_back(e);
    publish_end(e, rq, op, step);
    finish(e);
}

static attnd_err check_accepted(const ending *e, uint32_t num_accepted, attnd_errinfo *info) {
    if (num_accepted != e->num_seqs) {
        return attnd_fail(info, ATTND_EINVAL, "num_seqs", "the step has %u sequences, not %u",
                          e->num_seqs, num_accepted);
    }
    for (uint32_t i = 0; i < e->num_seqs; i++) {
        const kv_step_seq *s = &e->seqs[i];
        if (e->accepted[i] > s->new_len || e->accepted[i] < s->cached) {
            return attnd_fail(info, ATTND_EINVAL, "accepted",
                              "sequence %u of the step: %u accepted, %u to %u are possible", i,
                              e->accepted[i], s->cached, s->new_len);
        }
    }
    return ATTND_OK;
}

attnd_err kv_step_commit(kv_cache *kv, kv_request rq, uint64_t step, const uint32_t *accepted,
                         uint32_t num_accepted, attnd_errinfo *info) {
    return kv_step_commit_ids(kv, rq, step, accepted, NULL, num_accepted, info);
}

attnd_err kv_step_commit_ids(kv_cache *kv, kv_request rq, uint64_t step, const uint32_t *accepted,
                             const uint32_t *const *tokens, uint32_t num_accepted,
                             attnd_errinfo *info) {
    ending e;
    attnd_err err = check_end(kv, rq, step, &e, info);
    if (err) {
        return err;
    }
    e.accepted = accepted;
    e.tokens = tokens;
    err = check_accepted(&e, num_accepted, info);
    if (err == ATTND_OK) {
        end_step(&e, rq, KV_OP_COMMIT, step);
    }
    return err;
}

attnd_err kv_step_abort(kv_cache *kv, kv_request rq, uint64_t step) {
    ending e;
    attnd_err err = check_end(kv, rq, step, &e, NULL);
    if (err == ATTND_OK) {
        end_step(&e, rq, KV_OP_ABORT, step);
    }
    return err;
}
