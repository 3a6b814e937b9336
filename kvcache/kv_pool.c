// A block is some bits of state: free, shared, a node's, cached, and its word has a free one or
// not. Taking and giving back touch these and the slab's counters: 256 KiB and some for a million
// blocks, so random order costs no walk through memory.  A reference count is only looked at when a
// block is shared.  A free list through records of the blocks was the alternative; it touches more,
// and hands blocks out in the order in which they came back, which scatters a sequence over the
// arena.
#include "kvcache/kv_pool.h"

#include "kvcache/kv_slab.h"

#define MARK (UINT32_C(1) << 31) // in the count of a shared block

typedef struct place {
    uint32_t slab, idx; // of the block in the slab
} place;

static place place_of(const kv_cache *kv, uint32_t entry) {
    uint32_t slab = entry / kv->slab_units;
    uint32_t unit = entry - slab * kv->slab_units;
    return (place){.slab = slab, .idx = unit / kv->slab_aux[slab].units};
}

static kv_bits *bits_of(const kv_cache *kv, place p) {
    return &kv->bits[(uint64_t)p.slab * kv->free_words + p.idx / 64];
}

static uint64_t bit_of(place p) {
    return UINT64_C(1) << p.idx % 64;
}

static uint32_t *refs_of(const kv_cache *kv, place p) {
    return kv->refs + (uint64_t)p.slab * kv->slab_blocks + p.idx;
}

static uint64_t *sum_of(const kv_cache *kv, place p) {
    return &kv->free_sum[(uint64_t)p.slab * kv->free_sums + p.idx / 64 / 64];
}

static uint64_t sum_bit_of(place p) {
    return UINT64_C(1) << p.idx / 64 % 64;
}

// first_free returns the first free block of a slab that has one.
static uint32_t first_free(const kv_cache *kv, uint32_t slab) {
    const uint64_t *sum = kv->free_sum + (uint64_t)slab * kv->free_sums;
    uint32_t s = 0;
    while (sum[s] == 0) {
        s++;
    }
    uint32_t word = s * 64 + (uint32_t)__builtin_ctzll(sum[s]);
    uint64_t bits = kv->bits[(uint64_t)slab * kv->free_words + word].free;
    return word * 64 + (uint32_t)__builtin_ctzll(bits);
}

// free_behind finds the first free block behind near, in the word of its neighbour.
static bool free_behind(const kv_cache *kv, place near, place *out) {
    near.idx++;
    if (near.idx >= kv->slab_aux[near.slab].slab_blocks) {
        return false;
    }
    uint64_t bits = bits_of(kv, near)->free >> near.idx % 64;
    if (bits == 0) {
        return false;
    }
    *out = (place){.slab = near.slab, .idx = near.idx + (uint32_t)__builtin_ctzll(bits)};
    return true;
}

// use makes a free block one in use.
static void use(kv_cache *kv, place p) {
    kv_bits *bits = bits_of(kv, p);
    bits->free &= ~bit_of(p);
    *sum_of(kv, p) &= ~(bits->free == 0 ? sum_bit_of(p) : 0); // no branch: it is a coin toss
    kv_slab_took(kv, p.slab);
}

static void make_free(kv_cache *kv, place p) {
    bits_of(kv, p)->free |= bit_of(p);
    *sum_of(kv, p) |= sum_bit_of(p);
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
    use(kv, p);
    return p.slab * kv->slab_units + p.idx * class->units;
}

bool kv_pool_claim(kv_cache *kv, uint32_t entry) {
    place p = place_of(kv, entry);
    if (!(bits_of(kv, p)->free & bit_of(p))) {
        return kv_pool_hold(kv, entry);
    }
    use(kv, p);
    return true;
}

bool kv_pool_hold(kv_cache *kv, uint32_t entry) {
    place p = place_of(kv, entry);
    kv_bits *bits = bits_of(kv, p);
    uint32_t *refs = refs_of(kv, p);
    ATTND_ASSERT(!(bits->free & bit_of(p)));
    if (bits->cached & bit_of(p)) {
        bits->cached &= ~bit_of(p);
        kv_slab_used(kv, p.slab);
        return true;
    }
    *refs = bits->shared & bit_of(p) ? *refs + 1 : 2;
    ATTND_ASSERT(*refs < MARK);
    bits->shared |= bit_of(p);
    return false;
}

// rele_shared drops a reference of several.
static void rele_shared(kv_cache *kv, place p) {
    uint32_t *refs = refs_of(kv, p);
    if (--*refs == 1) {
        bits_of(kv, p)->shared &= ~bit_of(p);
    }
}

bool kv_pool_rele(kv_cache *kv, uint32_t entry) {
    place p = place_of(kv, entry);
    kv_bits *bits = bits_of(kv, p);
    ATTND_ASSERT(!((bits->free | bits->cached) & bit_of(p)));
    if (bits->shared & bit_of(p)) {
        rele_shared(kv, p);
        return false;
    }
    if (bits->indexed & bit_of(p)) {
        bits->cached |= bit_of(p);
        kv_slab_cached(kv, p.slab);
        return true;
    }
    make_free(kv, p);
    kv_slab_gave(kv, p.slab);
    return true;
}

void kv_pool_index_block(kv_cache *kv, uint32_t entry) {
    place p = place_of(kv, entry);
    kv_bits *bits = bits_of(kv, p);
    ATTND_ASSERT(!((bits->free | bits->indexed) & bit_of(p)));
    bits->indexed |= bit_of(p);
}

bool kv_pool_unindex(kv_cache *kv, uint32_t entry) {
    place p = place_of(kv, entry);
    kv_bits *bits = bits_of(kv, p);
    ATTND_ASSERT(bits->indexed & bit_of(p));
    bits->indexed &= ~bit_of(p);
    if (!(bits->cached & bit_of(p))) {
        return false;
    }
    bits->cached &= ~bit_of(p);
    make_free(kv, p);
    kv_slab_evicted(kv, p.slab);
    return true;
}

bool kv_pool_is_indexed(const kv_cache *kv, uint32_t entry) {
    place p = place_of(kv, entry);
    return bits_of(kv, p)->indexed & bit_of(p);
}

bool kv_pool_is_cached(const kv_cache *kv, uint32_t entry) {
    place p = place_of(kv, entry);
    return bits_of(kv, p)->cached & bit_of(p);
}

uint32_t kv_pool_slab(const kv_cache *kv, uint32_t entry) {
    return entry / kv->slab_units;
}

uint32_t kv_pool_refs(const kv_cache *kv, uint32_t entry) {
    place p = place_of(kv, entry);
    const kv_bits *bits = bits_of(kv, p);
    if (bits->shared & bit_of(p)) {
        return *refs_of(kv, p);
    }
    return (bits->free | bits->cached) & bit_of(p) ? 0 : 1;
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
        uint64_t full = div_up(needs[i].take + needs[i].found + needs[i].held, class->slab_blocks);
        slabs += full > needs[i].slabs ? full : needs[i].slabs;
    }
    return slabs <= kv->num_slabs;
}

void kv_pool_mark(kv_cache *kv, uint32_t entry, bool *new_block, bool *new_slab) {
    place p = place_of(kv, entry);
    *new_block = true; // a block that is not shared is met once only
    if (bits_of(kv, p)->shared & bit_of(p)) {
        *new_block = !(*refs_of(kv, p) & MARK);
        *refs_of(kv, p) |= MARK;
    }
    *new_slab = !kv->slab_aux[p.slab].mark;
    kv->slab_aux[p.slab].mark = 1;
}

void kv_pool_unmark(kv_cache *kv, uint32_t entry) {
    place p = place_of(kv, entry);
    if (bits_of(kv, p)->shared & bit_of(p)) {
        *refs_of(kv, p) &= ~MARK;
    }
    kv->slab_aux[p.slab].mark = 0;
}
