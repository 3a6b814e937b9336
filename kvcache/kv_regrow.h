// kv_regrow takes over the prefix tree of a recovered ledger: the part of kv_recover behind the
// sequences.  A node is taken over when its parent is, its token ids have its key, and each of its
// blocks is one of its model's and of no other node; the others are dropped and counted.  Then
// sequences become users of their nodes again.  Loop thread only.
#ifndef ATTND_KVCACHE_KV_REGROW_H
#define ATTND_KVCACHE_KV_REGROW_H

#include "kvcache/kv_ledger.h"

// kv_regrow goes through the nodes, then through the live sequences.  owners [num_slabs,
// slab_blocks] has the model + 1 of whom a block is, and is added to.  ATTND_ENOMEM, before any
// change.
attnd_err kv_regrow(kv_cache *kv, uint32_t *owners, kv_recovered *found, attnd_errinfo *info);

#endif
