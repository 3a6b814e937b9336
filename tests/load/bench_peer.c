#include "tests/load/bench_peer.h"

#include <math.h>
#include <string.h>

enum { NUM_BLOCKS = 3, SEED = 5 };

bool bench_peer_knows(const bench_case *c) {
    bool is_decode = c->kind == BENCH_DECODE && c->kv_dtype == ATTND_F32 && c->q_len == 1;
    bool is_prefill = c->kind == BENCH_PREFILL && c->kv_len == c->q_len;
    return c->batch == 1 && c->new_len == 0 && (is_decode || is_prefill) && bench_blas_open();
}

static uint64_t kv_floats(const bench_case *c) {
    return (uint64_t)c->kv_len * (uint64_t)c->kv_heads * (uint64_t)c->head_dim;
}

// choose_block takes the block size that makes a prefill fastest.
static void choose_block(bench_peer *p, uint32_t threads) {
    static const int32_t blocks[NUM_BLOCKS] = {32, 64, 128};
    double best = INFINITY;
    int32_t block = blocks[0];
    for (int i = 0; i < NUM_BLOCKS; i++) {
        p->blas.block = blocks[i];
        double seconds = bench_blas_prefill(&p->blas, threads);
        block = seconds < best ? blocks[i] : block;
        best = fmin(best, seconds);
    }
    p->blas.block = block;
}

static attnd_err open_peer(bench_peer *p, const bench_case *c, uint32_t threads, uint32_t copies,
                           attnd_errinfo *info) {
    uint64_t q_num = (uint64_t)c->q_len * (uint64_t)c->q_heads * (uint64_t)c->head_dim;
    uint64_t kv_num = kv_floats(c);
    bool is_decode = c->kind == BENCH_DECODE;
    copies = is_decode ? copies : 1;
    uint64_t num = 2 * q_num + copies * 2 * kv_num;
    *p = (bench_peer){.c = *c, .copies = copies};
    attnd_err err = bench_arena_open(&p->arena, num * sizeof(float), true, info);
    if (err != ATTND_OK) {
        return err;
    }
    float *q = (void *)p->arena.base;
    bench_arena_fill(q, ATTND_F32, num, SEED, threads);
    p->blas = (bench_blas_case){.q = q,
                                .out = q + q_num,
                                .k = q + 2 * q_num,
                                .v = q + 2 * q_num + kv_num,
                                .tokens = c->kv_len,
                                .q_heads = c->q_heads,
                                .kv_heads = c->kv_heads,
                                .head_dim = c->head_dim};
    if (!is_decode) {
        choose_block(p, threads);
    }
    return ATTND_OK;
}

attnd_err bench_peer_time(bench_peers *p, const bench_case *c, uint32_t threads, uint32_t copies,
                          double *us, attnd_errinfo *info) {
    bench_peer *peer = NULL;
    for (uint32_t i = 0; i < p->num; i++) {
        peer = memcmp(&p->list[i].c, c, sizeof(*c)) == 0 ? &p->list[i] : peer;
    }
    if (!peer) {
        peer = &p->list[p->num];
        attnd_err err = p->num < BENCH_MAX_PEERS
                            ? open_peer(peer, c, threads, copies, info)
                            : attnd_fail(info, ATTND_ENOMEM, NULL, "too many peers at a time");
        if (err != ATTND_OK) {
            return err;
        }
        p->num++;
    }
    bench_blas_case blas = peer->blas;
    uint64_t off = peer->next++ % peer->copies * 2 * kv_floats(c);
    blas.k += off;
    blas.v += off;
    *us = 1e6 * (c->kind == BENCH_DECODE ? bench_blas_decode(&blas, threads)
                                         : bench_blas_prefill(&blas, threads));
    return ATTND_OK;
}

void bench_peers_reset(bench_peers *p) {
    for (uint32_t i = 0; i < p->num; i++) {
        bench_arena_close(&p->list[i].arena);
    }
    p->num = 0;
}
