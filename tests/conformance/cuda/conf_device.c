// The mirror: each guarded array of the launch lies at a multiple of 16 bytes in one allocation, a
// page of NaN behind it.  The pool has an allocation of its own, since the layout may move blocks.
#include "tests/conformance/cuda/conf_device.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD = 4096 };

static void must(cudaError_t code, const char *what) {
    if (code != cudaSuccess) {
        fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(code));
        abort();
    }
}

// map_of returns the map that holds an address, and the address's offset in it.
static uint32_t map_of(const conf_launch *l, const void *p, uint64_t *offset) {
    for (uint32_t i = 0; i < l->num_maps; i++) {
        uint64_t at = (uint64_t)((const char *)p - (const char *)l->maps[i].base);
        if ((const char *)p >= (const char *)l->maps[i].base && at < l->maps[i].bytes) {
            *offset = at;
            return i;
        }
    }
    abort();
}

static void *on_device(const conf_device *d, const conf_launch *l, const void *p) {
    uint64_t offset = 0;
    if (!p) {
        return NULL;
    }
    uint32_t map = map_of(l, p, &offset);
    return d->memory + d->offsets[map] + offset;
}

static void set_row(conf_device *d, const conf_launch *l, uint32_t r) {
    attn_row *row = &d->rows[r];
    *row = l->params.rows[r];
    row->q = on_device(d, l, row->q);
    row->out = on_device(d, l, row->out);
    row->lse = on_device(d, l, row->lse);
    row->k_new = on_device(d, l, row->k_new);
    row->v_new = on_device(d, l, row->v_new);
    row->table = row->kv_len > 0 ? on_device(d, l, row->table) : NULL;
    row->sinks = on_device(d, l, row->sinks);
    row->alibi_slopes = on_device(d, l, row->alibi_slopes);
    row->q_positions = on_device(d, l, row->q_len > 0 ? row->q_positions : NULL);
    row->k_positions = on_device(d, l, row->new_len > 0 ? row->k_positions : NULL);
    row->tree_mask = on_device(d, l, row->tree_mask);
    if (row->block_mask) { // the struct stays in host memory
        d->masks[r] = *row->block_mask;
        d->masks[r].start = on_device(d, l, d->masks[r].start);
        d->masks[r].kv_blocks = on_device(d, l, d->masks[r].kv_blocks);
        row->block_mask = &d->masks[r];
    }
    uint64_t layer = (r % d->layout.num_layers) * l->params.shape.block_stride;
    row->k_offset += layer;
    row->v_offset += layer;
}

void conf_device_init(conf_device *d, const conf_launch *l, conf_layout layout) {
    memset(d, 0, sizeof(*d));
    d->layout = layout;
    for (uint32_t i = 0; i < l->num_maps; i++) {
        d->offsets[i] = d->bytes;
        d->bytes += l->maps[i].bytes; // the guard page becomes NaN
    }
    uint64_t stride = l->params.shape.block_stride * layout.num_layers;
    d->pool_bytes = l->params.num_blocks * stride;
    d->image = malloc(d->bytes + 1);
    d->pool_image = malloc(d->pool_bytes + 1);
    must(cudaMalloc((void **)&d->memory, d->bytes + 1), "cudaMalloc");
    must(cudaMalloc((void **)&d->pool, layout.first_block * stride + d->pool_bytes), "cudaMalloc");
    if (!d->image || !d->pool_image) {
        abort();
    }
    d->params = l->params;
    d->params.rows = d->rows;
    d->params.shape.block_stride = stride;
    d->params.pool = d->pool;
    d->params.pool_bytes = layout.first_block * stride + d->pool_bytes;
    d->params.num_blocks += layout.first_block;
    d->params.saturated = NULL;
    for (uint32_t r = 0; r < l->params.num_rows; r++) {
        set_row(d, l, r);
    }
    // RoPE's frequencies: the struct stays in host memory.
    static attn_rope ropes[1];
    ropes[0] = l->rope;
    ropes[0].inv_freq = on_device(d, l, l->rope.inv_freq);
    for (uint32_t r = 0; r < l->params.num_rows; r++) {
        d->rows[r].rope = d->rows[r].rope ? ropes : NULL;
    }
}

void conf_device_fini(conf_device *d) {
    must(cudaFree(d->memory), "cudaFree");
    must(cudaFree(d->pool), "cudaFree");
    free(d->image);
    free(d->pool_image);
}

void conf_device_put(conf_device *d, const conf_launch *l) {
    uint64_t block = l->params.shape.block_stride;
    memset(d->image, 0xff, d->bytes);
    for (uint32_t i = 0; i < l->num_maps; i++) {
        memcpy(d->image + d->offsets[i], l->maps[i].base, l->maps[i].bytes - GUARD);
    }
    for (uint32_t r = 0; r < l->params.num_rows; r++) {
        const attn_row *row = &l->params.rows[r];
        if (row->kv_len > 0) {
            uint64_t offset = 0;
            uint32_t map = map_of(l, row->table, &offset);
            uint32_t *table = (uint32_t *)(void *)(d->image + d->offsets[map] + offset);
            int32_t num = (row->kv_len - 1) / l->params.shape.block_tokens + 1;
            for (int32_t b = 0; b < num; b++) {
                table[b] += table[b] == CONF_NO_BLOCK ? 0 : (uint32_t)d->layout.first_block;
            }
        }
    }
    for (uint64_t e = 0; e < l->params.num_blocks; e++) {
        for (uint32_t layer = 0; layer < d->layout.num_layers; layer++) {
            memcpy(d->pool_image + (e * d->layout.num_layers + layer) * block,
                   (char *)l->params.pool + e * block, block);
        }
    }
    char *pool = d->pool + d->layout.first_block * d->params.shape.block_stride;
    must(cudaMemcpy(d->memory, d->image, d->bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    must(cudaMemcpy(pool, d->pool_image, d->pool_bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    // A copy from pageable memory may end after its call, and some streams wait for nobody.
    must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

// get_map copies the map that holds an address back.
static void get_map(const conf_device *d, const conf_launch *l, const void *p) {
    uint64_t offset = 0;
    uint32_t i = map_of(l, p, &offset);
    memcpy(l->maps[i].base, d->image + d->offsets[i], l->maps[i].bytes - GUARD);
}

void conf_device_get(conf_device *d, conf_launch *l) {
    uint64_t block = l->params.shape.block_stride;
    char *pool = d->pool + d->layout.first_block * d->params.shape.block_stride;
    must(cudaMemcpy(d->image, d->memory, d->bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
    must(cudaMemcpy(d->pool_image, pool, d->pool_bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
    for (uint32_t r = 0; r < l->params.num_rows; r++) {
        const attn_row *row = &l->params.rows[r];
        if (row->out) {
            get_map(d, l, row->out);
        }
        if (row->lse) {
            get_map(d, l, row->lse);
        }
        int32_t num =
            (row->kv_len + l->params.shape.block_tokens - 1) / l->params.shape.block_tokens;
        for (int32_t b = 0; b < num; b++) {
            uint64_t e = row->table[b];
            if (e == CONF_NO_BLOCK) {
                continue;
            }
            memcpy((char *)l->params.pool + e * block,
                   d->pool_image + (e * d->layout.num_layers + r % d->layout.num_layers) * block,
                   block);
        }
    }
}
