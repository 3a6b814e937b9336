// A bit a slot says that it is taken.  Slabs of one size that have a free slot are a list, and the
// slabs without a size are another; links are index + 1, 0 = none.  A size is looked for among all
// that slabs have now: a daemon serves few.
#include "kvcache/kv_tier_slots.h"

#include <stdlib.h>

typedef struct slab {
    uint64_t slot_bytes; // 0 = no size
    uint32_t num, taken; // slots
    uint32_t prev, next;
} slab;

typedef struct size {
    uint64_t slot_bytes;
    uint32_t slabs, first; // first with a free slot
} size;

struct kv_tier_slots {
    uint64_t slab_bytes, taken_bytes;
    uint32_t num_slabs, words; // of bits, a slab
    uint32_t num_sizes, unsized;
    slab *slabs;    // [num_slabs]
    size *sizes;    // [num_slabs], the first num_sizes are used
    uint64_t *bits; // [num_slabs, words]
};

attnd_err kv_tier_slots_create(kv_tier_slots **out, uint64_t bytes, uint64_t slab_bytes,
                               attnd_errinfo *info) {
    if (slab_bytes == 0 || slab_bytes % KV_TIER_UNIT || slab_bytes > bytes ||
        bytes / slab_bytes > INT32_MAX || bytes > KV_TIER_MAX_BYTES) {
        return attnd_fail(info, ATTND_EINVAL, "tier",
                          "a tier of %llu bytes cannot be cut into slabs of %llu",
                          (unsigned long long)bytes, (unsigned long long)slab_bytes);
    }
    kv_tier_slots *s = calloc(1, sizeof(*s));
    if (s) {
        s->slab_bytes = slab_bytes;
        s->num_slabs = (uint32_t)(bytes / slab_bytes);
        s->words = (uint32_t)((slab_bytes / KV_TIER_UNIT + 63) / 64);
        s->slabs = calloc(s->num_slabs, sizeof(*s->slabs));
        s->sizes = calloc(s->num_slabs, sizeof(*s->sizes));
        s->bits = calloc((size_t)s->num_slabs * s->words, sizeof(*s->bits));
    }
    if (!s || !s->slabs || !s->sizes || !s->bits) {
        kv_tier_slots_free(s);
        return attnd_fail(info, ATTND_ENOMEM, "tier", "no memory for the slots of a tier");
    }
    for (uint32_t i = s->num_slabs; i-- > 0;) {
        s->slabs[i].next = s->unsized;
        s->unsized = i + 1;
    }
    *out = s;
    return ATTND_OK;
}

void kv_tier_slots_free(kv_tier_slots *s) {
    if (s) {
        free(s->slabs);
        free(s->sizes);
        free(s->bits);
        free(s);
    }
}

// ---- sizes

// size_of returns the entry of a size, NULL when no slab has it.
static size *size_of(kv_tier_slots *s, uint64_t slot_bytes) {
    for (uint32_t i = 0; i < s->num_sizes; i++) {
        if (s->sizes[i].slot_bytes == slot_bytes) {
            return &s->sizes[i];
        }
    }
    return NULL;
}

static void link_slab(kv_tier_slots *s, size *z, uint32_t i) {
    s->slabs[i].prev = 0;
    s->slabs[i].next = z->first;
    if (z->first) {
        s->slabs[z->first - 1].prev = i + 1;
    }
    z->first = i + 1;
}

static void unlink_slab(kv_tier_slots *s, size *z, uint32_t i) {
    const slab *b = &s->slabs[i];
    if (b->prev) {
        s->slabs[b->prev - 1].next = b->next;
    } else {
        z->first = b->next;
    }
    if (b->next) {
        s->slabs[b->next - 1].prev = b->prev;
    }
}

// cut gives slab i, which has none and is in no list, a size.
static size *cut(kv_tier_slots *s, uint32_t i, uint64_t slot_bytes) {
    size *z = size_of(s, slot_bytes);
    if (!z) {
        z = &s->sizes[s->num_sizes++];
        *z = (size){.slot_bytes = slot_bytes};
    }
    z->slabs++;
    s->slabs[i] = (slab){.slot_bytes = slot_bytes, .num = (uint32_t)(s->slab_bytes / slot_bytes)};
    link_slab(s, z, i);
    return z;
}

// uncut takes the size of an empty slab away.
static void uncut(kv_tier_slots *s, size *z, uint32_t i) {
    unlink_slab(s, z, i);
    s->slabs[i] = (slab){.next = s->unsized};
    s->unsized = i + 1;
    if (--z->slabs == 0) {
        *z = s->sizes[--s->num_sizes];
    }
}

// ---- slots

static uint64_t rounded(uint64_t bytes) {
    return (bytes + KV_TIER_UNIT - 1) / KV_TIER_UNIT * KV_TIER_UNIT;
}

static uint64_t *word_of(kv_tier_slots *s, uint32_t i, uint32_t slot) {
    return &s->bits[(size_t)i * s->words + slot / 64];
}

static uint32_t first_free(kv_tier_slots *s, uint32_t i) {
    uint32_t w = 0;
    while (~*word_of(s, i, w * 64) == 0) {
        w++;
    }
    return w * 64 + (uint32_t)__builtin_ctzll(~*word_of(s, i, w * 64));
}

static void use(kv_tier_slots *s, size *z, uint32_t i, uint32_t slot) {
    *word_of(s, i, slot) |= UINT64_C(1) << slot % 64;
    s->taken_bytes += z->slot_bytes;
    if (++s->slabs[i].taken == s->slabs[i].num) {
        unlink_slab(s, z, i);
    }
}

bool kv_tier_slots_take(kv_tier_slots *s, uint64_t bytes, uint64_t *slot) {
    uint64_t slot_bytes = rounded(bytes);
    if (slot_bytes == 0 || slot_bytes > s->slab_bytes) {
        return false;
    }
    size *z = size_of(s, slot_bytes);
    if (!z || !z->first) {
        if (!s->unsized) {
            return false;
        }
        uint32_t i = s->unsized - 1;
        s->unsized = s->slabs[i].next;
        z = cut(s, i, slot_bytes);
    }
    uint32_t i = z->first - 1, n = first_free(s, i);
    use(s, z, i, n);
    *slot = i * s->slab_bytes + n * slot_bytes;
    return true;
}

void kv_tier_slots_give(kv_tier_slots *s, uint64_t slot) {
    uint32_t i = (uint32_t)(slot / s->slab_bytes);
    slab *b = &s->slabs[i];
    uint32_t n = (uint32_t)(slot % s->slab_bytes / b->slot_bytes);
    size *z = size_of(s, b->slot_bytes);
    ATTND_ASSERT(z && *word_of(s, i, n) >> n % 64 & 1);
    *word_of(s, i, n) &= ~(UINT64_C(1) << n % 64);
    s->taken_bytes -= b->slot_bytes;
    if (b->taken-- == b->num) {
        link_slab(s, z, i);
    }
    if (b->taken == 0) {
        uncut(s, z, i);
    }
}

// leave_unsized takes slab i out of those without a size.
static void leave_unsized(kv_tier_slots *s, uint32_t i) {
    uint32_t *at = &s->unsized;
    while (*at != i + 1) {
        at = &s->slabs[*at - 1].next;
    }
    *at = s->slabs[i].next;
}

bool kv_tier_slots_claim(kv_tier_slots *s, uint64_t slot, uint64_t bytes) {
    uint64_t slot_bytes = rounded(bytes), in = slot % s->slab_bytes;
    if (slot_bytes == 0 || slot / s->slab_bytes >= s->num_slabs || in % slot_bytes ||
        in > s->slab_bytes - slot_bytes || slot_bytes > s->slab_bytes) {
        return false;
    }
    uint32_t i = (uint32_t)(slot / s->slab_bytes), n = (uint32_t)(in / slot_bytes);
    const slab *b = &s->slabs[i];
    if ((b->slot_bytes && b->slot_bytes != slot_bytes) || *word_of(s, i, n) >> n % 64 & 1) {
        return false;
    }
    if (!b->slot_bytes) {
        leave_unsized(s, i);
        cut(s, i, slot_bytes);
    }
    use(s, size_of(s, slot_bytes), i, n);
    return true;
}

uint64_t kv_tier_slots_bytes(const kv_tier_slots *s, uint64_t *total) {
    *total = s->num_slabs * s->slab_bytes;
    return s->taken_bytes;
}
