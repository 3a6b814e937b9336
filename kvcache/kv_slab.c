// Size classes and their slabs.
//
// A class links its slabs that have a free block; a block is taken from the first of them.  A slab
// that becomes empty is unassigned at once, so whether a set of blocks fits is plain arithmetic:
// free blocks of each class, and whole slabs for the rest.  Cutting a slab costs a bit a block.
#include "kvcache/kv_slab.h"

#include <string.h>

#include "kvcache/kv_redo.h"

uint32_t kv_class_hold(kv_cache *kv, uint32_t units) {
    for (uint32_t i = 0; i < kv->lists->classes.used; i++) {
        if (kv->classes[i].users > 0 && kv->classes[i].units == units) {
            kv->classes[i].users++;
            return i;
        }
    }
    uint32_t i = kv_slots_take(&kv->lists->classes, kv->class_next);
    ATTND_ASSERT(i != KV_NONE);
    uint32_t slab_blocks = kv->slab_units / units;
    kv->classes[i] = (kv_class){
        .units = units,
        .slab_blocks = slab_blocks < kv->slab_blocks ? slab_blocks : kv->slab_blocks,
        .users = 1,
    };
    return i;
}

void kv_class_rele(kv_cache *kv, uint32_t class_idx) {
    kv_class *class = &kv->classes[class_idx];
    if (--class->users == 0) {
        ATTND_ASSERT(class->slabs == 0);
        kv_slots_give(&kv->lists->classes, kv->class_next, class_idx);
    }
}

static void link_slab(kv_cache *kv, uint32_t slab) {
    kv_slab_aux *aux = &kv->slab_aux[slab];
    kv_class *class = &kv->classes[aux->class_idx];
    aux->prev = 0;
    aux->next = class->first_slab;
    if (aux->next) {
        kv->slab_aux[aux->next - 1].prev = slab + 1;
    }
    class->first_slab = slab + 1;
}

static void unlink_slab(kv_cache *kv, uint32_t slab) {
    kv_slab_aux *aux = &kv->slab_aux[slab];
    if (aux->prev) {
        kv->slab_aux[aux->prev - 1].next = aux->next;
    } else {
        kv->classes[aux->class_idx].first_slab = aux->next;
    }
    if (aux->next) {
        kv->slab_aux[aux->next - 1].prev = aux->prev;
    }
}

// set_bits sets the first num bits and clears the rest of words.
static void set_bits(uint64_t *bits, uint32_t words, uint32_t num) {
    memset(bits, 0, words * sizeof(*bits));
    memset(bits, 0xff, num / 64 * sizeof(*bits));
    if (num % 64) {
        bits[num / 64] = (UINT64_C(1) << num % 64) - 1;
    }
}

// Committed by the record that names the block size of the slab.
bool kv_slab_assign(kv_cache *kv, uint32_t class_idx) {
    uint32_t slab = kv_slots_take(&kv->lists->slabs, kv->slab_next);
    if (slab == KV_NONE) {
        return false;
    }
    kv_class *class = &kv->classes[class_idx];
    kv_redo_begin(kv);
    kv_redo_put(kv, &kv->slabs[slab].units, class->units);
    kv_redo_commit(kv);
    kv->slab_aux[slab] = (kv_slab_aux){
        .units = class->units,
        .slab_blocks = class->slab_blocks,
        .class_idx = class_idx,
        .free = class->slab_blocks,
    };
    set_bits(kv->free_bits + (uint64_t)slab * kv->free_words, kv->free_words, class->slab_blocks);
    set_bits(kv->free_sum + (uint64_t)slab * kv->free_sums, kv->free_sums,
             (class->slab_blocks + 63) / 64);
    class->slabs++;
    class->free += class->slab_blocks;
    link_slab(kv, slab);
    return true;
}

// Committed by the record that says the slab has no block size.
static void unassign(kv_cache *kv, uint32_t slab) {
    kv_slab_aux *aux = &kv->slab_aux[slab];
    kv_class *class = &kv->classes[aux->class_idx];
    unlink_slab(kv, slab);
    class->slabs--;
    class->free -= aux->slab_blocks;
    kv_redo_begin(kv);
    kv_redo_put(kv, &kv->slabs[slab].units, 0);
    kv_redo_commit(kv);
    *aux = (kv_slab_aux){0};
    kv_slots_give(&kv->lists->slabs, kv->slab_next, slab);
}

void kv_slab_took(kv_cache *kv, uint32_t slab) {
    kv_slab_aux *aux = &kv->slab_aux[slab];
    kv_class *class = &kv->classes[aux->class_idx];
    class->free--;
    class->in_use++;
    if (--aux->free == 0) {
        unlink_slab(kv, slab);
    }
}

void kv_slab_gave(kv_cache *kv, uint32_t slab) {
    kv_slab_aux *aux = &kv->slab_aux[slab];
    kv_class *class = &kv->classes[aux->class_idx];
    class->free++;
    class->in_use--;
    aux->free++;
    if (aux->free == 1) {
        link_slab(kv, slab);
    }
    if (aux->free == aux->slab_blocks) {
        unassign(kv, slab);
    }
}
