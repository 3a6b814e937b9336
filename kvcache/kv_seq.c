// Sequences: a committed length and a table of blocks per layer group.
//
// A fork shares its parent's blocks by reference.  Blocks that are full are never written again; a
// partial last block is written in place only by a step that found it unshared, and only behind the
// committed length, so a fork made while that step is open shares rows that nobody writes.  Any
// other writer takes a copy (kv_step.c).
//
// Kept sequences are found by (tenant, name) through buckets; the sequences of a session are
// linked. A sequence that nobody holds has to be attached before anything is done with it.
#include "kvcache/kv_seq.h"

#include "kvcache/kv_chain.h"
#include "kvcache/kv_model.h"
#include "kvcache/kv_name.h"
#include "kvcache/kv_pool.h"
#include "kvcache/kv_redo.h"
#include "kvcache/kv_session.h"
#include "kvcache/kv_step.h"
#include "kvcache/kv_sum.h"
#include "kvcache/kv_window.h"

uint32_t kv_seq_index(const kv_cache *kv, uint64_t seq) {
    uint32_t idx = (uint32_t)seq;
    if (idx >= kv->lists->seqs.used || kv->seqs[idx].state != KV_LIVE ||
        kv->seqs[idx].generation != seq >> 32) {
        return KV_NONE;
    }
    return idx;
}

attnd_err kv_seq_find(const kv_cache *kv, uint32_t session_idx, uint64_t seq, uint32_t *idx,
                      attnd_errinfo *info) {
    unsigned long long handle = seq;
    uint32_t found = kv_seq_index(kv, seq);
    if (found != KV_NONE && session_idx == KV_NONE) {
        *idx = found;
        return ATTND_OK;
    }
    if (found == KV_NONE || kv->seqs[found].tenant != kv->sessions[session_idx].tenant) {
        return attnd_fail(info, ATTND_ESTALE, "seq", "sequence %llx does not exist", handle);
    }
    if (kv->seqs[found].session == 0) {
        return attnd_fail(info, ATTND_EPERM, "seq", "sequence %llx must be attached first", handle);
    }
    if (kv->seqs[found].session != kv_handle(kv->sessions[session_idx].generation, session_idx)) {
        return attnd_fail(info, ATTND_EBUSY, "seq", "sequence %llx is held by another session",
                          handle);
    }
    *idx = found;
    return ATTND_OK;
}

// find_idle is kv_seq_find for calls that an open step forbids.
static attnd_err find_idle(const kv_cache *kv, kv_request rq, uint64_t seq, bool own_calls,
                           uint32_t *idx, attnd_errinfo *info) {
    uint32_t session_idx;
    *idx = KV_NONE;
    attnd_err err = kv_request_check(kv, rq, own_calls, &session_idx, info);
    if (err == ATTND_OK) {
        err = kv_seq_find(kv, session_idx, seq, idx, info);
    }
    if (err == ATTND_OK && kv->seq_aux[*idx].step) {
        return attnd_fail(info, ATTND_EBUSY, "seq", "sequence %llx has an open step",
                          (unsigned long long)seq);
    }
    return err;
}

// ---- the session's list and the buckets of names

void kv_seq_link(kv_cache *kv, uint32_t idx) {
    kv_session_aux *session = &kv->session_aux[(uint32_t)kv->seqs[idx].session];
    kv_seq_aux *aux = &kv->seq_aux[idx];
    aux->prev = 0;
    aux->next = session->first_seq;
    if (aux->next) {
        kv->seq_aux[aux->next - 1].prev = idx + 1;
    }
    session->first_seq = idx + 1;
}

static void unlink_seq(kv_cache *kv, uint32_t idx, uint64_t session) {
    kv_seq_aux *aux = &kv->seq_aux[idx];
    if (aux->prev) {
        kv->seq_aux[aux->prev - 1].next = aux->next;
    } else {
        kv->session_aux[(uint32_t)session].first_seq = aux->next;
    }
    if (aux->next) {
        kv->seq_aux[aux->next - 1].prev = aux->prev;
    }
}

static uint32_t *bucket_of(const kv_cache *kv, uint32_t tenant, const char name[KV_NAME_BYTES]) {
    uint32_t h = tenant * UINT32_C(2654435761);
    for (uint32_t i = 0; i < KV_NAME_BYTES && name[i]; i++) {
        h = (h ^ (uint8_t)name[i]) * UINT32_C(16777619);
    }
    return &kv->names[(h ^ h >> 16) & (kv->name_buckets - 1)];
}

static uint32_t find_name(const kv_cache *kv, uint32_t tenant, const char name[KV_NAME_BYTES]) {
    uint32_t link = *bucket_of(kv, tenant, name);
    while (link) {
        const kv_led_seq *s = &kv->seqs[link - 1];
        if (s->tenant == tenant && kv_name_equal(s->name, name)) {
            return link - 1;
        }
        link = kv->seq_aux[link - 1].next_name;
    }
    return KV_NONE;
}

void kv_seq_link_name(kv_cache *kv, uint32_t idx) {
    uint32_t *bucket = bucket_of(kv, kv->seqs[idx].tenant, kv->seqs[idx].name);
    kv->seq_aux[idx].next_name = *bucket;
    *bucket = idx + 1;
}

static void unlink_name(kv_cache *kv, uint32_t idx, const char name[KV_NAME_BYTES]) {
    uint32_t *link = bucket_of(kv, kv->seqs[idx].tenant, name);
    while (*link != idx + 1) {
        link = &kv->seq_aux[*link - 1].next_name;
    }
    *link = kv->seq_aux[idx].next_name;
}

// ---- making and freeing

// take_slot finds a free sequence; the caller puts the rest into the record that makes it live.
static attnd_err take_slot(kv_cache *kv, uint32_t *idx, attnd_errinfo *info) {
    *idx = kv_slots_take(&kv->lists->seqs, kv->seq_next);
    if (*idx == KV_NONE) {
        return attnd_fail(info, ATTND_EBUSY, NULL, "%u sequences exist: no more are possible",
                          kv->opts.max_seqs);
    }
    return ATTND_OK;
}

// make_live publishes the sequence together with its reply.  This is the committing store of
// kv_seq_create and kv_seq_fork.  A parent's tokens are shared, with the checksums of its tables.
static uint64_t make_live(kv_cache *kv, kv_request rq, kv_op op, uint32_t idx, uint32_t model,
                          uint32_t priority, const kv_led_seq *parent) {
    kv_led_seq *s = &kv->seqs[idx];
    kv_led_seq live = {
        .state = KV_LIVE,
        .tenant = kv->models[model].spec.tenant,
        .model = model,
        .session = rq.session,
        .expire_ms = KV_NEVER,
        .priority = priority,
    };
    if (parent) {
        live.committed = parent->committed;
        live.known = parent->known;
        live.chain = parent->chain;
        live.chain_generation = parent->chain_generation;
        live.tail_half = parent->tail_half;
        live.tail_sum = parent->tail_sum;
        memcpy(live.first, parent->first, sizeof(live.first));
        memcpy(live.table_sums, parent->table_sums, sizeof(live.table_sums));
    }
    for (uint32_t g = 0; g < KV_MAX_GROUPS; g++) {
        live.old_last[g] = KV_NONE;
    }
    kv_redo_begin(kv);
    live.generation = kv_next_generation(kv, KV_KIND_SEQ, s->generation);
    uint64_t handle = kv_handle(live.generation, idx);
    kv_redo_put_bytes(kv, s, &live, sizeof(live));
    uint32_t *values = kv_reply_put(kv, rq, op, handle, op == KV_OP_FORK);
    if (values && op == KV_OP_FORK) {
        kv_redo_put(kv, values, live.committed);
    }
    kv_redo_commit(kv);
    kv->seq_aux[idx] = (kv_seq_aux){0};
    kv->model_aux[model].seqs++;
    kv_seq_link(kv, idx);
    return handle;
}

attnd_err kv_seq_create(kv_cache *kv, kv_request rq, uint32_t model, uint64_t *seq,
                        attnd_errinfo *info) {
    return kv_seq_create_priority(kv, rq, model, 0, seq, info);
}

attnd_err kv_seq_create_priority(kv_cache *kv, kv_request rq, uint32_t model, uint32_t priority,
                                 uint64_t *seq, attnd_errinfo *info) {
    uint32_t session_idx, idx;
    attnd_err err = kv_request_check(kv, rq, false, &session_idx, info);
    if (err == ATTND_OK) {
        err = kv_model_find(kv, kv->sessions[session_idx].tenant, model, info);
    }
    if (err == ATTND_OK && priority > KV_MAX_PRIORITY) {
        err =
            attnd_fail(info, ATTND_EINVAL, "priority", "%u is above %d", priority, KV_MAX_PRIORITY);
    }
    if (err == ATTND_OK) {
        err = take_slot(kv, &idx, info);
    }
    if (err) {
        return err;
    }
    *seq = make_live(kv, rq, KV_OP_CREATE, idx, model, priority, NULL);
    return ATTND_OK;
}

// share_blocks fills the table of a sequence that is not live yet with the committed blocks that
// another has: behind an open step's copy of the last block lies the committed one.
static void share_blocks(kv_cache *kv, uint32_t from, uint32_t to) {
    const kv_led_seq *parent = &kv->seqs[from];
    const kv_model_spec *spec = &kv->models[parent->model].spec;
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        const uint32_t *src = kv_table(kv, from, g);
        uint32_t *dst = kv_table(kv, to, g);
        uint32_t num = kv_blocks_of(parent->committed, spec->groups[g].block_tokens);
        for (uint32_t b = 0; b < num; b++) {
            bool replaced = b == num - 1 && parent->old_last[g] != KV_NONE;
            uint32_t entry = b < parent->first[g] ? KV_NONE
                             : replaced           ? parent->old_last[g]
                                                  : src[b];
            kv_store(&dst[b], entry);
            if (entry != KV_NONE) {
                kv_pool_hold(kv, entry);
            }
        }
    }
}

attnd_err kv_seq_fork(kv_cache *kv, kv_request rq, uint64_t seq, uint64_t *forked,
                      uint32_t *committed, attnd_errinfo *info) {
    uint32_t session_idx, from = KV_NONE, to;
    attnd_err err = kv_request_check(kv, rq, false, &session_idx, info);
    if (err == ATTND_OK) {
        err = kv_seq_find(kv, session_idx, seq, &from, info);
    }
    if (err == ATTND_OK) {
        err = take_slot(kv, &to, info);
    }
    if (err) {
        return err;
    }
    const kv_led_seq *parent = &kv->seqs[from];
    share_blocks(kv, from, to);
    kv_chain_copy(kv, from, to);
    *committed = parent->committed;
    *forked = make_live(kv, rq, KV_OP_FORK, to, parent->model, parent->priority, parent);
    kv_chain_forked(kv, from, to);
    return ATTND_OK;
}

void kv_seq_give_block(kv_cache *kv, uint32_t tenant, uint32_t entry) {
    bool indexed = kv_pool_is_indexed(kv, entry);
    if (kv_pool_rele(kv, entry)) {
        kv->tenant_aux[tenant].blocks--;
        kv->tenant_aux[tenant].cached += indexed;
    }
}

void kv_seq_hold_block(kv_cache *kv, uint32_t tenant, uint32_t entry) {
    if (kv_pool_hold(kv, entry)) {
        kv->tenant_aux[tenant].cached--;
        kv->tenant_aux[tenant].blocks++;
    }
}

void kv_seq_give_blocks(kv_cache *kv, uint32_t idx, uint32_t group, uint32_t from, uint32_t to) {
    const uint32_t *table = kv_table(kv, idx, group);
    for (uint32_t b = from; b < to; b++) {
        if (table[b] != KV_NONE) {
            kv_seq_give_block(kv, kv->seqs[idx].tenant, table[b]);
        }
    }
}

// forget_expiry makes kv_expire look again when it waits for this sequence, which now goes.
static void forget_expiry(kv_cache *kv, const kv_led_seq *s) {
    if (s->expire_ms == kv->lists->next_expiry) {
        kv->lists->next_expiry = 0;
    }
}

// free_seq frees a sequence without an open step.  Committed by the record that says it is free.
static void free_seq(kv_cache *kv, kv_request rq, uint32_t idx) {
    kv_led_seq *s = &kv->seqs[idx];
    kv_redo_begin(kv);
    kv_redo_put(kv, &s->state, KV_FREE);
    kv_reply_put(kv, rq, KV_OP_FREE, kv_handle(s->generation, idx), 0);
    kv_redo_commit(kv);
    const kv_model_spec *spec = &kv->models[s->model].spec;
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        kv_seq_give_blocks(kv, idx, g, s->first[g],
                           kv_blocks_of(s->committed, spec->groups[g].block_tokens));
    }
    kv_chain_drop(kv, idx);
    if (s->name[0]) {
        unlink_name(kv, idx, s->name);
    }
    if (s->session) {
        unlink_seq(kv, idx, s->session);
    }
    forget_expiry(kv, s);
    kv_model_seq_gone(kv, s->model);
    kv_slots_give_handle(&kv->lists->seqs, kv->seq_next, idx, s->generation);
}

attnd_err kv_seq_free(kv_cache *kv, kv_request rq, uint64_t seq, attnd_errinfo *info) {
    uint32_t idx;
    attnd_err err = find_idle(kv, rq, seq, true, &idx, info);
    if (err) {
        return err;
    }
    free_seq(kv, rq, idx);
    return ATTND_OK;
}

// put_cut puts what truncating to len changes of a sequence's tables.  What is left begins where it
// did, since kv_window_check said that len needs nothing before that; of length 0 it begins anew.
static void put_cut(kv_cache *kv, uint32_t idx, uint32_t len) {
    kv_led_seq *s = &kv->seqs[idx];
    const kv_model_spec *spec = &kv->models[s->model].spec;
    kv_redo_put(kv, &s->committed, len);
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        uint32_t block_tokens = spec->groups[g].block_tokens;
        uint32_t end = kv_blocks_of(len, block_tokens);
        uint64_t gone = kv_sum_entries(kv_table(kv, idx, g), len > 0 ? end : s->first[g],
                                       kv_blocks_of(s->committed, block_tokens));
        kv_redo_put64(kv, &s->table_sums[g], s->table_sums[g] - gone);
        if (len == 0 && s->first[g] > 0) {
            kv_redo_put(kv, &s->first[g], 0);
        }
    }
}

// Committed by the record that holds the length.
attnd_err kv_seq_truncate(kv_cache *kv, kv_request rq, uint64_t seq, uint32_t len,
                          attnd_errinfo *info) {
    uint32_t idx;
    attnd_err err = find_idle(kv, rq, seq, false, &idx, info);
    if (err) {
        return err;
    }
    kv_led_seq *s = &kv->seqs[idx];
    uint32_t before = s->committed;
    if (len > before) {
        return attnd_fail(info, ATTND_EINVAL, "len", "the sequence has %u tokens, not %u", before,
                          len);
    }
    if (len > 0 && len < before && (err = kv_window_check(kv, idx, len, "len", info))) {
        return err;
    }
    const kv_model_spec *spec = &kv->models[s->model].spec;
    kv_redo_begin(kv);
    put_cut(kv, idx, len);
    kv_chain_put_cut(kv, idx, len);
    kv_reply_put(kv, rq, KV_OP_TRUNCATE, seq, 0);
    kv_redo_commit(kv);
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        uint32_t block_tokens = spec->groups[g].block_tokens;
        kv_seq_give_blocks(kv, idx, g, kv_blocks_of(len, block_tokens),
                           kv_blocks_of(before, block_tokens));
    }
    kv_chain_cut(kv, idx);
    return ATTND_OK;
}

// ---- keeping

// Committed by the record that holds name and time to live.
attnd_err kv_seq_keep(kv_cache *kv, kv_request rq, uint64_t seq, const char *name, uint64_t ttl_ms,
                      attnd_errinfo *info) {
    uint32_t idx;
    char fixed[KV_NAME_BYTES], old[KV_NAME_BYTES];
    attnd_err err = find_idle(kv, rq, seq, false, &idx, info);
    if (err) {
        return err;
    }
    if (!kv_name_read(fixed, name)) {
        return attnd_fail(info, ATTND_EINVAL, "name", "a name has at most %d bytes",
                          KV_NAME_BYTES - 1);
    }
    kv_led_seq *s = &kv->seqs[idx];
    uint32_t other = fixed[0] ? find_name(kv, s->tenant, fixed) : KV_NONE;
    if (other != KV_NONE && other != idx) {
        return attnd_fail(info, ATTND_EEXIST, "name", "another sequence is kept as %s", fixed);
    }
    memcpy(old, s->name, sizeof(old));
    kv_redo_begin(kv);
    kv_redo_put_bytes(kv, s->name, fixed, sizeof(fixed));
    kv_redo_put64(kv, &s->ttl_ms, fixed[0] ? ttl_ms : 0);
    kv_reply_put(kv, rq, KV_OP_KEEP, seq, 0);
    kv_redo_commit(kv);
    if (old[0]) {
        unlink_name(kv, idx, old);
    }
    if (fixed[0]) {
        kv_seq_link_name(kv, idx);
    }
    return ATTND_OK;
}

// Committed by the record that holds the holder.
attnd_err kv_seq_attach(kv_cache *kv, kv_request rq, uint32_t model, const char *name,
                        uint64_t *seq, uint32_t *committed, attnd_errinfo *info) {
    uint32_t session_idx;
    char fixed[KV_NAME_BYTES];
    attnd_err err = kv_request_check(kv, rq, false, &session_idx, info);
    if (err == ATTND_OK) {
        err = kv_model_find(kv, kv->sessions[session_idx].tenant, model, info);
    }
    if (err) {
        return err;
    }
    bool named = name[0] && kv_name_read(fixed, name);
    uint32_t idx = named ? find_name(kv, kv->sessions[session_idx].tenant, fixed) : KV_NONE;
    if (idx == KV_NONE || kv->seqs[idx].model != model) {
        return attnd_fail(info, ATTND_ENOENT, "name",
                          "the model has no kept sequence of that name");
    }
    kv_led_seq *s = &kv->seqs[idx];
    bool held = s->session != 0;
    if (held && s->session != rq.session) {
        return attnd_fail(info, ATTND_EBUSY, "name", "the sequence is held by another session");
    }
    *seq = kv_handle(s->generation, idx);
    *committed = s->committed;
    forget_expiry(kv, s);
    kv_redo_begin(kv);
    kv_redo_put64(kv, &s->session, rq.session);
    kv_redo_put64(kv, &s->expire_ms, KV_NEVER);
    uint32_t *values = kv_reply_put(kv, rq, KV_OP_ATTACH, *seq, 1);
    if (values) {
        kv_redo_put(kv, values, s->committed);
    }
    kv_redo_commit(kv);
    if (!held) {
        kv_seq_link(kv, idx);
    }
    return ATTND_OK;
}

void kv_seq_leave(kv_cache *kv, uint32_t idx, uint64_t now_ms) {
    kv_led_seq *s = &kv->seqs[idx];
    if (s->name[0] == '\0') {
        free_seq(kv, (kv_request){0}, idx);
        return;
    }
    uint64_t session = s->session, expire_ms = KV_NEVER;
    if (s->ttl_ms > 0 && s->ttl_ms < KV_NEVER - now_ms) {
        expire_ms = now_ms + s->ttl_ms;
    }
    kv_redo_begin(kv);
    kv_redo_put64(kv, &s->session, 0);
    kv_redo_put64(kv, &s->expire_ms, expire_ms);
    kv_redo_commit(kv); // the sequence is held by none
    unlink_seq(kv, idx, session);
    if (expire_ms < kv->lists->next_expiry) {
        kv->lists->next_expiry = expire_ms;
    }
}

uint64_t kv_expire(kv_cache *kv, uint64_t now_ms) {
    if (now_ms < kv->lists->next_expiry) {
        return kv->lists->next_expiry;
    }
    uint64_t next = KV_NEVER;
    for (uint32_t i = 0; i < kv->lists->seqs.used; i++) {
        const kv_led_seq *s = &kv->seqs[i];
        if (s->state != KV_LIVE || s->expire_ms == KV_NEVER) {
            continue;
        }
        if (s->expire_ms <= now_ms) {
            free_seq(kv, (kv_request){0}, i);
        } else if (s->expire_ms < next) {
            next = s->expire_ms;
        }
    }
    kv->lists->next_expiry = next;
    return next;
}

// ---- looking

// blocks_of counts the references of the sequence to blocks.
static uint32_t blocks_of(const kv_cache *kv, uint32_t idx) {
    const kv_led_seq *s = &kv->seqs[idx];
    const kv_model_spec *spec = &kv->models[s->model].spec;
    uint32_t len = s->committed, blocks = 0, found = 0;
    uint64_t at = kv_step_place(kv, idx);
    if (at != KV_NONE) {
        len += kv->step_seqs[at].new_len + kv->step_seqs[at].reserve;
        found = kv->step_hits[at].blocks;
    }
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        const kv_group_spec *group = &spec->groups[g];
        uint32_t have = kv_blocks_of(s->committed, group->block_tokens);
        uint32_t left_out = kv_window_found(kv, group, have, found) - have;
        blocks += kv_blocks_of(len, group->block_tokens) - s->first[g] - left_out;
        blocks += s->old_last[g] != KV_NONE;
    }
    return blocks;
}

static void describe(const kv_cache *kv, uint32_t idx, kv_seq_info *out) {
    const kv_led_seq *s = &kv->seqs[idx];
    *out = (kv_seq_info){
        .seq = kv_handle(s->generation, idx),
        .session = s->session,
        .model = s->model,
        .committed = s->committed,
        .blocks = blocks_of(kv, idx),
        .in_step = kv->seq_aux[idx].step != 0,
        .ttl_ms = s->ttl_ms,
        .priority = s->priority,
    };
    memcpy(out->name, s->name, sizeof(out->name));
}

attnd_err kv_seq_get(const kv_cache *kv, uint64_t session, uint64_t seq, kv_seq_info *out) {
    uint32_t idx = kv_seq_index(kv, seq);
    uint32_t session_idx = kv_session_find(kv, session);
    if (idx == KV_NONE ||
        (session != 0 &&
         (session_idx == KV_NONE || kv->sessions[session_idx].tenant != kv->seqs[idx].tenant))) {
        return ATTND_ESTALE;
    }
    describe(kv, idx, out);
    return ATTND_OK;
}

bool kv_seq_next(const kv_cache *kv, uint32_t tenant, uint32_t *cursor, kv_seq_info *out) {
    for (uint32_t i = *cursor; i < kv->lists->seqs.used; i++) {
        if (kv->seqs[i].state == KV_LIVE && kv->seqs[i].tenant == tenant) {
            describe(kv, i, out);
            *cursor = i + 1;
            return true;
        }
    }
    *cursor = kv->lists->seqs.used;
    return false;
}
