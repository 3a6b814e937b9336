// Repair: units with a wrong checksum, one record each.
//
// A record clears every element that reaches into the unit and gives the unit the checksum of what
// it then holds.  So a process that is killed in between leaves units that are good and units that
// are still bad, and the next one goes on.  What refers to a cleared element (a sequence of a model
// that is gone) is the business of kv_recover.c.
//
// Memory that was never touched is skipped by asking the file where its data is: reading it would
// make pages of zeros.
#include "kvcache/kv_repair.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvcache/kv_redo.h"

enum { PAGE_BYTES = 4096 };

// next_data finds the first range of pages with data at or behind *from; false when there is none
// before end.
static bool next_data(const kv_cache *kv, uint64_t *from, uint64_t *to, uint64_t end) {
    off_t data = lseek(kv->fd, (off_t)*from, SEEK_DATA);
    if (data < 0 || (uint64_t)data >= end) {
        return false;
    }
    off_t hole = lseek(kv->fd, data, SEEK_HOLE);
    *from = (uint64_t)data;
    *to = hole > 0 && (uint64_t)hole < end ? (uint64_t)hole : end;
    return true;
}

static uint64_t offset_of(const kv_cache *kv, const void *p) {
    return (uint64_t)((const char *)p - (const char *)kv->base);
}

uint32_t kv_used(const kv_cache *kv, const void *array, uint64_t num, uint64_t size) {
    uint64_t first = offset_of(kv, array), from = first, to, used = 0;
    while (next_data(kv, &from, &to, first + num * size)) {
        used = (to - first + size - 1) / size;
        from = to;
    }
    return (uint32_t)(used < num ? used : num);
}

// ---- clearing

// put_zeros puts zeros over all of an element but one word, which may be none of it.
static void put_zeros(kv_cache *kv, void *element, size_t bytes, const uint32_t *but) {
    kv_word *word = element;
    for (size_t i = 0; i < bytes / sizeof(*word); i++) {
        if (&word[i] != but) {
            kv_redo_put(kv, &word[i], 0);
        }
    }
}

void kv_drop_session(kv_cache *kv, uint32_t idx) {
    kv_redo_put(kv, &kv->sessions[idx].state, KV_FREE);
}

typedef struct repair {
    kv_cache *kv;
    kv_recovered *found;
    uint32_t dropped; // session that the open record drops, KV_NONE = none
} repair;

static void clear_tenant(repair *r, uint32_t i) {
    kv_led_tenant *t = &r->kv->tenants[i];
    r->found->lost_tenants += t->name[0] != 0;
    put_zeros(r->kv, t, sizeof(*t), NULL);
}

static void clear_model(repair *r, uint32_t i) {
    kv_led_model *m = &r->kv->models[i];
    r->found->lost_models += m->state != KV_FREE;
    put_zeros(r->kv, m, sizeof(*m), NULL);
}

static void clear_slab(repair *r, uint32_t i) {
    kv_redo_put(r->kv, &r->kv->slabs[i].units, 0);
}

static void clear_session(repair *r, uint32_t i) {
    kv_led_session *s = &r->kv->sessions[i];
    r->found->lost_sessions += s->state != KV_FREE;
    put_zeros(r->kv, s, sizeof(*s), &s->generation);
    kv_redo_put(r->kv, &s->generation, r->kv->head->tops[KV_KIND_SESSION]);
}

// drop drops a session of which a reply is damaged.
static void drop(repair *r, uint32_t idx) {
    if (r->kv->sessions[idx].state != KV_FREE && r->dropped != idx) {
        r->dropped = idx;
        r->found->lost_sessions++;
        kv_drop_session(r->kv, idx);
    }
}

static void clear_reply(repair *r, uint32_t i) {
    put_zeros(r->kv, &r->kv->replies[i], sizeof(r->kv->replies[i]), NULL);
    drop(r, i / KV_REPLIES);
}

static void clear_values(repair *r, uint32_t i) {
    drop(r, i / KV_REPLIES);
}

static void clear_step(repair *r, uint32_t i) {
    kv_led_step *s = &r->kv->steps[i];
    r->found->aborted_steps += s->state != KV_FREE;
    kv_redo_put(r->kv, &s->state, KV_FREE);
    kv_redo_put(r->kv, &s->generation, r->kv->head->tops[KV_KIND_STEP]);
}

static void clear_seq(repair *r, uint32_t i) {
    kv_led_seq *s = &r->kv->seqs[i];
    r->found->lost_seqs += s->state != KV_FREE;
    put_zeros(r->kv, s, sizeof(*s), &s->generation);
    kv_redo_put(r->kv, &s->generation, r->kv->head->tops[KV_KIND_SEQ]);
}

static void clear_node(repair *r, uint32_t i) {
    kv_led_node *n = &r->kv->nodes[i];
    r->found->lost_prefix_blocks += n->owner != 0;
    put_zeros(r->kv, n, sizeof(*n), NULL);
}

// clear_entry: a node lacks the block then, and is dropped unless it may.
static void clear_entry(repair *r, uint32_t i) {
    kv_redo_put(r->kv, &r->kv->node_more[i], KV_NONE);
}

// clear_spill: the node lacks its blocks then, and is dropped.
static void clear_spill(repair *r, uint32_t i) {
    put_zeros(r->kv, &r->kv->spills[i], sizeof(*r->kv->spills), NULL);
}

// clear_unit clears the elements that reach into a unit.
static void clear_unit(repair *r, uint32_t unit) {
    const kv_cache *kv = r->kv;
    const kv_opts *o = &kv->opts;
    uint64_t replies = (uint64_t)o->max_sessions * KV_REPLIES;
    const struct {
        const void *array;
        uint64_t num, size;
        void (*clear)(repair *r, uint32_t i);
    } kinds[] = {
        {kv->tenants, o->max_tenants, sizeof(*kv->tenants), clear_tenant},
        {kv->models, o->max_models, sizeof(*kv->models), clear_model},
        {kv->slabs, kv->num_slabs, sizeof(*kv->slabs), clear_slab},
        {kv->sessions, o->max_sessions, sizeof(*kv->sessions), clear_session},
        {kv->replies, replies, sizeof(*kv->replies), clear_reply},
        {kv->values, replies, UINT64_C(8) * o->max_step_seqs, clear_values},
        {kv->steps, o->max_steps, sizeof(*kv->steps), clear_step},
        {kv->seqs, o->max_seqs, sizeof(*kv->seqs), clear_seq},
        {kv->nodes, o->prefix_blocks, sizeof(*kv->nodes), clear_node},
        {kv->node_more, (uint64_t)o->prefix_blocks * (KV_MAX_GROUPS - 1), sizeof(*kv->node_more),
         clear_entry},
        {kv->spills, o->prefix_blocks, sizeof(*kv->spills), clear_spill},
    };
    uint64_t from = (uint64_t)unit * KV_SUM_BYTES, to = from + KV_SUM_BYTES;
    for (size_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++) {
        uint64_t first = offset_of(kv, kinds[k].array);
        uint64_t end = first + kinds[k].num * kinds[k].size;
        if (to > first && from < end) {
            uint64_t i = from > first ? (from - first) / kinds[k].size : 0;
            for (; i < kinds[k].num && first + i * kinds[k].size < to; i++) {
                kinds[k].clear(r, (uint32_t)i);
            }
        }
    }
}

// ---- looking

typedef struct bad_units {
    uint32_t *units; // NULL = they are only counted
    uint64_t num;
} bad_units;

static void check_unit(const kv_cache *kv, uint64_t unit, bad_units *bad) {
    if (!kv_redo_unit_good(kv, (uint32_t)unit)) {
        if (bad->units) {
            bad->units[bad->num] = (uint32_t)unit;
        }
        bad->num++;
    }
}

// touch_summed makes the pages of units that have a checksum data, if a damaged one says that there
// is something where nothing was ever written.
static void touch_summed(const kv_cache *kv) {
    uint64_t sums = offset_of(kv, kv->sums), from = sums, to;
    while (next_data(kv, &from, &to, sums + kv->num_units * sizeof(*kv->sums))) {
        uint64_t end = (to - sums) / sizeof(*kv->sums);
        for (uint64_t unit = (from - sums) / sizeof(*kv->sums); unit < end; unit++) {
            if (kv->sums[unit]) {
                __atomic_load_n(&kv->base[unit * KV_SUM_WORDS], __ATOMIC_RELAXED);
            }
        }
        from = to;
    }
}

static void find(const kv_cache *kv, bad_units *bad) {
    uint64_t from = offset_of(kv, kv->tenants), end = offset_of(kv, kv->sums), to;
    while (next_data(kv, &from, &to, end)) {
        for (uint64_t unit = from / KV_SUM_BYTES; unit < to / KV_SUM_BYTES; unit++) {
            check_unit(kv, unit, bad);
        }
        from = to;
    }
}

static void repair_units(kv_cache *kv, kv_recovered *found, const bad_units *bad) {
    found->bad_units += bad->num;
    for (uint64_t i = 0; i < bad->num; i++) {
        repair r = {.kv = kv, .found = found, .dropped = KV_NONE};
        kv_redo_begin(kv);
        kv_redo_accept(kv, bad->units[i]);
        clear_unit(&r, bad->units[i]);
        kv_redo_commit(kv);
    }
}

// repair_heads makes both heads the one that is whole, and their units good.
static void repair_heads(kv_cache *kv, kv_recovered *found) {
    bool first_whole = kv_head_check(kv->head) == kv->head->check;
    const kv_led_head head = first_whole ? *kv->head : *kv->head_copy;
    uint32_t units[] = {(uint32_t)(offset_of(kv, kv->head) / KV_SUM_BYTES),
                        (uint32_t)(offset_of(kv, kv->head_copy) / KV_SUM_BYTES)};
    bool good[] = {kv_redo_unit_good(kv, units[0]), kv_redo_unit_good(kv, units[1])};
    if (good[0] && good[1]) {
        return;
    }
    kv_redo_begin(kv);
    for (int i = 0; i < 2; i++) {
        if (!good[i]) {
            found->bad_units++;
            kv_redo_accept(kv, units[i]);
        }
    }
    kv_head_put(kv, head);
    kv_redo_commit(kv);
}

attnd_err kv_repair(kv_cache *kv, kv_recovered *found, attnd_errinfo *info) {
    bad_units bad = {0};
    touch_summed(kv);
    find(kv, &bad);
    bad.units = malloc((bad.num + 1) * sizeof(*bad.units));
    if (!bad.units) {
        return attnd_fail(info, ATTND_ENOMEM, NULL, "no memory to repair a ledger");
    }
    bad.num = 0;
    find(kv, &bad);
    repair_heads(kv, found);
    repair_units(kv, found, &bad);
    free(bad.units);
    return ATTND_OK;
}
