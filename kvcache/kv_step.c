// Steps are opened here: blocks are reserved for a batch.  Commit and abort are in kv_step_end.c.
//
// Opening claims every sequence and counts what it needs, then takes it: quota and pool are
// compared with the counts before a block is touched, so a refused step has nothing to undo but the
// claims. The blocks behind the committed length are reservations: no record names them, and a
// restart drops them.
//
// A sequence that will write into a partial last block which others share gets a block of its own
// in that table entry; the committed entry goes to seqs.old_last, by the record that opens the step
// and before the table changes.  Until the commit the sequence holds both, and its committed view
// is the old one.  A commit that accepts tokens makes the copy the committed block; otherwise the
// old entry is put back into the table before the record that ends the step.
//
// What the prefix cache has of a sequence's tokens is looked up, and held, before anything is
// counted, so what makes room for the step does not take it away.  Whole blocks go into the table
// as reservations do.  The first rows of one more block are copied into the sequence's own, which
// ties that block up until the step ends: if the step does not fit so, it does without.
// Of a group with a window only found blocks that its rows see are taken over (kv_window.h).
#include "kvcache/kv_step.h"

#include <string.h>

#include "kvcache/kv_chain.h"
#include "kvcache/kv_evict.h"
#include "kvcache/kv_model.h"
#include "kvcache/kv_pool.h"
#include "kvcache/kv_redo.h"
#include "kvcache/kv_seq.h"
#include "kvcache/kv_session.h"
#include "kvcache/kv_sum.h"
#include "kvcache/kv_window.h"

typedef struct opening {
    kv_cache *kv;
    const kv_model_spec *spec;
    const uint32_t *classes; // of the groups
    uint32_t session_idx, model, step;
    kv_step_seq *seqs; // [num_seqs], the caller's
    uint32_t num_seqs;
    kv_need needs[KV_MAX_GROUPS]; // of different classes
    uint32_t num_needs;
    uint64_t take, found; // blocks, all classes
    uint32_t taken;       // at most take: a last block that was a node's may be so no more
    bool waits;           // would wait for tiers
    bool fetches;         // what it looked up is being fetched
} opening;

// demand is what a sequence needs of a group: blocks [have, want), and its last block copied.
typedef struct demand {
    uint32_t have, want;
    uint32_t copy_tokens; // of block have - 1; 0 = it stays
} demand;

static demand demand_of(const opening *o, uint32_t idx, uint32_t g, const kv_step_seq *s) {
    uint32_t committed = o->kv->seqs[idx].committed;
    uint32_t block_tokens = o->spec->groups[g].block_tokens;
    uint32_t grow = s->new_len + s->reserve;
    demand d = {
        .have = kv_blocks_of(committed, block_tokens),
        .want = kv_blocks_of(committed + grow, block_tokens),
    };
    uint32_t partial = committed % block_tokens;
    if (grow > 0 && partial > 0) {
        uint32_t last = kv_table(o->kv, idx, g)[d.have - 1];
        bool shared = kv_pool_refs(o->kv, last) > 1 || kv_pool_is_indexed(o->kv, last);
        d.copy_tokens = shared ? partial : 0;
    }
    return d;
}

static kv_need *need_of(opening *o, uint32_t g) {
    uint32_t i = 0;
    while (i < o->num_needs && o->needs[i].class_idx != o->classes[g]) {
        i++;
    }
    if (i == o->num_needs) {
        o->needs[o->num_needs++] = (kv_need){.class_idx = o->classes[g]};
    }
    return &o->needs[i];
}

// check_len refuses a sequence longer than its tables or than a 32-bit signed length.
static attnd_err check_len(const opening *o, uint32_t idx, const kv_step_seq *s, bool *may_wait,
                           attnd_errinfo *info) {
    uint64_t len = (uint64_t)o->kv->seqs[idx].committed + s->new_len + s->reserve;
    uint64_t most = INT32_MAX;
    for (uint32_t g = 0; g < o->spec->num_groups; g++) {
        uint64_t room = (uint64_t)o->kv->opts.max_seq_blocks * o->spec->groups[g].block_tokens;
        most = room < most ? room : most;
    }
    if (len <= most) {
        return ATTND_OK;
    }
    *may_wait = false;
    return attnd_fail(info, ATTND_ENOSPC, "new_len",
                      "sequence %llx would have %llu tokens: at most %llu are possible",
                      (unsigned long long)s->seq, (unsigned long long)len,
                      (unsigned long long)most);
}

// hold_partial adds references to blocks of which rows are copied for a sequence, or drops them.
static void hold_partial(const opening *o, const kv_step_hit *hit, bool hold) {
    for (uint32_t g = 0; hit->partial && g < o->spec->num_groups; g++) {
        uint32_t entry = *kv_node_entry(o->kv, hit->partial - 1, g);
        (hold ? kv_seq_hold_block : kv_seq_give_block)(o->kv, o->spec->tenant, entry);
    }
}

// hold_found adds references to the blocks that sequence i takes over, or drops them.
static void hold_found(const opening *o, uint32_t i, bool hold) {
    const kv_step_hit *hit = kv_step_hit_of(o->kv, o->step, i);
    uint32_t committed = o->kv->seqs[(uint32_t)o->seqs[i].seq].committed, node = hit->node - 1;
    uint32_t have = kv_blocks_of(committed, o->spec->groups[0].block_tokens);
    for (uint32_t b = have + hit->blocks; hit->node && b-- > have;) {
        for (uint32_t g = 0; g < o->spec->num_groups; g++) {
            if (b >= kv_window_found(o->kv, &o->spec->groups[g], have, hit->blocks)) {
                uint32_t entry = *kv_node_entry(o->kv, node, g);
                (hold ? kv_seq_hold_block : kv_seq_give_block)(o->kv, o->spec->tenant, entry);
            }
        }
        node = kv_prefix_parent(o->kv, node);
    }
    hold_partial(o, hit, hold);
}

// look_up finds what the prefix cache has of sequence i's tokens, and holds it.
static void look_up(opening *o, uint32_t i, uint32_t idx) {
    kv_prefix_hit found;
    kv_step_seq *s = &o->seqs[i];
    kv_step_hit *hit = kv_step_hit_of(o->kv, o->step, i);
    uint32_t block_tokens = o->spec->groups[0].block_tokens;
    kv_chain_find(o->kv, idx, s->tokens, s->new_len, &found);
    *hit = (kv_step_hit){.blocks = found.blocks};
    memcpy(hit->first, o->kv->seqs[idx].first, sizeof(hit->first));
    s->cached = found.blocks * block_tokens + found.partial_tokens;
    if (found.blocks > 0) {
        hit->node = found.node + 1;
        kv_prefix_hold(o->kv, found.node);
    }
    if (found.partial_tokens > 0) {
        hit->partial = found.partial + 1;
        kv_prefix_hold(o->kv, found.partial);
    }
    hold_found(o, i, true);
    if (o->waits) {
        o->fetches |= kv_chain_fetch(o->kv, idx, s->tokens, s->new_len, &found);
    }
}

static void drop_partial(kv_cache *kv, kv_step_hit *hit) {
    if (hit->partial) {
        kv_prefix_rele(kv, hit->partial - 1);
    }
    hit->partial = 0;
}

void kv_step_drop_hit(kv_cache *kv, kv_step_hit *hit) {
    drop_partial(kv, hit);
    if (hit->node) {
        kv_prefix_rele(kv, hit->node - 1);
    }
    *hit = (kv_step_hit){0};
}

// claim checks sequence i, claims it for the step and adds what it needs.
static attnd_err claim(opening *o, uint32_t i, bool *may_wait, attnd_errinfo *info) {
    kv_cache *kv = o->kv;
    const kv_step_seq *s = &o->seqs[i];
    uint32_t idx;
    unsigned long long handle = s->seq;
    attnd_err err = kv_seq_find(kv, o->session_idx, s->seq, &idx, info);
    if (err) {
        return err;
    }
    if (kv->seqs[idx].model != o->model) {
        return attnd_fail(info, ATTND_EINVAL, "seq", "sequence %llx is of another model", handle);
    }
    if (kv->seq_aux[idx].step == o->step + 1) {
        return attnd_fail(info, ATTND_EINVAL, "seq", "sequence %llx is twice in the step", handle);
    }
    if (kv->seq_aux[idx].step) {
        return attnd_fail(info, ATTND_EBUSY, "seq", "sequence %llx has an open step", handle);
    }
    err = check_len(o, idx, s, may_wait, info);
    if (err == ATTND_OK && s->q_len > 0) {
        err = kv_window_check(kv, idx, (int64_t)kv->seqs[idx].committed - s->q_len, "q_len", info);
    }
    if (err == ATTND_OK && s->tokens) {
        err = kv_prefix_can(kv, o->spec, info);
    }
    if (err) {
        return err;
    }
    look_up(o, i, idx);
    for (uint32_t g = 0; g < o->spec->num_groups; g++) {
        demand d = demand_of(o, idx, g, s);
        uint32_t blocks = kv_step_hit_of(kv, o->step, i)->blocks;
        uint64_t take = d.want - d.have - blocks + (d.copy_tokens > 0);
        uint32_t found = d.have + blocks - kv_window_found(kv, &o->spec->groups[g], d.have, blocks);
        kv_need *need = need_of(o, g);
        need->take += take;
        need->found += found;
        need->held += d.have - kv->seqs[idx].first[g];
        o->take += take;
        o->found += found;
    }
    kv->seq_aux[idx].step = o->step + 1;
    return ATTND_OK;
}

static void unclaim(const opening *o, uint32_t num) {
    for (uint32_t i = 0; i < num; i++) {
        o->kv->seq_aux[(uint32_t)o->seqs[i].seq].step = 0;
        hold_found(o, i, false);
        kv_step_drop_hit(o->kv, kv_step_hit_of(o->kv, o->step, i));
    }
}

// ---- whether it fits

// mark_held marks, or unmarks, what sequence i of the step holds of a group; newly marked blocks
// and slabs count.
static void mark_held(opening *o, uint32_t i, uint32_t g, bool mark) {
    uint32_t idx = (uint32_t)o->seqs[i].seq;
    const uint32_t *table = kv_table(o->kv, idx, g);
    uint32_t have = kv_blocks_of(o->kv->seqs[idx].committed, o->spec->groups[g].block_tokens);
    kv_need *need = need_of(o, g);
    for (uint32_t b = o->kv->seqs[idx].first[g]; b < have; b++) {
        bool new_block = false, new_slab = false;
        if (mark) {
            kv_pool_mark(o->kv, table[b], &new_block, &new_slab);
        } else {
            kv_pool_unmark(o->kv, table[b]);
        }
        need->held += new_block;
        need->slabs += new_slab;
    }
}

// count_held counts the distinct blocks, and slabs, that the step's sequences hold.
static void count_held(opening *o) {
    for (uint32_t i = 0; i < o->num_needs; i++) {
        o->needs[i].held = o->needs[i].slabs = 0;
    }
    for (uint32_t i = 0; i < 2 * o->num_seqs; i++) { // marks all, then unmarks all
        for (uint32_t g = 0; g < o->spec->num_groups; g++) {
            mark_held(o, i % o->num_seqs, g, i < o->num_seqs);
        }
    }
}

static bool could_fit(const opening *o, uint32_t quota) {
    uint64_t blocks = o->take + o->found;
    for (uint32_t i = 0; i < o->num_needs; i++) {
        blocks += o->needs[i].held;
    }
    return (quota == 0 || blocks <= quota) && kv_pool_could_fit(o->kv, o->needs, o->num_needs);
}

// could_ever_fit says whether the step would fit if all other sequences were freed.  Counting the
// blocks that its own share once needs a walk over their tables; a step that would fit even if they
// shared none needs no walk.
static bool could_ever_fit(opening *o, uint32_t quota) {
    for (uint32_t i = 0; i < o->num_needs; i++) {
        uint64_t slabs = o->kv->classes[o->needs[i].class_idx].slabs;
        o->needs[i].slabs = o->needs[i].held < slabs ? o->needs[i].held : slabs;
    }
    if (could_fit(o, quota)) {
        return true;
    }
    count_held(o);
    return could_fit(o, quota);
}

static bool over_quota(const opening *o) {
    const kv_tenant_aux *has = &o->kv->tenant_aux[o->spec->tenant];
    uint32_t quota = o->kv->tenants[o->spec->tenant].quota_blocks;
    return quota > 0 && o->take > 0 && (uint64_t)has->blocks + has->cached + o->take > quota;
}

// fits_behind says whether the step has its blocks once those behind windows made way: of what was
// found for it first.
static bool fits_behind(const opening *o) {
    bool fits = false;
    for (uint32_t i = 0; !fits && i <= o->num_seqs; i++) {
        uint32_t found = i < o->num_seqs ? kv_step_hit_of(o->kv, o->step, i)->node : 0;
        fits = (found || i == o->num_seqs) &&
               kv_window_evict_for(o->kv, found ? found - 1 : KV_NONE, o->spec->tenant, o->needs,
                                   o->num_needs, o->take);
    }
    return fits;
}

// fits says whether the step has its blocks, once cached ones that nobody uses made way.
static bool fits(const opening *o) {
    return (!over_quota(o) && kv_pool_fits(o->kv, o->needs, o->num_needs)) ||
           kv_evict_for(o->kv, o->spec->tenant, o->needs, o->num_needs, o->take) || fits_behind(o);
}

// fits_whole does without rows to be copied.
static bool fits_whole(const opening *o) {
    uint32_t block_tokens = o->spec->groups[0].block_tokens;
    bool any = false;
    for (uint32_t i = 0; i < o->num_seqs; i++) {
        kv_step_hit *hit = kv_step_hit_of(o->kv, o->step, i);
        any |= hit->partial != 0;
        hold_partial(o, hit, false);
        drop_partial(o->kv, hit);
        o->seqs[i].cached = hit->blocks * block_tokens;
    }
    return any && fits(o);
}

// check_tiers is ATTND_ENOSPC while blocks are on their way that the step would wait for.
static attnd_err check_tiers(const opening *o, bool *may_wait, attnd_errinfo *info) {
    const char *what = o->fetches ? "from" : "to";
    if (!o->fetches &&
        !(o->waits && kv_evict_spill(o->kv, o->spec->tenant, o->needs, o->num_needs, o->take))) {
        return ATTND_OK;
    }
    *may_wait = true;
    return attnd_fail(info, ATTND_ENOSPC, NULL, "the step's blocks are on their way %s a tier",
                      what);
}

static attnd_err check_space(opening *o, bool *may_wait, attnd_errinfo *info) {
    kv_cache *kv = o->kv;
    uint32_t used = kv->tenant_aux[o->spec->tenant].blocks;
    uint32_t quota = kv->tenants[o->spec->tenant].quota_blocks;
    if (fits(o) || fits_whole(o)) {
        return ATTND_OK;
    }
    *may_wait = could_ever_fit(o, quota);
    if (over_quota(o)) {
        return attnd_fail(info, ATTND_ENOSPC, "tenant",
                          "the step needs %llu blocks more: %u of the tenant's %u are in use%s",
                          (unsigned long long)o->take, used, quota,
                          *may_wait ? "" : ", and it can never fit");
    }
    return attnd_fail(info, ATTND_ENOSPC, NULL, "the step needs %llu blocks more than are free%s",
                      (unsigned long long)o->take, *may_wait ? "" : ", and it can never fit");
}

// ---- taking

static uint32_t take_near(opening *o, uint32_t g, uint32_t near) {
    uint32_t entry = kv_pool_take(o->kv, o->classes[g], near);
    ATTND_ASSERT(entry != KV_NONE); // check_space counted
    o->taken++;
    return entry;
}

static void add_copy(const opening *o, uint32_t i, kv_copy copy) {
    kv_cache *kv = o->kv;
    uint32_t n = kv->step_aux[o->step].num_copies++;
    copy.model = o->model;
    kv_step_copies(kv, o->step)[n] = copy;
    kv->copy_seqs[kv_step_copies(kv, o->step) - kv->step_copies + n] = i;
}

// take_found puts the blocks that were found for sequence i into its table, and returns the last
// one, `last` when there is none.
static uint32_t take_found(const opening *o, uint32_t i, uint32_t g, uint32_t have, uint32_t last) {
    kv_cache *kv = o->kv;
    const kv_step_hit *hit = kv_step_hit_of(kv, o->step, i);
    uint32_t first = kv_window_found(kv, &o->spec->groups[g], have, hit->blocks);
    uint32_t *table = kv_table(kv, (uint32_t)o->seqs[i].seq, g), node = hit->node - 1;
    for (uint32_t b = have + hit->blocks; b-- > have;) {
        uint32_t entry = b >= first ? *kv_node_entry(kv, node, g) : KV_NONE;
        kv_store(&table[b], entry);
        node = kv_prefix_parent(kv, node);
    }
    return hit->blocks > 0 ? table[have + hit->blocks - 1] : last;
}

// copy_found lists the copy of rows that were found for sequence i into its own block.
static void copy_found(const opening *o, uint32_t i, uint32_t g, uint32_t dst) {
    const kv_step_hit *hit = kv_step_hit_of(o->kv, o->step, i);
    uint32_t src = *kv_node_entry(o->kv, hit->partial - 1, g);
    add_copy(o, i,
             (kv_copy){.group = g,
                       .src = src,
                       .dst = dst,
                       .num_tokens = o->seqs[i].cached % o->spec->groups[g].block_tokens});
}

// reserve takes the blocks of sequence i of the step: new ones go into its table at once, for a
// copy of the last one see replace.
static void reserve(opening *o, uint32_t i) {
    kv_cache *kv = o->kv;
    const kv_step_seq *s = &kv->step_seqs[(uint64_t)o->step * kv->opts.max_step_seqs + i];
    uint32_t idx = (uint32_t)s->seq;
    for (uint32_t g = 0; g < o->spec->num_groups; g++) {
        uint32_t *table = kv_table(kv, idx, g);
        demand d = demand_of(o, idx, g, s);
        uint32_t last = d.have > 0 ? table[d.have - 1] : KV_NONE;
        if (d.copy_tokens > 0) {
            kv_copy copy = {.group = g, .src = last, .num_tokens = d.copy_tokens};
            copy.dst = last = take_near(o, g, last);
            add_copy(o, i, copy);
        }
        uint32_t own =
            d.have + kv_step_hit_of(kv, o->step, i)->blocks; // first one that is not found
        last = take_found(o, i, g, d.have, last);
        for (uint32_t b = own; b < d.want; b++) {
            last = take_near(o, g, last);
            kv_store(&table[b], last);
        }
        if (kv_step_is_found(kv, o->step, i)) {
            copy_found(o, i, g, table[own]);
        }
    }
}

// count_found counts, and tells the policy, what was found for sequence i.
static void count_found(const opening *o, uint32_t i) {
    const kv_step_hit *hit = kv_step_hit_of(o->kv, o->step, i);
    o->kv->looked_up_tokens += o->seqs[i].tokens ? o->seqs[i].new_len : 0;
    o->kv->found_tokens += o->seqs[i].cached;
    if (hit->node) {
        kv_prefix_hit_path(o->kv, hit->node - 1, hit->blocks);
        kv_prefix_raise(o->kv, hit->node - 1, (uint32_t)o->seqs[i].seq);
    }
    if (hit->partial) {
        kv_prefix_hit_path(o->kv, hit->partial - 1, 1);
    }
}

// publish makes the step live together with its reply and the old entries of copied blocks: the
// committing store of kv_step_open.
static uint64_t publish(const opening *o, kv_request rq) {
    kv_cache *kv = o->kv;
    kv_led_step *step = &kv->steps[o->step];
    kv_redo_begin(kv);
    uint32_t generation = kv_next_generation(kv, KV_KIND_STEP, step->generation);
    uint64_t handle = kv_handle(generation, o->step);
    kv_redo_put(kv, &step->state, KV_LIVE);
    kv_redo_put(kv, &step->generation, generation);
    for (uint32_t n = 0; n < kv->step_aux[o->step].num_copies; n++) {
        const kv_copy *copy = &kv_step_copies(kv, o->step)[n];
        uint32_t i, idx = kv_step_copied(kv, o->step, n, &i);
        if (!kv_step_is_found(kv, o->step, i)) {
            kv_redo_put(kv, &kv->seqs[idx].old_last[copy->group], copy->src);
        }
    }
    uint32_t *values = kv_reply_put(kv, rq, KV_OP_STEP, handle, 2 * o->num_seqs);
    for (uint32_t i = 0; values && i < o->num_seqs; i++) {
        kv_redo_put(kv, values++, o->seqs[i].committed);
        kv_redo_put(kv, values++, o->seqs[i].cached);
    }
    kv_redo_commit(kv);
    return handle;
}

// replace puts the copies into the tables.
static void replace(const opening *o) {
    for (uint32_t n = 0; n < o->kv->step_aux[o->step].num_copies; n++) {
        const kv_copy *copy = &kv_step_copies(o->kv, o->step)[n];
        uint32_t i, idx = kv_step_copied(o->kv, o->step, n, &i);
        if (!kv_step_is_found(o->kv, o->step, i)) {
            kv_step_set_last(o->kv, idx, copy->group, copy->dst);
        }
    }
}

// check_open checks the call itself and fills in the opening.
static attnd_err check_open(opening *o, kv_request rq, attnd_errinfo *info) {
    kv_cache *kv = o->kv;
    attnd_err err = kv_request_check(kv, rq, false, &o->session_idx, info);
    if (err == ATTND_OK) {
        err = kv_model_find(kv, kv->sessions[o->session_idx].tenant, o->model, info);
    }
    if (err) {
        return err;
    }
    if (o->num_seqs == 0) {
        return attnd_fail(info, ATTND_EINVAL, "num_seqs", "a step has at least one sequence");
    }
    if (o->num_seqs > kv->opts.max_step_seqs) {
        return attnd_fail(info, ATTND_EMSGSIZE, "num_seqs", "%u sequences: a step has at most %u",
                          o->num_seqs, kv->opts.max_step_seqs);
    }
    o->step = kv_slots_peek(&kv->lists->steps);
    if (o->step == KV_NONE) {
        return attnd_fail(info, ATTND_EBUSY, NULL, "%u steps are open: no more are possible",
                          kv->opts.max_steps);
    }
    o->spec = &kv->models[o->model].spec;
    o->classes = kv->model_aux[o->model].classes;
    return ATTND_OK;
}

// NOLINTNEXTLINE(readability-function-size): parameters
attnd_err kv_step_open(kv_cache *kv, kv_request rq, uint32_t model, kv_step_seq *seqs,
                       uint32_t num_seqs, uint64_t *step, const kv_copy **copies,
                       uint32_t *num_copies, bool *may_wait, attnd_errinfo *info) {
    opening o = {.kv = kv, .model = model, .seqs = seqs, .num_seqs = num_seqs};
    o.waits = kv->spiller && *may_wait;
    attnd_err err = check_open(&o, rq, info);
    if (err) {
        return err;
    }
    uint32_t claimed = 0;
    while (err == ATTND_OK && claimed < num_seqs) {
        err = claim(&o, claimed, may_wait, info);
        claimed += err == ATTND_OK;
    }
    if (err == ATTND_OK) {
        err = check_tiers(&o, may_wait, info);
    }
    if (err == ATTND_OK) {
        err = check_space(&o, may_wait, info);
    }
    if (err) {
        unclaim(&o, claimed);
        return err;
    }
    kv_slots_take(&kv->lists->steps, kv->step_next);
    kv->step_aux[o.step] =
        (kv_step_aux){.session = rq.session, .model = model, .num_seqs = num_seqs};
    kv_step_seq *own = kv->step_seqs + (uint64_t)o.step * kv->opts.max_step_seqs;
    for (uint32_t i = 0; i < num_seqs; i++) {
        seqs[i].committed = kv->seqs[(uint32_t)seqs[i].seq].committed;
        own[i] = seqs[i];
        own[i].tokens = NULL;
        reserve(&o, i);
        count_found(&o, i);
    }
    kv->tenant_aux[o.spec->tenant].blocks += o.taken;
    kv->session_aux[o.session_idx].steps++;
    *step = publish(&o, rq);
    replace(&o);
    *copies = kv_step_copies(kv, o.step);
    *num_copies = kv->step_aux[o.step].num_copies;
    return ATTND_OK;
}

// ---- looking

// find_step returns the index of a live step, KV_NONE for a handle that is gone.
static uint32_t find_step(const kv_cache *kv, uint64_t step) {
    uint32_t idx = (uint32_t)step;
    if (idx >= kv->lists->steps.used || kv->steps[idx].state != KV_LIVE ||
        kv->steps[idx].generation != step >> 32) {
        return KV_NONE;
    }
    return idx;
}

const kv_step_seq *kv_step_get(const kv_cache *kv, uint64_t session, uint64_t step,
                               uint32_t *num_seqs, uint32_t *model) {
    uint32_t idx = find_step(kv, step);
    if (idx == KV_NONE || (session != 0 && kv->step_aux[idx].session != session)) {
        return NULL;
    }
    *num_seqs = kv->step_aux[idx].num_seqs;
    *model = kv->step_aux[idx].model;
    return kv->step_seqs + (uint64_t)idx * kv->opts.max_step_seqs;
}

const uint32_t *kv_step_table(const kv_cache *kv, uint64_t step, uint32_t i, uint32_t group,
                              uint32_t *num_entries) {
    uint32_t num_seqs, model;
    const kv_step_seq *seqs = kv_step_get(kv, 0, step, &num_seqs, &model);
    if (!seqs || i >= num_seqs || group >= kv->models[model].spec.num_groups) {
        return NULL;
    }
    *num_entries = kv_blocks_of(seqs[i].committed + seqs[i].new_len + seqs[i].reserve,
                                kv->models[model].spec.groups[group].block_tokens);
    return kv_table(kv, (uint32_t)seqs[i].seq, group);
}
