// srv_resume goes on with the cache of the run before, when the process was started with its
// descriptors (srv_inherit.h): "arena", the memory of the blocks, and "ledger", which says what
// lies there.  What was made anew is handed back to be kept (srv_notify_store).  Sessions of the
// run before are orphans for server.reattach_timeout; then they are closed.  Loop thread only.
//
// Nothing of the run before may still write to the arena.  On the host it was that process, which
// is gone.  On a GPU it is what its context still ran, which the driver ends when the process's
// last descriptor of the device is closed: in its exit, before anybody can reap it.  Whoever starts
// the next run does so after having reaped the one before (srv_keeper.h; systemd does, too).
#ifndef ATTND_SERVER_SRV_RESUME_H
#define ATTND_SERVER_SRV_RESUME_H

#include "server/srv_core.h"

// srv_resume_open_cb opens an arena: the one behind a descriptor, whose ledger says that it has
// that many bytes (0 = it does not say), or a new one when fd is -1.  ATTND_EINVAL: the descriptor
// is none that can be gone on with.  Other errors end the start, and lose nothing.
typedef attnd_err srv_resume_open_cb(void *ctx, int fd, uint64_t bytes, kv_arena *arena,
                                     attnd_errinfo *info);

// srv_resume_arena opens the arena that was handed over, or makes one.  *ledger_fd is that of the
// ledger that belongs to it, -1 for none.  Errors are those of open.
attnd_err srv_resume_arena(kv_arena *arena, srv_resume_open_cb *open, void *ctx, int *ledger_fd,
                           attnd_errinfo *info);

// srv_resume_later is for a start that ends because no device could be opened, whatever the error
// was: to make a context is refused while MPS ends (cudaErrorMpsServerNotReady and its kind) and
// while another process has the device to itself (cudaErrorDevicesUnavailable); there is no driver,
// or no device, while the driver is loaded anew (ATTND_ENOTSUP, cudaErrorSystemNotReady); and
// memory is short while others have not let go of theirs (ATTND_ENOMEM).  All that may pass, none
// of it speaks against the cache.  ATTND_EINVAL of srv_resume_open_cb, which does, never gets here,
// nor does what comes behind the opening, as of the ledger.
//
// A keeper (srv_keeper.h) is told why, and says so in our place: info->text is left empty.
void srv_resume_later(attnd_errinfo *info);

// srv_resume_give_up has the next run begin with an empty cache.
void srv_resume_give_up(void);

// srv_resume_cache recovers the cache, or makes an empty one and says why.  ATTND_ENOMEM: there is
// no memory to recover it; nothing is lost by another start.
attnd_err srv_resume_cache(kv_cache **kv, const kv_arena *arena, const kv_opts *opts, int ledger_fd,
                           attnd_errinfo *info);

// srv_resume_sessions makes the recovered cache's sessions orphans, once the tenants are known.
void srv_resume_sessions(srv_core *core);

// srv_resume_expire closes orphans past their time; returns when, UINT64_MAX = there are none.
uint64_t srv_resume_expire(srv_core *core, uint64_t now_ms);

#endif
