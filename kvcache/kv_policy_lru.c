// Least recently used: a block's rank is the time when its last user left.  A hit needs no call of
// its own, since who hits becomes a user.
#include "kvcache/kv_policy.h"

#include <stddef.h>

static void used(kv_policy_state *st, kv_rank *block) {
    block->rank = kv_policy_tick(st);
}

const kv_policy kv_policy_lru = {.name = "lru", .release = used};
