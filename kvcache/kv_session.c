// Sessions, and the replies kept for them.
//
// Request r of a session is kept at r % 65: the window, the highest id seen and the 64 below it,
// has 65 ids, so two of one window never meet.  A kept reply is valid when it names the request
// itself and the session's generation; nothing has to be cleared when the window moves on or the
// slot gets another session.  A reply is part of the record that commits its operation, so an
// operation is never made without being answered, nor answered without being made.
#include "kvcache/kv_session.h"

#include <string.h>

#include "kvcache/kv_redo.h"
#include "kvcache/kv_seq.h"

uint32_t kv_session_find(const kv_cache *kv, uint64_t session) {
    uint32_t idx = (uint32_t)session;
    if (idx >= kv->lists->sessions.used || kv->sessions[idx].state != KV_LIVE ||
        kv->sessions[idx].generation != session >> 32) {
        return KV_NONE;
    }
    return idx;
}

// Committed by the record that makes the slot live under its new generation.
attnd_err kv_session_open(kv_cache *kv, uint32_t tenant, const uint8_t secret[KV_SECRET_BYTES],
                          uint64_t *session) {
    if (tenant >= kv->lists->tenants.used) {
        return ATTND_EINVAL;
    }
    uint32_t idx = kv_slots_take(&kv->lists->sessions, kv->session_next);
    if (idx == KV_NONE) {
        return ATTND_EBUSY;
    }
    kv_led_session *s = &kv->sessions[idx];
    kv_redo_begin(kv);
    kv_redo_put(kv, &s->state, KV_LIVE);
    kv_redo_put(kv, &s->generation, kv_next_generation(kv, KV_KIND_SESSION, s->generation));
    kv_redo_put(kv, &s->tenant, tenant);
    kv_redo_put_bytes(kv, s->secret, secret, KV_SECRET_BYTES);
    kv_redo_put64(kv, &s->highest, 0);
    kv_redo_commit(kv);
    kv->session_aux[idx] = (kv_session_aux){0};
    *session = kv_handle(s->generation, idx);
    return ATTND_OK;
}

// Each sequence goes by a record of its own, the session by the last one; whoever stops in between
// leaves a session with fewer sequences, which can be closed again.
attnd_err kv_session_close(kv_cache *kv, uint64_t session, uint64_t now_ms) {
    uint32_t idx = kv_session_find(kv, session);
    if (idx == KV_NONE) {
        return ATTND_ESTALE;
    }
    if (kv->session_aux[idx].steps > 0) {
        return ATTND_EBUSY;
    }
    while (kv->session_aux[idx].first_seq) {
        kv_seq_leave(kv, kv->session_aux[idx].first_seq - 1, now_ms);
    }
    kv_redo_begin(kv);
    kv_redo_put(kv, &kv->sessions[idx].state, KV_FREE);
    kv_redo_commit(kv);
    kv_slots_give_handle(&kv->lists->sessions, kv->session_next, idx, kv->sessions[idx].generation);
    return ATTND_OK;
}

uint64_t kv_session_highest(const kv_cache *kv, uint64_t session) {
    uint32_t idx = kv_session_find(kv, session);
    return idx == KV_NONE ? 0 : kv->sessions[idx].highest;
}

bool kv_session_next(const kv_cache *kv, uint32_t *cursor, kv_session_info *out) {
    for (uint32_t i = *cursor; i < kv->lists->sessions.used; i++) {
        const kv_led_session *s = &kv->sessions[i];
        if (s->state == KV_LIVE) {
            *out = (kv_session_info){
                .session = kv_handle(s->generation, i),
                .tenant = s->tenant,
                .highest = s->highest,
            };
            memcpy(out->secret, s->secret, sizeof(out->secret));
            for (uint32_t q = kv->session_aux[i].first_seq; q; q = kv->seq_aux[q - 1].next) {
                out->num_seqs++;
            }
            *cursor = i + 1;
            return true;
        }
    }
    *cursor = kv->lists->sessions.used;
    return false;
}

static uint64_t reply_slot(uint32_t session_idx, uint64_t request) {
    return (uint64_t)session_idx * KV_REPLIES + request % KV_REPLIES;
}

// find_reply: ATTND_OK and *slot, ATTND_ENOENT for a new id, ATTND_ESTALE for one below the window.
static attnd_err find_reply(const kv_cache *kv, uint32_t session_idx, uint64_t request,
                            uint64_t *slot) {
    const kv_led_session *s = &kv->sessions[session_idx];
    if (request == 0 || request > s->highest) {
        return ATTND_ENOENT;
    }
    if (s->highest - request > KV_REPLY_WINDOW) {
        return ATTND_ESTALE;
    }
    *slot = reply_slot(session_idx, request);
    const kv_led_reply *reply = &kv->replies[*slot];
    bool kept = reply->request == request && reply->generation == s->generation;
    return kept ? ATTND_OK : ATTND_ENOENT;
}

attnd_err kv_reply_find(const kv_cache *kv, kv_request rq, kv_reply *out) {
    uint32_t idx = kv_session_find(kv, rq.session);
    uint64_t slot;
    if (idx == KV_NONE) {
        return ATTND_ESTALE;
    }
    attnd_err err = find_reply(kv, idx, rq.request, &slot);
    if (err) {
        return err;
    }
    const kv_led_reply *reply = &kv->replies[slot];
    *out = (kv_reply){
        .request = reply->request,
        .op = reply->op,
        .num_values = reply->num_values,
        .id = reply->id,
        .values = kv->values + slot * 2 * kv->opts.max_step_seqs,
    };
    return ATTND_OK;
}

attnd_err kv_request_check(const kv_cache *kv, kv_request rq, bool own_calls, uint32_t *idx,
                           attnd_errinfo *info) {
    if (rq.session == 0 && own_calls) {
        ATTND_ASSERT(rq.request == 0);
        *idx = KV_NONE;
        return ATTND_OK;
    }
    uint32_t found = kv_session_find(kv, rq.session);
    if (found == KV_NONE) {
        return attnd_fail(info, ATTND_ESTALE, "session", "the session is gone");
    }
    uint64_t slot;
    attnd_err err = find_reply(kv, found, rq.request, &slot);
    if (err == ATTND_OK) {
        return attnd_fail(info, ATTND_EEXIST, "request", "request %llu was answered before",
                          (unsigned long long)rq.request);
    }
    if (err == ATTND_ESTALE) {
        return attnd_fail(info, ATTND_ESTALE, "request",
                          "request %llu lies more than %d below the highest",
                          (unsigned long long)rq.request, KV_REPLY_WINDOW);
    }
    *idx = found;
    return ATTND_OK;
}

uint32_t *kv_reply_put(kv_cache *kv, kv_request rq, kv_op op, uint64_t id, uint32_t num_values) {
    if (rq.request == 0) {
        return NULL;
    }
    uint32_t idx = (uint32_t)rq.session;
    kv_led_session *s = &kv->sessions[idx];
    uint64_t slot = reply_slot(idx, rq.request);
    kv_led_reply reply = {
        .request = rq.request,
        .id = id,
        .generation = s->generation,
        .op = op,
        .num_values = num_values,
    };
    kv_redo_put_bytes(kv, &kv->replies[slot], &reply, sizeof(reply));
    if (rq.request > s->highest) {
        kv_redo_put64(kv, &s->highest, rq.request);
    }
    return kv->values + slot * 2 * kv->opts.max_step_seqs;
}
