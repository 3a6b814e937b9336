// The engine for an arena in host memory: a mapping of its memfd, and attn_cpu.
//
// A child of fork does not get the mapping: the daemon knows of one process (srv_process.h).
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "attention/attn_engine.h"
#include "attention/attn_engine_core.h"

static attnd_err check_memory(const attnd_engine_opts *opts, attnd_errinfo *info) {
    static const uint8_t host[sizeof(opts->device)];
    if (memcmp(opts->device, host, sizeof(host)) != 0) {
        return attnd_fail(info, ATTND_ENOTSUP, "engine", "the daemon's arena is a GPU's memory");
    }
    struct stat st;
    int seals = fcntl(opts->fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(opts->fd, &st) != 0 ||
        (uint64_t)st.st_size < opts->bytes) {
        return attnd_fail(info, ATTND_EPROTO, "engine", "the arena could change its size");
    }
    return ATTND_OK;
}

static attnd_err engine_open(attn_engine *e, const attnd_engine_opts *opts, attnd_errinfo *info) {
    attnd_err err = check_memory(opts, info);
    if (err) {
        return err;
    }
    void *base = mmap(NULL, opts->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, opts->fd, 0);
    if (base == MAP_FAILED) {
        return attnd_fail(info, ATTND_ENOMEM, "engine", "mmap of an arena of %llu bytes: %s",
                          (unsigned long long)opts->bytes, strerror(errno));
    }
    e->pool = base;
    e->pool_bytes = opts->bytes;
    madvise(base, opts->bytes, MADV_HUGEPAGE); // as the daemon asks; refusal changes the speed only
    if (madvise(base, opts->bytes, MADV_DONTFORK) != 0) {
        return attnd_fail(info, ATTND_ENOTSUP, "engine", "madvise(MADV_DONTFORK): %s",
                          strerror(errno));
    }
    attn_cpu_opts cpu = {.num_threads = opts->threads};
    return attn_cpu_create((attn_cpu **)&e->backend, &cpu, info);
}

static void engine_close(attn_engine *e) {
    attn_cpu_free(e->backend);
    if (e->pool) {
        munmap(e->pool, e->pool_bytes);
    }
}

// check_model: attn_model_parse has tried it, and these kernels take whatever attn_check does.
static attnd_err check_model(attn_engine *e, const attn_model *m, attnd_errinfo *info) {
    (void)e, (void)m, (void)info;
    return ATTND_OK;
}

static attnd_err alloc(attn_engine *e, attn_engine_memory *out, size_t bytes, attnd_errinfo *info) {
    (void)e;
    uint8_t *host = malloc(bytes);
    if (!host) {
        return attnd_fail(info, ATTND_ENOMEM, "engine", "no memory for %zu bytes", bytes);
    }
    *out = (attn_engine_memory){host, host, bytes};
    return ATTND_OK;
}

static void free_memory(attn_engine *e, attn_engine_memory *m) {
    (void)e;
    free(m->host);
}

static attnd_err run(attn_engine *e, attn_engine_step *s, const attn_params *p,
                     const attnd_attend_args *args, attn_choice *choice, attnd_errinfo *info) {
    (void)s;
    if (args->stream) {
        return attnd_fail(info, ATTND_ENOTSUP, "stream", "an engine of the CPU has no streams");
    }
    return attn_cpu_run(e->backend, p, choice, info);
}

static attnd_err replay(attn_engine *e, uint64_t captured, attn_engine_step *s, void *stream,
                        attnd_errinfo *info) {
    (void)e, (void)captured, (void)s, (void)stream;
    return attnd_fail(info, ATTND_ENOTSUP, "captured", "only work of a GPU can be captured");
}

// An attend has ended when it returns, so nothing is ever to be waited for.

static attnd_err show(attn_engine *e, const attn_engine_memory *m, attnd_errinfo *info) {
    (void)e, (void)m, (void)info;
    return ATTND_OK;
}

static attnd_err ready(attn_engine *e, attn_engine_step *s, attnd_errinfo *info) {
    (void)e, (void)s, (void)info;
    return ATTND_OK;
}

static void leave(attn_engine *e, attn_engine_step *s) {
    (void)e, (void)s;
}

static bool busy(attn_engine *e, attn_engine_step *s) {
    (void)e, (void)s;
    return false;
}

static const attn_engine_ops ops = {.open = engine_open,
                                    .close = engine_close,
                                    .check_model = check_model,
                                    .alloc = alloc,
                                    .show = show,
                                    .free = free_memory,
                                    .run = run,
                                    .replay = replay,
                                    .ready = ready,
                                    .leave = leave,
                                    .busy = busy,
                                    .drop = leave};

static attnd_err open_host(void **state, const attnd_engine_opts *opts, attnd_errinfo *info) {
    return attn_engine_open(state, &ops, opts, info);
}

static const attnd_engine engine = {ATTN_ENGINE_CORE, .name = "cpu", .open = open_host};

const attnd_engine *attn_engine_cpu(void) {
    return &engine;
}
