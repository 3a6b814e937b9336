// srv_resume goes on with the cache of the run before, when the process was started with its
// descriptors (srv_inherit.h): "arena", the memory of the blocks, and "ledger", which says what
// lies there.  What was made anew is handed back to be kept (srv_notify_store).  Sessions of the
// run before are orphans for server.reattach_timeout; then they are closed.  Loop thread only.
#ifndef ATTND_SERVER_SRV_RESUME_H
#define ATTND_SERVER_SRV_RESUME_H

#include "server/srv_core.h"

// srv_resume_arena opens the arena that was handed over, or makes one.  *ledger_fd is that of the
// ledger that belongs to it, -1 for none.  ATTND_ENOMEM, ATTND_EINVAL.
attnd_err srv_resume_arena(kv_arena *arena, const srv_conf *conf, int *ledger_fd,
                           attnd_errinfo *info);

// srv_resume_nothing gives up what was handed over, if anything, and says why.  The cache of an
// arena on a device ends with the process.
void srv_resume_nothing(const char *why);

// srv_resume_cache recovers the cache, or makes an empty one and says why.  ATTND_ENOMEM: there is
// no memory to recover it; nothing is lost by another start.
attnd_err srv_resume_cache(kv_cache **kv, const kv_arena *arena, const kv_opts *opts, int ledger_fd,
                           attnd_errinfo *info);

// srv_resume_sessions makes the recovered cache's sessions orphans, once the tenants are known.
void srv_resume_sessions(srv_core *core);

// srv_resume_expire closes orphans past their time; returns when, UINT64_MAX = there are none.
uint64_t srv_resume_expire(srv_core *core, uint64_t now_ms);

#endif
