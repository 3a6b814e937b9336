// The prefix tree: see kv_prefix.h for what it is.
//
// Lookup.  The key of a block is the low half of XXH3 over its tokens with the key before it as
// seed, so the keys of many blocks are known before the first node is; buckets, then nodes and
// their tokens are fetched ahead, and the walk, in which each step needs the node of the one
// before, finds them in the cache.
//
// A partial hit is looked for among the youngest children of the last node that was found, of which
// KV_PREFIX_LOOKS are looked at.
#include "kvcache/kv_prefix.h"

#include <string.h>

#include "kvcache/kv_evict.h"
#include "kvcache/kv_model.h"
#include "kvcache/kv_pool.h"
#include "kvcache/kv_redo.h"
#include "kvcache/kv_spill.h"
#include "kvcache/kv_sum.h"
#include "kvcache/kv_window.h"

enum {
    AHEAD = 16, // blocks whose memory is fetched before they are compared
    KV_PREFIX_LOOKS = 32,
    RAISES = 64, // nodes of a record
    LINE_BYTES = 64,
};

// ---- keys

static uint32_t block_tokens_of(const kv_cache *kv, uint32_t model) {
    return kv->models[model].spec.groups[0].block_tokens;
}

static uint32_t next_key(uint32_t key, const uint32_t *tokens, uint32_t num) {
    return (uint32_t)kv_sum_bytes(tokens, (size_t)num * sizeof(*tokens), key);
}

static uint32_t key_of(const kv_cache *kv, uint32_t model, uint32_t node) {
    return node == KV_NONE ? kv->model_aux[model].root_key : kv->nodes[node].key;
}

uint32_t kv_prefix_key(const kv_cache *kv, uint32_t model, uint32_t parent,
                       const uint32_t *tokens) {
    return next_key(key_of(kv, model, parent), tokens, block_tokens_of(kv, model));
}

static uint32_t *bucket_of(const kv_cache *kv, uint32_t key) {
    return &kv->keys[key & kv->key_mask & (kv->key_buckets - 1)];
}

void kv_prefix_set_key_mask(kv_cache *kv, uint32_t mask) {
    kv->key_mask = mask;
}

// salted is what the key of a tree's root is made of: each field after its tag and its length, so
// that no two choices of fields make the same bytes.
typedef struct salted {
    uint8_t bytes[2 * (5 + KV_NAME_BYTES) + 5 + KV_DIGEST_BYTES];
    uint32_t used;
} salted;

static void add_salt(salted *s, uint8_t tag, const void *field, uint32_t bytes) {
    s->bytes[s->used] = tag;
    memcpy(s->bytes + s->used + 1, &bytes, sizeof(bytes));
    memcpy(s->bytes + s->used + 5, field, bytes);
    s->used += 5 + bytes;
}

void kv_prefix_start(kv_cache *kv, uint32_t model) {
    const kv_model_spec *spec = &kv->models[model].spec;
    const char *tenant = kv->tenants[spec->tenant].name;
    salted s = {.used = 0};
    add_salt(&s, 't', tenant, (uint32_t)strnlen(tenant, KV_NAME_BYTES));
    add_salt(&s, 'm', spec->name, (uint32_t)strnlen(spec->name, KV_NAME_BYTES));
    add_salt(&s, 'd', spec->digest, KV_DIGEST_BYTES);
    kv_model_aux *aux = &kv->model_aux[model];
    aux->root_key = (uint32_t)kv_sum_bytes(s.bytes, s.used, kv_salt(kv));
    aux->nodes = aux->first_child = aux->candidates = 0;
    memset(aux->evictable, 0, sizeof(aux->evictable));
}

attnd_err kv_prefix_can(const kv_cache *kv, const kv_model_spec *spec, attnd_errinfo *info) {
    if (kv->opts.prefix_blocks == 0) {
        return attnd_fail(info, ATTND_ENOTSUP, "tokens", "there is no prefix cache");
    }
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        uint32_t block_tokens = spec->groups[g].block_tokens;
        if (block_tokens > kv->opts.prefix_block_tokens) {
            return attnd_fail(info, ATTND_ENOTSUP, "tokens",
                              "blocks of %u tokens: those of at most %u are cached", block_tokens,
                              kv->opts.prefix_block_tokens);
        }
        if (block_tokens != spec->groups[0].block_tokens) {
            return attnd_fail(info, ATTND_ENOTSUP, "tokens",
                              "the layer groups' blocks have different numbers of tokens");
        }
    }
    return ATTND_OK;
}

// ---- looking

static uint32_t link_of(uint32_t node) {
    return node == KV_NONE ? 0 : node + 1;
}

static bool is_child(const kv_cache *kv, uint32_t node, uint32_t model, uint32_t parent) {
    const kv_led_node *n = &kv->nodes[node];
    return n->parent == link_of(parent) && kv_node_model(kv, node) == model &&
           (parent == KV_NONE || n->parent_generation == kv->nodes[parent].generation);
}

static uint32_t find_child(const kv_cache *kv, uint32_t model, uint32_t parent, uint32_t key,
                           const uint32_t *tokens, uint32_t num) {
    for (uint32_t link = *bucket_of(kv, key); link; link = kv->node_next[link - 1]) {
        uint32_t node = link - 1;
        if (((kv->nodes[node].key ^ key) & kv->key_mask) == 0 &&
            is_child(kv, node, model, parent) &&
            memcmp(kv_node_ids(kv, node), tokens, (size_t)num * sizeof(*tokens)) == 0) {
            return node;
        }
    }
    return KV_NONE;
}

// fetch_ahead makes the keys of blocks [num, at most AHEAD] and asks for what the walk will read.
static void fetch_ahead(const kv_cache *kv, uint32_t key, const uint32_t *tokens, uint32_t num,
                        uint32_t block_tokens, uint32_t keys[AHEAD]) {
    for (uint32_t i = 0; i < num; i++) {
        key = keys[i] = next_key(key, tokens + (size_t)i * block_tokens, block_tokens);
        __builtin_prefetch(bucket_of(kv, key));
    }
    for (uint32_t i = 0; i < num; i++) {
        uint32_t link = *bucket_of(kv, keys[i]);
        if (link) {
            const char *ids = (const char *)kv_node_ids(kv, link - 1);
            __builtin_prefetch(&kv->nodes[link - 1]);
            __builtin_prefetch(&kv->node_next[link - 1]);
            for (size_t at = 0; at < (size_t)block_tokens * sizeof(uint32_t); at += LINE_BYTES) {
                __builtin_prefetch(ids + at);
            }
        }
    }
}

static uint32_t first_child(const kv_cache *kv, uint32_t model, uint32_t node) {
    if (node == KV_NONE) {
        return kv->model_aux[model].first_child;
    }
    const kv_node_aux *aux = &kv->node_aux[node];
    return aux->uses & KV_CANDIDATE ? 0 : aux->down;
}

static bool has_all(const kv_cache *kv, uint32_t node, uint32_t num_groups) {
    uint32_t g = 0;
    while (g < num_groups && *kv_node_entry(kv, node, g) != KV_NONE) {
        g++;
    }
    return g == num_groups;
}

static void find_partial(const kv_cache *kv, uint32_t model, const uint32_t *tokens, uint32_t num,
                         kv_prefix_hit *out) {
    uint32_t link = first_child(kv, model, out->node);
    for (uint32_t looks = 0; link && looks < KV_PREFIX_LOOKS; looks++) {
        const uint32_t *ids = kv_node_ids(kv, link - 1);
        uint32_t same = 0;
        while (same < num && ids[same] == tokens[same]) {
            same++;
        }
        if (same > out->partial_tokens &&
            has_all(kv, link - 1, kv->models[model].spec.num_groups)) {
            out->partial = link - 1;
            out->partial_tokens = same;
        }
        link = kv->node_aux[link - 1].next_sibling;
    }
}

// lacks says whether a node, block b of a sequence, lacks one that rows from place `at` on see;
// *matters is false when such rows see none of the block in any group with a window.
static bool lacks(const kv_cache *kv, const kv_model_spec *spec, uint32_t node, uint32_t b,
                  uint64_t at, bool *matters) {
    *matters = false;
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        const kv_group_spec *group = &spec->groups[g];
        if (group->window_left >= 0 && b >= kv_window_first(kv, group, at)) {
            *matters = true;
            if (*kv_node_entry(kv, node, g) == KV_NONE) {
                return true;
            }
        }
    }
    return false;
}

// trim shortens what was found until it has all that rows behind it see.
static void trim(const kv_cache *kv, uint32_t model, uint32_t before, kv_prefix_hit *out) {
    const kv_model_spec *spec = &kv->models[model].spec;
    uint32_t node = out->node;
    bool matters = true;
    for (uint32_t b = out->blocks; matters && b > 0; b--) {
        uint64_t at = (uint64_t)(before + out->blocks) * spec->groups[0].block_tokens;
        bool ends = lacks(kv, spec, node, before + b - 1, at, &matters);
        node = kv_prefix_parent(kv, node);
        if (ends) {
            out->node = node;
            out->blocks = b - 1;
        }
    }
}

void kv_prefix_find(const kv_cache *kv, uint32_t model, uint32_t from, uint32_t before,
                    const uint32_t *tokens, uint32_t num, kv_prefix_hit *out) {
    uint32_t block_tokens = block_tokens_of(kv, model), full = num / block_tokens;
    uint32_t keys[AHEAD], key = key_of(kv, model, from);
    *out = (kv_prefix_hit){.node = from, .partial = KV_NONE};
    while (out->blocks < full) {
        const uint32_t *at = tokens + (size_t)out->blocks * block_tokens;
        uint32_t left = full - out->blocks, i = 0, batch = left < AHEAD ? left : AHEAD;
        fetch_ahead(kv, key, at, batch, block_tokens, keys);
        for (; i < batch; i++, at += block_tokens) {
            uint32_t child = find_child(kv, model, out->node, keys[i], at, block_tokens);
            if (child == KV_NONE || kv_spilled(kv, child)) {
                break;
            }
            out->node = child;
            out->blocks++;
        }
        if (i < batch) {
            break;
        }
        key = keys[batch - 1];
    }
    out->deepest = out->node;
    out->depth = out->blocks;
    trim(kv, model, before, out);
    uint32_t left = num - out->blocks * block_tokens;
    find_partial(kv, model, tokens + (size_t)out->blocks * block_tokens,
                 left < block_tokens ? left : block_tokens - 1, out);
}

uint32_t kv_prefix_parent(const kv_cache *kv, uint32_t node) {
    return kv->nodes[node].parent ? kv->nodes[node].parent - 1 : KV_NONE;
}

// ---- users

// count_quiet counts the blocks of a node in or out of those that could come free.
static void count_quiet(kv_cache *kv, uint32_t node, uint32_t by) {
    uint32_t model = kv_node_model(kv, node);
    for (uint32_t g = 0; g < kv->models[model].spec.num_groups; g++) {
        uint32_t entry = *kv_node_entry(kv, node, g);
        if (entry != KV_NONE) {
            kv->model_aux[model].evictable[g] += by;
            kv->slab_aux[kv_pool_slab(kv, entry)].evictable += by;
        }
    }
}

// grow_old halves ranks and clock when the clock is half through.
static void grow_old(kv_cache *kv) {
    kv_policy_state *st = &kv->policy_state;
    if (st->clock < UINT32_C(1) << 31) {
        return;
    }
    for (uint32_t i = 0; i < kv->lists->nodes.used; i++) {
        kv->node_aux[i].rank.rank /= 2;
    }
    st->clock /= 2;
    if (kv->policy->age) {
        kv->policy->age(st);
    }
}

void kv_prefix_hold(kv_cache *kv, uint32_t node) {
    for (; node != KV_NONE; node = kv_prefix_parent(kv, node)) {
        kv_node_aux *aux = &kv->node_aux[node];
        if (aux->uses & KV_CANDIDATE) {
            kv_evict_drop(kv, node);
        }
        if (aux->uses & KV_LEAVING) {
            kv_spill_stay(kv, node);
        }
        if (aux->uses++ > 0) {
            return;
        }
        if (kv_spilled(kv, node)) {
            kv_spill_unpark(kv, node);
        }
        count_quiet(kv, node, UINT32_MAX); // one less
    }
}

void kv_prefix_rele(kv_cache *kv, uint32_t node) {
    grow_old(kv);
    for (; node != KV_NONE; node = kv_prefix_parent(kv, node)) {
        kv_node_aux *aux = &kv->node_aux[node];
        ATTND_ASSERT(aux->uses > 0 && !(aux->uses & KV_CANDIDATE));
        if (--aux->uses > 0) {
            return;
        }
        count_quiet(kv, node, 1);
        if (kv->policy->release) {
            kv->policy->release(&kv->policy_state, &aux->rank);
        }
        if (kv_spilled(kv, node)) {
            kv_spill_park(kv, node);
        } else if (!aux->down) {
            kv_evict_add(kv, node);
        }
    }
}

void kv_prefix_hit_path(kv_cache *kv, uint32_t node, uint32_t num) {
    grow_old(kv);
    for (; kv->policy->hit && num > 0; num--, node = kv_prefix_parent(kv, node)) {
        kv->policy->hit(&kv->policy_state, &kv->node_aux[node].rank);
    }
}

// ---- priorities

static uint32_t priority_of(const kv_cache *kv, uint32_t seq_idx) {
    const kv_led_seq *s = &kv->seqs[seq_idx];
    uint32_t most = kv->tenants[s->tenant].priority;
    return s->priority && s->priority < most ? s->priority : most;
}

void kv_prefix_raise(kv_cache *kv, uint32_t node, uint32_t seq_idx) {
    uint32_t priority = priority_of(kv, seq_idx);
    while (node != KV_NONE && kv->nodes[node].owner >> KV_OWNER_BITS < priority) {
        kv_redo_begin(kv);
        for (uint32_t i = 0; i < RAISES && node != KV_NONE; i++) {
            uint32_t owner = kv->nodes[node].owner;
            if (owner >> KV_OWNER_BITS >= priority) {
                break;
            }
            kv_redo_put(kv, &kv->nodes[node].owner,
                        (kv_node_model(kv, node) + 1) | priority << KV_OWNER_BITS);
            node = kv_prefix_parent(kv, node);
        }
        kv_redo_commit(kv);
    }
}

// ---- the tree

static uint32_t *children_of(kv_cache *kv, uint32_t model, uint32_t parent) {
    if (parent == KV_NONE) {
        return &kv->model_aux[model].first_child;
    }
    ATTND_ASSERT(!(kv->node_aux[parent].uses & KV_CANDIDATE));
    return &kv->node_aux[parent].down;
}

// link_child and unlink_child: in the parent's list.
static void link_child(kv_cache *kv, uint32_t node) {
    uint32_t *first = children_of(kv, kv_node_model(kv, node), kv_prefix_parent(kv, node));
    kv->node_aux[node].prev_sibling = 0;
    kv->node_aux[node].next_sibling = *first;
    if (*first) {
        kv->node_aux[*first - 1].prev_sibling = node + 1;
    }
    *first = node + 1;
}

static void unlink_child(kv_cache *kv, uint32_t node) {
    const kv_node_aux *aux = &kv->node_aux[node];
    if (aux->next_sibling) {
        kv->node_aux[aux->next_sibling - 1].prev_sibling = aux->prev_sibling;
    }
    if (aux->prev_sibling) {
        kv->node_aux[aux->prev_sibling - 1].next_sibling = aux->next_sibling;
    } else {
        *children_of(kv, kv_node_model(kv, node), kv_prefix_parent(kv, node)) = aux->next_sibling;
    }
}

static void link_node(kv_cache *kv, uint32_t node) {
    uint32_t *bucket = bucket_of(kv, kv->nodes[node].key);
    kv->node_aux[node] = (kv_node_aux){0};
    if (!kv_spilled(kv, node)) {
        link_child(kv, node);
    }
    kv->node_next[node] = *bucket;
    *bucket = node + 1;
    kv->model_aux[kv_node_model(kv, node)].nodes++;
}

static void unlink_node(kv_cache *kv, uint32_t node) {
    if (!kv_spilled(kv, node) && !(kv->node_aux[node].uses & KV_LEAVING)) {
        unlink_child(kv, node);
    }
    uint32_t *link = bucket_of(kv, kv->nodes[node].key);
    while (*link != node + 1) {
        link = &kv->node_next[*link - 1];
    }
    *link = kv->node_next[node];
    kv->model_aux[kv_node_model(kv, node)].nodes--;
}

static void put_chain(kv_cache *kv, uint32_t seq_idx, uint32_t node, uint32_t generation) {
    kv_redo_put(kv, &kv->seqs[seq_idx].chain, node + 1);
    kv_redo_put(kv, &kv->seqs[seq_idx].chain_generation, generation);
}

// make_node makes a node live.  Its token ids are stored first: no reader looks at a free node.
static void make_node(kv_cache *kv, uint32_t node, const kv_led_node *live,
                      const kv_model_spec *spec, const uint32_t *tokens, const uint32_t *entries,
                      uint32_t seq_idx) {
    uint32_t *ids = kv_node_ids(kv, node);
    for (uint32_t t = 0; t < spec->groups[0].block_tokens; t++) {
        kv_store(&ids[t], tokens[t]);
    }
    kv_redo_begin(kv);
    kv_redo_put_bytes(kv, &kv->nodes[node], live, sizeof(*live));
    for (uint32_t g = 1; g < spec->num_groups; g++) {
        kv_redo_put(kv, kv_node_entry(kv, node, g), entries[g]);
    }
    put_chain(kv, seq_idx, node, live->generation);
    kv_redo_commit(kv);
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        if (entries[g] != KV_NONE) {
            kv_pool_index_block(kv, entries[g]);
        }
    }
}

// join makes a node that is there the chain of a sequence; one that is spilled, or lacks some, gets
// its blocks.
static void join(kv_cache *kv, uint32_t node, const uint32_t *entries, uint32_t seq_idx) {
    const kv_model_spec *spec = &kv->models[kv_node_model(kv, node)].spec;
    const kv_led_spill was = kv_spilled(kv, node) ? kv->spills[node] : (kv_led_spill){0};
    uint32_t filled = 0; // a bit a group
    kv_prefix_hold(kv, node);
    kv_redo_begin(kv);
    put_chain(kv, seq_idx, node, kv->nodes[node].generation);
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        if (entries[g] != KV_NONE && *kv_node_entry(kv, node, g) == KV_NONE) {
            kv_redo_put(kv, kv_node_entry(kv, node, g), entries[g]);
            filled |= UINT32_C(1) << g;
        }
    }
    kv_spill_leave(kv, node);
    kv_redo_commit(kv);
    for (uint32_t g = 0; !was.tier && g < spec->num_groups; g++) {
        if (filled >> g & 1) {
            kv_pool_index_block(kv, entries[g]);
        }
    }
    if (was.tier) {
        kv_spill_left(kv, node, &was);
        kv_prefix_rejoin(kv, node);
    }
}

static void tell_inserted(kv_cache *kv, uint32_t node, uint32_t depth) {
    if (kv->policy->insert) {
        kv->policy->insert(&kv->policy_state, &kv->node_aux[node].rank, kv->nodes[node].key, depth);
    }
}

// take_node finds a free node; one that is parked makes way.
static uint32_t take_node(kv_cache *kv) {
    if (kv_slots_peek(&kv->lists->nodes) == KV_NONE) {
        kv_spill_drop(kv);
    }
    return kv_slots_take(&kv->lists->nodes, kv->node_next);
}

uint32_t kv_prefix_insert(kv_cache *kv, uint32_t model, uint32_t parent, const uint32_t *tokens,
                          const uint32_t *entries, uint32_t depth, uint32_t seq_idx) {
    uint32_t key = kv_prefix_key(kv, model, parent, tokens);
    uint32_t node = find_child(kv, model, parent, key, tokens, block_tokens_of(kv, model));
    if (node != KV_NONE) {
        join(kv, node, entries, seq_idx);
        kv_prefix_raise(kv, node, seq_idx);
        return node;
    }
    node = take_node(kv);
    if (node == KV_NONE) {
        return KV_NONE;
    }
    grow_old(kv);
    const kv_led_node live = {
        .owner = (model + 1) | priority_of(kv, seq_idx) << KV_OWNER_BITS,
        .generation = kv->nodes[node].generation + 1,
        .parent = link_of(parent),
        .parent_generation = parent == KV_NONE ? 0 : kv->nodes[parent].generation,
        .key = key,
        .entry = entries[0],
    };
    make_node(kv, node, &live, &kv->models[model].spec, tokens, entries, seq_idx);
    link_node(kv, node);
    kv->node_aux[node].uses = 1;
    tell_inserted(kv, node, depth);
    if (parent != KV_NONE) {
        kv_prefix_hold(kv, parent); // by a child that is not quiet
    }
    return node;
}

void kv_prefix_link(kv_cache *kv, uint32_t node, uint32_t depth) {
    uint32_t parent = kv_prefix_parent(kv, node);
    if (kv_spilled(kv, node)) {
        link_node(kv, node);
        tell_inserted(kv, node, depth);
        kv_spill_park(kv, node);
        return;
    }
    if (parent != KV_NONE && kv->node_aux[parent].uses & KV_CANDIDATE) {
        kv_evict_drop(kv, parent);
    }
    link_node(kv, node);
    count_quiet(kv, node, 1);
    tell_inserted(kv, node, depth);
    if (kv->policy->release) {
        kv->policy->release(&kv->policy_state, &kv->node_aux[node].rank);
    }
    kv_evict_add(kv, node);
}

// give_up_blocks takes the blocks of a node that is no longer live from the index.
static void give_up_blocks(kv_cache *kv, uint32_t node, const kv_model_spec *spec) {
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        uint32_t entry = *kv_node_entry(kv, node, g);
        if (entry != KV_NONE && kv_pool_unindex(kv, entry)) {
            kv->tenant_aux[spec->tenant].cached--;
        }
    }
}

uint32_t kv_prefix_shrink(kv_cache *kv, uint32_t node) {
    const kv_model_spec *spec = &kv->models[kv_node_model(kv, node)].spec;
    uint32_t entries[KV_MAX_GROUPS], num = 0;
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        uint32_t entry = *kv_node_entry(kv, node, g);
        bool goes = spec->groups[g].window_left >= 0 && entry != KV_NONE;
        entries[g] = goes && kv_pool_is_cached(kv, entry) ? entry : KV_NONE;
        num += entries[g] != KV_NONE;
    }
    if (num == 0) {
        return 0;
    }
    ATTND_ASSERT(kv->node_aux[node].uses > 0 && !(kv->node_aux[node].uses & KV_CANDIDATE));
    kv_redo_begin(kv);
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        if (entries[g] != KV_NONE) {
            kv_redo_put(kv, kv_node_entry(kv, node, g), KV_NONE);
        }
    }
    kv_redo_commit(kv);
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        if (entries[g] != KV_NONE && kv_pool_unindex(kv, entries[g])) {
            kv->tenant_aux[spec->tenant].cached--;
        }
    }
    return num;
}

// free_node makes a node free that is in no list any more.
static void free_node(kv_cache *kv, uint32_t node) {
    uint32_t model = kv_node_model(kv, node);
    const kv_led_spill was = kv_spilled(kv, node) ? kv->spills[node] : (kv_led_spill){0};
    if (kv->policy->evict) {
        kv->policy->evict(&kv->policy_state, &kv->node_aux[node].rank, kv->nodes[node].key);
    }
    unlink_node(kv, node);
    kv_redo_begin(kv);
    kv_redo_put(kv, &kv->nodes[node].owner, 0);
    kv_spill_leave(kv, node);
    kv_redo_commit(kv);
    if (was.tier) {
        kv_spill_left(kv, node, &was);
    }
    give_up_blocks(kv, node, &kv->models[model].spec);
    kv_slots_give_handle(&kv->lists->nodes, kv->node_next, node, kv->nodes[node].generation);
}

// child_gone makes a quiet node a candidate that has no child any more.
static void child_gone(kv_cache *kv, uint32_t parent) {
    if (parent != KV_NONE && kv->node_aux[parent].uses == 0 && !kv->node_aux[parent].down) {
        kv_evict_add(kv, parent);
    }
}

void kv_prefix_remove(kv_cache *kv, uint32_t node) {
    uint32_t model = kv_node_model(kv, node), parent = kv_prefix_parent(kv, node);
    bool leaves = kv->node_aux[node].uses & KV_LEAVING;
    if (kv_spilled(kv, node) || leaves) { // which is nobody's child
        if (!leaves) {
            kv_spill_unpark(kv, node);
        }
        free_node(kv, node);
        kv_model_node_gone(kv, model);
        return;
    }
    kv_evict_drop(kv, node);
    count_quiet(kv, node, UINT32_MAX);
    free_node(kv, node);
    child_gone(kv, parent);
    kv->evictions++;
    kv_model_node_gone(kv, model);
}

// ---- spilled nodes

uint32_t kv_prefix_child(const kv_cache *kv, uint32_t model, uint32_t parent,
                         const uint32_t *tokens) {
    return find_child(kv, model, parent, kv_prefix_key(kv, model, parent, tokens), tokens,
                      block_tokens_of(kv, model));
}

void kv_prefix_leave(kv_cache *kv, uint32_t node) {
    kv_evict_drop(kv, node);
    count_quiet(kv, node, UINT32_MAX);
    unlink_child(kv, node);
    kv->node_aux[node].uses = KV_LEAVING;
    child_gone(kv, kv_prefix_parent(kv, node));
}

bool kv_prefix_has_parent(const kv_cache *kv, uint32_t node, bool spilled) {
    uint32_t parent = kv_prefix_parent(kv, node);
    return parent == KV_NONE ||
           (kv->nodes[parent].owner != 0 &&
            kv->nodes[parent].generation == kv->nodes[node].parent_generation &&
            (spilled || !kv_spilled(kv, parent)));
}

bool kv_prefix_stay(kv_cache *kv, uint32_t node) {
    uint32_t parent = kv_prefix_parent(kv, node);
    if (!kv_prefix_has_parent(kv, node, false)) {
        return false;
    }
    if (parent != KV_NONE && kv->node_aux[parent].uses & KV_LEAVING && !kv_spill_stay(kv, parent)) {
        return false;
    }
    if (parent != KV_NONE && kv->node_aux[parent].uses & KV_CANDIDATE) {
        kv_evict_drop(kv, parent);
    }
    kv->node_aux[node].uses = 0;
    link_child(kv, node);
    count_quiet(kv, node, 1);
    return true;
}

void kv_prefix_left(kv_cache *kv, uint32_t node, const uint32_t *entries) {
    const kv_model_spec *spec = &kv->models[kv_node_model(kv, node)].spec;
    kv->evictions++;
    kv->node_aux[node].uses = 0;
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        if (entries[g] != KV_NONE && kv_pool_unindex(kv, entries[g])) {
            kv->tenant_aux[spec->tenant].cached--;
        }
    }
}

void kv_prefix_rejoin(kv_cache *kv, uint32_t node) {
    const kv_model_spec *spec = &kv->models[kv_node_model(kv, node)].spec;
    link_child(kv, node);
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        uint32_t entry = *kv_node_entry(kv, node, g);
        if (entry != KV_NONE) {
            kv_pool_index_block(kv, entry);
        }
    }
}
