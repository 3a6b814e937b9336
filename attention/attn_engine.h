// attn_engine has the engines of clients (attnd_connect_opts.engine): attention by a client's own
// threads, or in its own streams, over the daemon's arena; and what hands attention over to the
// daemon in the client's streams.  Constants; any thread.
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

// attn_engine_cuda is for an arena in a GPU's memory, in a library that was built with CUDA.  The
// daemon and the client need no MPS, and each its own context.  q, k, v, out and lse are that GPU's
// memory, aligned to 16 bytes, and must stay until the attend has been done in
// attnd_attend_args.stream, which is one and the same for all layers of a step.  Nothing is copied.
// What the kernels do not take is refused by name (ATTND_ENOTSUP).  They take models of head_dim =
// v_head_dim = 64 or 128, dtype = kv_dtype = bfloat16 or float16, without k_scale and v_scale, and
// block_tokens a multiple of 16; strides of q, k, v and out that are multiples of 16 bytes.
const struct attnd_engine *attn_engine_cuda(void);

// attn_engine_cuda_service hands attends over to the daemon (service mode), in a library that was
// built with CUDA.  The client's GPU is the one that is current at attnd_connect: the one that the
// daemon computes on, or one that has peer access to it.  q, k, v, out and lse are memory of it,
// out and lse contiguous; what does not lie in the region is copied in the stream, by one copy for
// each tensor whose heads follow each other, else one for each head.
const struct attnd_engine *attn_engine_cuda_service(void);

#ifdef __cplusplus
}
#endif

#endif
