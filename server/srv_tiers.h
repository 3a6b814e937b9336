// srv_tiers opens the tiers that the configuration names and lets the loop hear of copies that have
// ended.  The memory of [tier] memory survives with the ledger, as the descriptor "tier"; the file
// by its name.  A tier that cannot be opened, or that fails later, is off and counted, and the
// daemon serves without it.  Loop thread only.
#ifndef ATTND_SERVER_SRV_TIERS_H
#define ATTND_SERVER_SRV_TIERS_H

#include <uv.h>

#include "server/srv_core.h"

typedef struct srv_tiers srv_tiers;

// srv_tiers_open opens the tiers of core's cache, and drops what the ledger says is in others.
// Called before the first step.  *out is NULL when none is configured.  ATTND_ENOMEM.
attnd_err srv_tiers_open(srv_tiers **out, uv_loop_t *loop, srv_core *core, attnd_errinfo *info);

// srv_tiers_close ends the tiers; copies under way are waited for.  srv_tiers_free follows when the
// loop has closed the handles, before the cache is freed.  Both accept NULL.
void srv_tiers_close(srv_tiers *t);
void srv_tiers_free(srv_tiers *t);

// srv_tiers_describe adds them to stats.
void srv_tiers_describe(const srv_tiers *t, const kv_cache *kv, struct cJSON *out);

#endif
