// prefill_prepare comes before the prefill kernel in the same launch: it rotates the new keys and
// writes them and the new values to the pool, and makes the table of angles by which the queries
// are rotated, so that the cosines of a position are taken once and not for every head.
//
// A warp takes a unit at a time: a new token (all KV heads), or the angles of a query token.
// Keys are rotated in float64: the two products of a pair may cancel, and what is written stays.
#ifndef ATTND_ATTENTION_CUDA_PREFILL_PREPARE_CUH
#define ATTND_ATTENTION_CUDA_PREFILL_PREPARE_CUH

#include "attention/cuda/prefill_load.cuh"

enum { PREFILL_PREPARE_THREADS = 256 };

// prefill_append rotates and writes token `token` of the new ones, by a warp.  s_angles [pairs],
// s_rows [32] pieces of 16 bytes.
template <int kHeadDim, typename T>
__device__ void prefill_append(const prefill_args &args, const attn_prefill_record &r,
                               int32_t token, double2 *s_angles, uint4 *s_rows) {
    constexpr int kPieces = kHeadDim / 8, kHeads = 32 / kPieces; // at a time
    const int lane = (int)threadIdx.x % 32, pairs = r.rotary_dim / 2;
    const int32_t key = r.kv_len - r.new_len + token;
    const int64_t in_pool =
        (int64_t)(__ldg(r.table + key / args.block_tokens) * args.block_stride) +
        (int64_t)(key % args.block_tokens) * (kHeadDim * 2) + lane % kPieces * 16;
    if (r.inv_freq) {
        const int32_t position = r.k_positions ? __ldg(r.k_positions + token) : key;
        for (int p = lane; p < pairs; p += 32) {
            sincospi(attn_half_turns(position, __ldg(r.inv_freq + p)), &s_angles[p].y,
                     &s_angles[p].x);
        }
    }
#pragma unroll 1
    for (int head = lane / kPieces; head - lane / kPieces < args.kv_heads; head += kHeads) {
        const bool is_head = head < args.kv_heads;
        if (is_head) {
            const int64_t in_new = lane % kPieces * 16;
            s_rows[lane] = *(const uint4 *)(r.k_new + token * r.k_new_token_bytes +
                                            head * r.k_new_head_bytes + in_new);
            *(uint4 *)(r.v + head * args.v_head_bytes + in_pool) =
                *(const uint4 *)(r.v_new + token * r.v_new_token_bytes + head * r.v_new_head_bytes +
                                 in_new);
        }
        __syncwarp();
        if (r.inv_freq) {
            for (int i = lane; i < kHeads * pairs; i += 32) {
                const int p = i % pairs;
                T *row = (T *)s_rows + i / pairs * kHeadDim;
                const int2 dims = prefill_pair_dims(p, r);
                const double x = (double)(float)row[dims.x], y = (double)(float)row[dims.y];
                const double factor = (double)r.attention_factor;
                row[dims.x] = (T)(factor * (x * s_angles[p].x - y * s_angles[p].y));
                row[dims.y] = (T)(factor * (y * s_angles[p].x + x * s_angles[p].y));
            }
            __syncwarp();
        }
        if (is_head) {
            *(uint4 *)(r.k + head * args.k_head_bytes + in_pool) = s_rows[lane];
        }
        __syncwarp();
    }
}

template <int kHeadDim, typename T>
__global__ void __launch_bounds__(PREFILL_PREPARE_THREADS)
    prefill_prepare(const __grid_constant__ prefill_args args) {
    constexpr int kWarps = PREFILL_PREPARE_THREADS / 32;
    __shared__ double2 s_angles[kWarps][kHeadDim / 2];
    __shared__ uint4 s_rows[kWarps][32];
    const attn_prefill_head *plan = args.plan;
    const attn_prefill_ends *ends = (const attn_prefill_ends *)((const char *)plan + plan->ends_at);
    const attn_prefill_record *records =
        (const attn_prefill_record *)((const char *)plan + plan->records_at);
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    uint32_t record = 0;
    ptx::grid_launch_next();
    ptx::grid_wait();
    for (uint32_t unit = blockIdx.x * kWarps + (uint32_t)warp; unit < plan->num_units;
         unit += gridDim.x * kWarps) {
        for (;;) { // find the record
            const uint32_t i = record + (uint32_t)lane;
            const uint32_t end = i < plan->num_records ? __ldg(&ends[i].units) : ~0u;
            const uint32_t is_behind = __ballot_sync(~0u, unit < end);
            if (is_behind != 0) {
                record += (uint32_t)__ffs((int)is_behind) - 1;
                break;
            }
            record += 32;
        }
        const attn_prefill_record &r = records[record];
        const int32_t number = (int32_t)(unit - (record > 0 ? __ldg(&ends[record - 1].units) : 0));
        if (number < r.new_len) {
            prefill_append<kHeadDim, T>(args, r, number, s_angles[warp], s_rows[warp]);
            continue;
        }
        const int32_t token = r.q_first + number - r.new_len, pairs = r.rotary_dim / 2;
        const int32_t position =
            r.q_positions ? __ldg(r.q_positions + token) : r.kv_len - r.q_len + token;
        float2 *angles =
            (float2 *)args.angles + r.angles_first + (int64_t)(token - r.q_first) * pairs;
        for (int p = lane; p < pairs; p += 32) {
            const float2 angle = attn_angle(position, __ldg(r.inv_freq + p));
            angles[p] = make_float2(angle.x * r.attention_factor, angle.y * r.attention_factor);
        }
    }
}

#endif
