// Free blocks are bits: one a block, and one a word of those that is not zero.  Taking and giving
// back touch a bit, its word's bit, the slab's counters and the block's reference count: some cache
// lines that stay close for a million blocks (128 KiB of bits), whatever the order.  A free list
// through the blocks' records was the alternative; it remembers the order in which blocks were
// given back, which scatters a sequence over the arena.
#include "kvcache/kv_pool.h"

#include "kvcache/kv_slab.h"

#define MARK (UINT32_C(1) << 31) // in refs

typedef struct place {
    uint32_t slab, idx; // of the block in the slab
} place;

static place place_of(const kv_cache *kv, uint32_t entry) {
    uint32_t slab = entry / kv->slab_units;
    uint32_t unit = entry - slab * kv->slab_units;
    return (place){.slab = slab, .idx = unit / kv->slab_aux[slab].units};
}

static uint32_t *refs_of(const kv_cache *kv, place p) {
    return kv->refs + (uint64_t)p.slab * kv->slab_blocks + p.idx;
}

// first_free returns the first free block of a slab that has one.
static uint32_t first_free(const kv_cache *kv, uint32_t slab) {
    const uint64_t *sum = kv->free_sum + (uint64_t)slab * kv->free_sums;
    uint32_t s = 0;
    while (sum[s] == 0) {
        s++;
    }
    uint32_t word = s * 64 + (uint32_t)__builtin_ctzll(sum[s]);
    uint64_t bits = kv->free_bits[(uint64_t)slab * kv->free_words + word];
    return word * 64 + (uint32_t)__builtin_ctzll(bits);
}

// free_behind finds a free block of the slab behind idx, in the word of its neighbour.
static bool free_behind(const kv_cache *kv, place near, place *out) {
    uint32_t idx = near.idx + 1;
    if (idx >= kv->slab_aux[near.slab].slab_blocks) {
        return false;
    }
    uint64_t bits = kv->free_bits[(uint64_t)near.slab * kv->free_words + idx / 64] >> idx % 64;
    if (bits == 0) {
        return false;
    }
    *out = (place){.slab = near.slab, .idx = idx + (uint32_t)__builtin_ctzll(bits)};
    return true;
}

uint32_t kv_pool_take(kv_cache *kv, uint32_t class_idx, uint32_t near) {
    const kv_class *class = &kv->classes[class_idx];
    place p;
    if (near == KV_NONE || !free_behind(kv, place_of(kv, near), &p)) {
        if (class->first_slab == 0 && !kv_slab_assign(kv, class_idx)) {
            return KV_NONE;
        }
        p.slab = class->first_slab - 1;
        p.idx = first_free(kv, p.slab);
    }
    uint64_t *bits = &kv->free_bits[(uint64_t)p.slab * kv->free_words + p.idx / 64];
    *bits &= ~(UINT64_C(1) << p.idx % 64);
    if (*bits == 0) {
        kv->free_sum[(uint64_t)p.slab * kv->free_sums + p.idx / 64 / 64] &=
            ~(UINT64_C(1) << p.idx / 64 % 64);
    }
    *refs_of(kv, p) = 1;
    kv_slab_took(kv, p.slab);
    return p.slab * kv->slab_units + p.idx * class->units;
}

void kv_pool_hold(kv_cache *kv, uint32_t entry) {
    uint32_t *refs = refs_of(kv, place_of(kv, entry));
    ATTND_ASSERT(*refs > 0 && *refs < MARK - 1);
    ++*refs;
}

bool kv_pool_rele(kv_cache *kv, uint32_t entry) {
    place p = place_of(kv, entry);
    uint32_t *refs = refs_of(kv, p);
    ATTND_ASSERT(*refs > 0);
    if (--*refs > 0) {
        return false;
    }
    kv->free_bits[(uint64_t)p.slab * kv->free_words + p.idx / 64] |= UINT64_C(1) << p.idx % 64;
    kv->free_sum[(uint64_t)p.slab * kv->free_sums + p.idx / 64 / 64] |= UINT64_C(1)
                                                                        << p.idx / 64 % 64;
    kv_slab_gave(kv, p.slab);
    return true;
}

uint32_t kv_pool_refs(const kv_cache *kv, uint32_t entry) {
    return *refs_of(kv, place_of(kv, entry));
}

uint64_t kv_pool_index(const kv_cache *kv, uint32_t entry) {
    place p = place_of(kv, entry);
    return (uint64_t)p.slab * kv->slab_blocks + p.idx;
}

static uint64_t div_up(uint64_t n, uint64_t d) {
    return (n + d - 1) / d;
}

bool kv_pool_fits(const kv_cache *kv, const kv_need *needs, uint32_t num) {
    uint64_t slabs = 0;
    for (uint32_t i = 0; i < num; i++) {
        const kv_class *class = &kv->classes[needs[i].class_idx];
        if (needs[i].take > class->free) {
            slabs += div_up(needs[i].take - class->free, class->slab_blocks);
        }
    }
    return slabs <= kv->lists->slabs.cap - kv->lists->slabs.live;
}

bool kv_pool_could_fit(const kv_cache *kv, const kv_need *needs, uint32_t num) {
    uint64_t slabs = 0;
    for (uint32_t i = 0; i < num; i++) {
        const kv_class *class = &kv->classes[needs[i].class_idx];
        uint64_t full = div_up(needs[i].take + needs[i].held, class->slab_blocks);
        slabs += full > needs[i].slabs ? full : needs[i].slabs;
    }
    return slabs <= kv->num_slabs;
}

void kv_pool_mark(kv_cache *kv, uint32_t entry, bool *new_block, bool *new_slab) {
    place p = place_of(kv, entry);
    uint32_t *refs = refs_of(kv, p);
    *new_block = !(*refs & MARK);
    *new_slab = !kv->slab_aux[p.slab].mark;
    *refs |= MARK;
    kv->slab_aux[p.slab].mark = 1;
}

void kv_pool_unmark(kv_cache *kv, uint32_t entry) {
    place p = place_of(kv, entry);
    *refs_of(kv, p) &= ~MARK;
    kv->slab_aux[p.slab].mark = 0;
}
