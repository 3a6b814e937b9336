// Accounting.  The fast check compares counters that are kept apart on purpose: the free and the
// used blocks of a class are counted each for itself, and so are the blocks of tenants.  The full
// check believes only tables and recounts all of them.
#include <stdlib.h>
#include <string.h>

#include "kvcache/kv_ledger.h"
#include "kvcache/kv_name.h"
#include "kvcache/kv_pool.h"
#include "kvcache/kv_sum.h"

void kv_get_info(const kv_cache *kv, kv_info *out) {
    const kv_led_lists *lists = kv->lists;
    *out = (kv_info){
        .arena_bytes = kv->arena->bytes,
        .slab_bytes = kv->opts.slab_bytes,
        .slabs = kv->num_slabs,
        .unassigned_slabs = kv->num_slabs - lists->slabs.live,
        .num_classes = lists->classes.live,
        .seqs = lists->seqs.live,
        .models = lists->models.live,
        .sessions = lists->sessions.live,
        .steps = lists->steps.live,
        .mismatches = kv->mismatches,
    };
    kv_class_info class;
    for (uint32_t i = 0; kv_class_get(kv, i, &class) == ATTND_OK; i++) {
        out->total += class.total;
        out->free += class.free;
        out->cached += class.cached;
        out->in_use += class.in_use;
        out->in_use_bytes += class.in_use * class.block_bytes;
    }
}

attnd_err kv_class_get(const kv_cache *kv, uint32_t i, kv_class_info *out) {
    for (uint32_t c = 0; c < kv->lists->classes.used; c++) {
        const kv_class *class = &kv->classes[c];
        if (class->users > 0 && i-- == 0) {
            *out = (kv_class_info){
                .block_bytes = (uint64_t) class->units * KV_BLOCK_UNIT,
                .slabs = class->slabs,
                .total = class->slabs * class->slab_blocks,
                .free = class->free,
                .in_use = class->in_use,
            };
            return ATTND_OK;
        }
    }
    return ATTND_ENOENT;
}

bool kv_check_fast(kv_cache *kv) {
    uint64_t slabs = 0, in_use = 0, of_tenants = 0;
    bool good = true;
    for (uint32_t c = 0; c < kv->lists->classes.used; c++) {
        const kv_class *class = &kv->classes[c];
        if (class->users > 0) {
            good = good && (uint64_t) class->free + class->in_use ==
                               (uint64_t) class->slabs * class->slab_blocks;
            slabs += class->slabs;
            in_use += class->in_use;
        }
    }
    for (uint32_t t = 0; t < kv->lists->tenants.used; t++) {
        of_tenants += kv->tenant_aux[t].blocks;
    }
    good = good && slabs == kv->lists->slabs.live && in_use == of_tenants;
    kv->mismatches += !good;
    return good;
}

// ---- the full check

typedef struct recount {
    const kv_cache *kv;
    uint32_t *refs;    // [num_slabs, slab_blocks], as the tables say
    uint32_t *tenants; // [max_tenants], blocks
    attnd_errinfo *info;
} recount;

#define WRONG(r, ...) (attnd_fail((r)->info, ATTND_EINVAL, "accounting", __VA_ARGS__), false)

// count_entry counts a reference of the sequence to a block, which must be one of the class.
static bool count_entry(recount *r, uint32_t idx, uint32_t class_idx, uint32_t entry) {
    const kv_cache *kv = r->kv;
    uint32_t slab = entry / kv->slab_units;
    const kv_slab_aux *aux = slab < kv->num_slabs ? &kv->slab_aux[slab] : NULL;
    if (!aux || aux->units == 0 || aux->class_idx != class_idx ||
        entry % kv->slab_units % aux->units != 0 ||
        entry % kv->slab_units / aux->units >= aux->slab_blocks) {
        return WRONG(r, "entry %u of sequence %u is no block of its class", entry, idx);
    }
    if (r->refs[kv_pool_index(kv, entry)]++ == 0) {
        r->tenants[kv->seqs[idx].tenant]++;
    }
    return true;
}

// step_tokens returns how many tokens an open step has reserved for the sequence.
static uint32_t step_tokens(const kv_cache *kv, uint32_t idx) {
    uint32_t step = kv->seq_aux[idx].step, i = 0;
    if (!step) {
        return 0;
    }
    const kv_step_seq *seqs = kv->step_seqs + (uint64_t)(step - 1) * kv->opts.max_step_seqs;
    while ((uint32_t)seqs[i].seq != idx) {
        i++;
    }
    return seqs[i].new_len + seqs[i].reserve;
}

static bool count_seq(recount *r, uint32_t idx) {
    const kv_cache *kv = r->kv;
    const kv_led_seq *s = &kv->seqs[idx];
    const kv_led_model *model = &kv->models[s->model];
    if (model->state != KV_LIVE || model->spec.tenant != s->tenant) {
        return WRONG(r, "sequence %u has no model", idx);
    }
    uint32_t len = s->committed + step_tokens(kv, idx);
    for (uint32_t g = 0; g < model->spec.num_groups; g++) {
        uint32_t have = kv_blocks_of(s->committed, model->spec.groups[g].block_tokens);
        uint64_t sum = kv_sum_entries(kv_table(kv, idx, g), 0, have);
        if (s->old_last[g] != KV_NONE) {
            sum += kv_sum_entry(have - 1, s->old_last[g]) -
                   kv_sum_entry(have - 1, kv_table(kv, idx, g)[have - 1]);
        }
        if (sum != s->table_sums[g]) {
            return WRONG(r, "a table of sequence %u has a wrong checksum", idx);
        }
        uint32_t class_idx = kv->model_aux[s->model].classes[g];
        uint32_t num = kv_blocks_of(len, model->spec.groups[g].block_tokens);
        const uint32_t *table = kv_table(kv, idx, g);
        for (uint32_t b = 0; b < num; b++) {
            if (!count_entry(r, idx, class_idx, table[b])) {
                return false;
            }
        }
        if (s->old_last[g] != KV_NONE) {
            if (!kv->seq_aux[idx].step) {
                return WRONG(r, "sequence %u has a copied block but no step", idx);
            }
            if (!count_entry(r, idx, class_idx, s->old_last[g])) {
                return false;
            }
        }
    }
    return true;
}

// check_slab compares references and free bits of a slab with the recount.
static bool check_slab(recount *r, uint32_t slab, uint32_t *in_use) {
    const kv_cache *kv = r->kv;
    const kv_slab_aux *aux = &kv->slab_aux[slab];
    const kv_bits *bits = kv->bits + (uint64_t)slab * kv->free_words;
    const uint64_t *sum = kv->free_sum + (uint64_t)slab * kv->free_sums;
    uint64_t first = (uint64_t)slab * kv->slab_blocks;
    uint32_t used = 0;
    if (aux->units != kv->slabs[slab].units) {
        return WRONG(r, "slab %u is cut in two ways", slab);
    }
    for (uint32_t b = 0; b < aux->slab_blocks; b++) {
        uint32_t refs = r->refs[first + b];
        uint32_t entry = slab * kv->slab_units + b * aux->units;
        bool is_free = bits[b / 64].free >> b % 64 & 1;
        if (kv_pool_refs(kv, entry) != refs || is_free != (refs == 0)) {
            return WRONG(r, "block %u of slab %u has %u references, not %u%s", b, slab, refs,
                         kv_pool_refs(kv, entry), is_free ? ", and is free" : "");
        }
        used += refs > 0;
    }
    for (uint32_t w = 0; aux->units && w < kv->free_words; w++) {
        if ((sum[w / 64] >> w % 64 & 1) != (bits[w].free != 0)) {
            return WRONG(r, "word %u of the free bits of slab %u is not summed up", w, slab);
        }
    }
    if (aux->slab_blocks - used != aux->free || (aux->units && used == 0)) {
        return WRONG(r, "slab %u has %u blocks in use of %u, and %u free", slab, used,
                     aux->slab_blocks, aux->free);
    }
    *in_use += used;
    return true;
}

static bool check_class(recount *r, uint32_t class_idx) {
    const kv_cache *kv = r->kv;
    const kv_class *class = &kv->classes[class_idx];
    uint32_t slabs = 0, in_use = 0, linked = 0, with_free = 0;
    for (uint32_t s = 0; s < kv->num_slabs; s++) {
        const kv_slab_aux *aux = &kv->slab_aux[s];
        if (aux->units && aux->class_idx == class_idx) {
            slabs++;
            with_free += aux->free > 0;
            if (!check_slab(r, s, &in_use)) {
                return false;
            }
        }
    }
    for (uint32_t s = class->first_slab; s && linked <= slabs; s = kv->slab_aux[s - 1].next) {
        linked++;
    }
    if (slabs != class->slabs || in_use != class->in_use || linked != with_free ||
        (uint64_t) class->free + in_use != (uint64_t)slabs * class->slab_blocks) {
        return WRONG(r, "class of %u units: %u slabs (%u linked) with %u blocks in use, not %u, %u",
                     class->units, slabs, linked, in_use, class->slabs, class->in_use);
    }
    return true;
}

static bool check_seqs(recount *r) {
    const kv_cache *kv = r->kv;
    uint32_t live = 0;
    for (uint32_t i = 0; i < kv->lists->seqs.used; i++) {
        if (kv->seqs[i].state == KV_LIVE) {
            live++;
            if (!count_seq(r, i)) {
                return false;
            }
        }
    }
    if (live != kv->lists->seqs.live) {
        return WRONG(r, "%u sequences live, not %u", live, kv->lists->seqs.live);
    }
    return true;
}

static bool check_totals(recount *r) {
    const kv_cache *kv = r->kv;
    uint32_t assigned = 0;
    for (uint32_t s = 0; s < kv->num_slabs; s++) {
        assigned += kv->slab_aux[s].units != 0;
    }
    if (assigned != kv->lists->slabs.live) {
        return WRONG(r, "%u slabs are assigned, not %u", assigned, kv->lists->slabs.live);
    }
    for (uint32_t c = 0; c < kv->lists->classes.used; c++) {
        if (kv->classes[c].users > 0 && !check_class(r, c)) {
            return false;
        }
    }
    for (uint32_t t = 0; t < kv->lists->tenants.used; t++) {
        if (r->tenants[t] != kv->tenant_aux[t].blocks) {
            return WRONG(r, "tenant %u uses %u blocks, not %u", t, r->tenants[t],
                         kv->tenant_aux[t].blocks);
        }
    }
    return true;
}

bool kv_check_full(const kv_cache *kv, attnd_errinfo *info) {
    recount r = {.kv = kv, .info = info};
    r.refs = calloc((size_t)kv->num_slabs * kv->slab_blocks, sizeof(*r.refs));
    r.tenants = calloc(kv->opts.max_tenants, sizeof(*r.tenants));
    bool good = r.refs && r.tenants ? check_seqs(&r) && check_totals(&r)
                                    : WRONG(&r, "no memory for a recount");
    free(r.refs);
    free(r.tenants);
    return good;
}
