// kv_slots hands out the indices of an array: freed ones first (last in, first out), else the next
// that was never used.  Zeroed memory is a valid empty kv_slots, so an array that is mostly unused
// costs no memory.  next [cap] holds the list of freed indices, each + 1, 0 = the end.
//
// Derived state: recovery makes it again from what the array's elements say.  Loop thread only.
#ifndef ATTND_KVCACHE_KV_SLOTS_H
#define ATTND_KVCACHE_KV_SLOTS_H

#include <stdint.h>

#define KV_NONE UINT32_MAX // no index, no table entry

typedef struct kv_slots {
    uint32_t cap;
    uint32_t used; // indices below it were handed out at least once
    uint32_t freed;
    uint32_t live; // handed out now
} kv_slots;

// kv_slots_peek returns the index that kv_slots_take would, KV_NONE when there is none.
static inline uint32_t kv_slots_peek(const kv_slots *s) {
    if (s->freed) {
        return s->freed - 1;
    }
    return s->used < s->cap ? s->used : KV_NONE;
}

static inline uint32_t kv_slots_take(kv_slots *s, const uint32_t *next) {
    uint32_t i = kv_slots_peek(s);
    if (i == KV_NONE) {
        return KV_NONE;
    }
    if (s->freed) {
        s->freed = next[i];
    } else {
        s->used++;
    }
    s->live++;
    return i;
}

static inline void kv_slots_give(kv_slots *s, uint32_t *next, uint32_t i) {
    next[i] = s->freed;
    s->freed = i + 1;
    s->live--;
}

// kv_slots_give_handle gives back the slot of a handle, unless its generation cannot grow: such a
// slot is never used again, so that no handle ever names two things.
static inline void kv_slots_give_handle(kv_slots *s, uint32_t *next, uint32_t i,
                                        uint32_t generation) {
    if (generation == UINT32_MAX) {
        s->live--;
    } else {
        kv_slots_give(s, next, i);
    }
}

#endif
