// kv_repair finds the units of the ledger that have a wrong checksum and drops what lies in them:
// the first part of kv_recover.  Loop thread only.
#ifndef ATTND_KVCACHE_KV_REPAIR_H
#define ATTND_KVCACHE_KV_REPAIR_H

#include "kvcache/kv_ledger.h"

// kv_repair makes every unit good again and counts in *found what was lost.  A slot that is cleared
// gets the highest generation that its handles can have had.  ATTND_ENOMEM, before any change.
attnd_err kv_repair(kv_cache *kv, kv_recovered *found, attnd_errinfo *info);

// kv_drop_session puts into the open redo record that a session is gone.
void kv_drop_session(kv_cache *kv, uint32_t idx);

// kv_used returns how many elements of an array, num of them of size bytes, may have been written:
// memory behind them was never touched.
uint32_t kv_used(const kv_cache *kv, const void *array, uint64_t num, uint64_t size);

#endif
