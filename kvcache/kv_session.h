// kv_session: what the rest of kvcache asks of sessions (the public part is in kv_cache.h).
#ifndef ATTND_KVCACHE_KV_SESSION_H
#define ATTND_KVCACHE_KV_SESSION_H

#include "kvcache/kv_ledger.h"

// kv_session_find returns the index of a live session, KV_NONE for a handle that is gone.
uint32_t kv_session_find(const kv_cache *kv, uint64_t session);

// kv_request_check checks that the session lives and that the request id was not used before:
// ATTND_ESTALE (no such session, or an id below the window), ATTND_EEXIST (answered already).  With
// own_calls, session 0 passes: attnd itself; *idx is then KV_NONE.
attnd_err kv_request_check(const kv_cache *kv, kv_request rq, bool own_calls, uint32_t *idx,
                           attnd_errinfo *info);

// kv_reply_put adds the reply to the open redo record and returns where its values go [num_values],
// for the caller to kv_redo_put them; NULL when request = 0, of which nothing is kept.
uint32_t *kv_reply_put(kv_cache *kv, kv_request rq, kv_op op, uint64_t id, uint32_t num_values);

#endif
