// Makes and frees a cache: checks the options, maps the ledger, and publishes its first record, the
// one that says what the region is.
#include <stdlib.h>
#include <sys/random.h>

#include "kvcache/kv_ledger.h"
#include "kvcache/kv_redo.h"

attnd_err kv_opts_check(const kv_arena *arena, const kv_opts *o, attnd_errinfo *info) {
    const struct {
        const char *field;
        uint32_t value;
    } counts[] = {
        {"max_blocks", o->max_blocks},         {"max_seqs", o->max_seqs},
        {"max_seq_blocks", o->max_seq_blocks}, {"max_models", o->max_models},
        {"max_tenants", o->max_tenants},       {"max_sessions", o->max_sessions},
        {"max_steps", o->max_steps},           {"max_step_seqs", o->max_step_seqs},
    };
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        if (counts[i].value == 0 || counts[i].value > INT32_MAX) {
            return attnd_fail(info, ATTND_EINVAL, counts[i].field,
                              "%s is %u: it must be from 1 to 2147483647", counts[i].field,
                              counts[i].value);
        }
    }
    if (o->prefix_blocks > INT32_MAX || o->prefix_block_tokens > 1 << 20 ||
        (o->prefix_blocks > 0 && o->prefix_block_tokens == 0)) {
        bool blocks = o->prefix_blocks > INT32_MAX;
        return attnd_fail(info, ATTND_EINVAL, blocks ? "prefix_blocks" : "prefix_block_tokens",
                          "%u cached blocks of up to %u tokens: at most 2147483647 of 1 to 1048576 "
                          "are possible",
                          o->prefix_blocks, o->prefix_block_tokens);
    }
    uint32_t num_policies = 0;
    while (kv_policies[num_policies]) {
        num_policies++;
    }
    if (o->policy >= num_policies) {
        return attnd_fail(info, ATTND_EINVAL, "policy", "there is no policy %u", o->policy);
    }
    if (o->max_step_seqs > 1 << 20 || o->max_models > 1 << 20) {
        return attnd_fail(info, ATTND_EINVAL,
                          o->max_models > 1 << 20 ? "max_models" : "max_step_seqs",
                          "at most 1048576 are possible");
    }
    if (o->slab_bytes == 0 || o->slab_bytes % KV_BLOCK_UNIT || o->slab_bytes > arena->bytes) {
        return attnd_fail(info, ATTND_EINVAL, "slab_bytes",
                          "a slab of %llu bytes: it must be a multiple of %d and fit the arena of "
                          "%llu bytes",
                          (unsigned long long)o->slab_bytes, KV_BLOCK_UNIT,
                          (unsigned long long)arena->bytes);
    }
    if (arena->bytes / KV_BLOCK_UNIT > UINT32_MAX) {
        return attnd_fail(info, ATTND_EINVAL, "arena", "an arena of %llu bytes: at most 1 TiB",
                          (unsigned long long)arena->bytes);
    }
    if (arena->bytes / o->slab_bytes > o->max_blocks) {
        return attnd_fail(info, ATTND_EINVAL, "max_blocks",
                          "%u blocks: each of the %llu slabs holds at least one", o->max_blocks,
                          (unsigned long long)(arena->bytes / o->slab_bytes));
    }
    return ATTND_OK;
}

void kv_lists_init(kv_cache *kv) {
    kv_led_lists *lists = kv->lists;
    lists->tenants.cap = kv->opts.max_tenants;
    lists->models.cap = kv->opts.max_models;
    lists->classes.cap = kv->opts.max_models * KV_MAX_GROUPS;
    lists->slabs.cap = kv->num_slabs;
    lists->sessions.cap = kv->opts.max_sessions;
    lists->steps.cap = kv->opts.max_steps;
    lists->seqs.cap = kv->opts.max_seqs;
    lists->nodes.cap = kv->opts.prefix_blocks;
    kv->policy = kv_policies[kv->opts.policy];
    uint64_t past = (uint64_t)kv->opts.prefix_blocks * KV_POLICY_PAST;
    kv->policy_state = (kv_policy_state){
        .num_past = past < UINT32_MAX ? (uint32_t)past : UINT32_MAX,
        .past = kv->past,
    };
}

// Committed by the record that holds magic, version and options.
static void format(kv_cache *kv, uint64_t salt) {
    kv_lists_init(kv);
    kv->lists->next_expiry = KV_NEVER;
    kv_redo_begin(kv);
    kv_head_put(kv, (kv_led_head){
                        .magic = KV_LEDGER_MAGIC,
                        .version = KV_LEDGER_VERSION,
                        .arena_bytes = kv->arena->bytes,
                        .salt = salt,
                        .opts = kv->opts,
                    });
    kv_redo_commit(kv);
}

attnd_err kv_create(kv_cache **out, const kv_arena *arena, const kv_opts *opts,
                    attnd_errinfo *info) {
    attnd_err err = kv_opts_check(arena, opts, info);
    uint64_t salt;
    if (err) {
        return err;
    }
    if (getrandom(&salt, sizeof(salt), 0) != (ssize_t)sizeof(salt)) {
        return attnd_fail(info, ATTND_EIO, NULL, "no random bytes for a ledger");
    }
    kv_cache *kv = calloc(1, sizeof(*kv));
    if (!kv) {
        return attnd_fail(info, ATTND_ENOMEM, NULL, "no memory for a cache");
    }
    kv->arena = arena;
    kv->opts = *opts;
    err = kv_ledger_open(kv, -1, info);
    if (err) {
        free(kv);
        return err;
    }
    format(kv, salt);
    *out = kv;
    return ATTND_OK;
}

void kv_free(kv_cache *kv) {
    if (kv) {
        kv_ledger_close(kv);
        free(kv);
    }
}

int kv_ledger_fd(const kv_cache *kv) {
    return kv->fd;
}

uint64_t kv_salt(const kv_cache *kv) {
    return kv->head->salt;
}
