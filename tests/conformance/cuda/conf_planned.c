// Plans of a device (attn_device.h), as a daemon has them: nothing is launched.
#include <stdio.h>
#include <string.h>

#include "attention/cuda/attn_cuda_device.h"
#include "tests/conformance/cuda/conf_cases.h"

static uint16_t memory[64] __attribute__((aligned(16))); // planned, never read
static attnd_errinfo info;

static attn_device *open_device(void) {
    attn_device *d = NULL;
    attn_device_opts opts = {.arena_bytes = 1 << 20, .buffer_bytes = 1 << 20, .max_rows = 1};
    return attn_cuda_device_ops.open(&d, &opts, &info) ? NULL : d;
}

static attn_row row_of(int32_t kv_len, int32_t tokens, int32_t head_dim) {
    return (attn_row){.q = memory,
                      .out = memory,
                      .table = (const uint32_t *)(const void *)memory,
                      .stride_q_token = 4 * head_dim,
                      .stride_q_head = head_dim,
                      .stride_out_token = 4 * head_dim,
                      .stride_out_head = head_dim,
                      .kv_len = kv_len,
                      .q_len = tokens,
                      .q_count = tokens,
                      .window_left = -1,
                      .window_right = -1};
}

static attn_params params_of(attn_row *row, attnd_dtype dtype, int32_t head_dim) {
    return (attn_params){.shape = {.q_dtype = dtype,
                                   .kv_dtype = dtype,
                                   .q_heads = 4,
                                   .kv_heads = 1,
                                   .head_dim = head_dim,
                                   .v_head_dim = head_dim,
                                   .block_tokens = 16,
                                   .stride_k_token = head_dim,
                                   .stride_k_head = (int64_t)16 * head_dim,
                                   .stride_v_token = head_dim,
                                   .stride_v_head = (int64_t)16 * head_dim,
                                   .block_stride = (uint64_t)(2 * 16 * head_dim * 2)},
                         .pool = memory,
                         .pool_bytes = 1 << 20,
                         .num_blocks = 128,
                         .rows = row,
                         .num_rows = 1};
}

const char *conf_long_rows_are_planned(void) {
    static char wrong[256];
    attn_device *d = open_device();
    attnd_err err = d ? ATTND_OK : info.code;
    for (int32_t tokens = 1; err == ATTND_OK && tokens <= 4096; tokens *= 4) {
        attn_row row = row_of(100, tokens, 128);
        attn_params p = params_of(&row, ATTND_BF16, 128);
        p.num_splits = 2; // all rows are decoded
        err = d->ops->plan(d, 0, &p, NULL, &info);
    }
    if (d) {
        d->ops->close(d);
    }
    snprintf(wrong, sizeof(wrong), "%s: %s", attnd_errname(err), info.text);
    return err == ATTND_OK ? NULL : wrong;
}

// differs says whether check_row and plan are of two minds about a row.
static bool differs(attn_device *d, attn_params *p) {
    attnd_err checked = d->ops->check_row(d, &p->shape, p->rows, &info);
    attnd_err planned = d->ops->plan(d, 0, p, NULL, &info);
    bool is_there = planned != ATTND_ENOTSUP || strcmp(info.field, "head_dim") != 0;
    return is_there && checked != planned; // a build may lack all kernels of a shape
}

const char *conf_checked_masks_are_planned(void) {
    static const uint32_t start[] = {0, 1}, kv_blocks[] = {0};
    static const attn_block_mask mask = {start, kv_blocks, 512};
    const char *wrong = NULL;
    attn_device *d = open_device();
    for (int i = 0; d && i < 16; i++) {
        const int32_t head_dim = i % 2 ? 128 : 64, tokens = i / 4 % 2 ? 33 : 512;
        attn_row row = row_of(600, tokens, head_dim);
        attn_params p = params_of(&row, i / 2 % 2 ? ATTND_F16 : ATTND_BF16, head_dim);
        row.block_mask = i / 8 ? &mask : NULL;
        row.tree_mask = i / 8 ? NULL : (const uint64_t *)(const void *)memory;
        wrong = differs(d, &p) ? "what was checked is not planned, or the other way round" : wrong;
    }
    if (!d) {
        return info.text;
    }
    d->ops->close(d);
    return wrong;
}
