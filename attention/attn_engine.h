// attn_engine has the engines of in-process clients (proto/client/attnd_engine.h): attention by a
// client's own threads, or in its own streams, over the daemon's arena.  Constants; any thread.
//
//     attnd_connect_opts opts = {.engine = attn_engine_cpu()};
#ifndef ATTND_ATTENTION_ATTN_ENGINE_H
#define ATTND_ATTENTION_ATTN_ENGINE_H

#ifdef __cplusplus
extern "C" {
#endif

struct attnd_engine;

// attn_engine_cpu is for an arena in host memory.  A launch runs on a team of
// attnd_connect_opts.engine_threads threads, the caller's included, one launch at a time.  q, k, v,
// out and lse are host memory; nothing is copied but k and v, into the arena.
const struct attnd_engine *attn_engine_cpu(void);

#ifdef __cplusplus
}
#endif

#endif
