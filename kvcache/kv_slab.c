// Size classes and their slabs.
//
// A class links its slabs that have a free block; a block is taken from the first of them.  A slab
// that was full joins at the end, so the first is used up before another and blocks taken one after
// the other are neighbours; joining at the front, single holes would be filled first.  A slab that
// becomes empty is unassigned at once, so whether a set of blocks fits is plain arithmetic:
// free blocks of each class, and whole slabs for the rest.  Cutting a slab costs some bits a block.
#include "kvcache/kv_slab.h"

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
    aux->prev = class->last_slab;
    aux->next = 0;
    if (aux->prev) {
        kv->slab_aux[aux->prev - 1].next = slab + 1;
    } else {
        class->first_slab = slab + 1;
    }
    class->last_slab = slab + 1;
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
    } else {
        kv->classes[aux->class_idx].last_slab = aux->prev;
    }
}

// low_bits returns a word with the first num bits set, all for 64 and more.
static uint64_t low_bits(uint32_t num) {
    return num < 64 ? (UINT64_C(1) << num) - 1 : UINT64_MAX;
}

// cut makes all blocks of a slab free.
static void cut(kv_cache *kv, uint32_t slab, uint32_t num_blocks) {
    kv_bits *bits = kv->bits + (uint64_t)slab * kv->free_words;
    uint64_t *sum = kv->free_sum + (uint64_t)slab * kv->free_sums;
    uint32_t words = (num_blocks + 63) / 64;
    for (uint32_t w = 0; w < kv->free_words; w++) {
        bits[w] = (kv_bits){.free = w < words ? low_bits(num_blocks - w * 64) : 0};
    }
    for (uint32_t s = 0; s < kv->free_sums; s++) {
        sum[s] = s * 64 < words ? low_bits(words - s * 64) : 0;
    }
}

void kv_slab_claim(kv_cache *kv, uint32_t slab, uint32_t class_idx) {
    kv_class *class = &kv->classes[class_idx];
    kv->slab_aux[slab] = (kv_slab_aux){
        .units = class->units,
        .slab_blocks = class->slab_blocks,
        .class_idx = class_idx,
        .free = class->slab_blocks,
    };
    cut(kv, slab, class->slab_blocks);
    class->slabs++;
    class->free += class->slab_blocks;
    link_slab(kv, slab);
}

// Committed by the record that names the block size of the slab.
bool kv_slab_assign(kv_cache *kv, uint32_t class_idx) {
    uint32_t slab = kv_slots_take(&kv->lists->slabs, kv->slab_next);
    if (slab == KV_NONE) {
        return false;
    }
    kv_redo_begin(kv);
    kv_redo_put(kv, &kv->slabs[slab].units, kv->classes[class_idx].units);
    kv_redo_commit(kv);
    kv_slab_claim(kv, slab, class_idx);
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

// freed counts one more free block of the slab.
static void freed(kv_cache *kv, uint32_t slab) {
    kv_slab_aux *aux = &kv->slab_aux[slab];
    kv->classes[aux->class_idx].free++;
    aux->free++;
    if (aux->free == 1) {
        link_slab(kv, slab);
    }
    if (aux->free == aux->slab_blocks) {
        unassign(kv, slab);
    }
}

static kv_class *class_of(const kv_cache *kv, uint32_t slab) {
    return &kv->classes[kv->slab_aux[slab].class_idx];
}

void kv_slab_gave(kv_cache *kv, uint32_t slab) {
    class_of(kv, slab)->in_use--;
    freed(kv, slab);
}

void kv_slab_cached(kv_cache *kv, uint32_t slab) {
    kv_class *class = class_of(kv, slab);
    class->in_use--;
    class->cached++;
}

void kv_slab_used(kv_cache *kv, uint32_t slab) {
    kv_class *class = class_of(kv, slab);
    class->cached--;
    class->in_use++;
}

void kv_slab_evicted(kv_cache *kv, uint32_t slab) {
    class_of(kv, slab)->cached--;
    freed(kv, slab);
}
