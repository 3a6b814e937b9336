// kv_step: what opening (kv_step.c) and ending (kv_step_end.c) of steps share; the public part is
// in kv_cache.h.  A step is known by its index, a sequence of it by its place i in the step, a copy
// by its place n; copies are in the order of sequences and groups.  Loop thread only.
#ifndef ATTND_KVCACHE_KV_STEP_H
#define ATTND_KVCACHE_KV_STEP_H

#include "kvcache/kv_ledger.h"

// kv_step_copies returns the copies of a step.
static inline kv_copy *kv_step_copies(const kv_cache *kv, uint32_t step) {
    return kv->step_copies + (uint64_t)step * kv->opts.max_step_seqs * KV_MAX_GROUPS;
}

// kv_step_copied returns the index of the sequence that copy n of a step is for, *i in the step.
static inline uint32_t kv_step_copied(const kv_cache *kv, uint32_t step, uint32_t n, uint32_t *i) {
    *i = kv->copy_seqs[(uint64_t)step * kv->opts.max_step_seqs * KV_MAX_GROUPS + n];
    return (uint32_t)kv->step_seqs[(uint64_t)step * kv->opts.max_step_seqs + *i].seq;
}

// kv_step_hit_of returns what the prefix cache had for sequence i of a step.
static inline kv_step_hit *kv_step_hit_of(const kv_cache *kv, uint32_t step, uint32_t i) {
    return &kv->step_hits[(uint64_t)step * kv->opts.max_step_seqs + i];
}

// kv_step_is_found says whether copies of a step's sequence i are of cached rows, not of committed
// ones: a sequence never has both.
static inline bool kv_step_is_found(const kv_cache *kv, uint32_t step, uint32_t i) {
    return kv_step_hit_of(kv, step, i)->partial != 0;
}

// kv_step_place returns where a sequence stands among those of all open steps (kv.step_seqs,
// kv.step_hits), KV_NONE when it has no step.
static inline uint64_t kv_step_place(const kv_cache *kv, uint32_t idx) {
    uint32_t step = kv->seq_aux[idx].step;
    uint64_t at = (uint64_t)(step - 1) * kv->opts.max_step_seqs;
    while (step && (uint32_t)kv->step_seqs[at].seq != idx) {
        at++;
    }
    return step ? at : KV_NONE;
}

// kv_step_set_last stores the entry of a sequence's last committed block.
static inline void kv_step_set_last(const kv_cache *kv, uint32_t idx, uint32_t g, uint32_t entry) {
    const kv_led_seq *s = &kv->seqs[idx];
    uint32_t last = s->committed / kv->models[s->model].spec.groups[g].block_tokens;
    kv_store(&kv_table(kv, idx, g)[last], entry);
}

// kv_step_drop_hit forgets what was found, and lets its nodes go.
void kv_step_drop_hit(kv_cache *kv, kv_step_hit *hit);

#endif
