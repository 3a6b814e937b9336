// prefill_prepare comes before the prefill kernel in the same launch: it rotates the new keys and
// writes them and the new values to the pool, and makes the table of angles by which the queries
// are rotated, so that the cosines of a position are taken once and not for every head.
//
// A warp takes a unit at a time: a new token (all KV heads), or the angles of a query token. Angles
// of keys are exact beyond float32, in two parts, and so are sums of products: the two products of
// a pair may cancel, and what is written stays.
#ifndef ATTND_ATTENTION_CUDA_PREFILL_PREPARE_CUH
#define ATTND_ATTENTION_CUDA_PREFILL_PREPARE_CUH

#include "attention/cuda/prefill_load.cuh"
#include "attention/cuda/prefill_rope.cuh"

enum { PREFILL_PREPARE_THREADS = 256, PREFILL_PREPARE_CTAS = 3 }; // a CTA; on an SM

// prefill_piece is two pairs, 2 n and 2 n + 1, of two words (4 bytes) of a row.  The pieces behind
// the last pair are the words that no pair has.
struct prefill_piece {
    int a, b;            // words of the row
    uint32_t to_x, to_y; // which of their bytes are the pairs' x, and y; and back

    __device__ __forceinline__ prefill_piece(int n, const attn_prefill_record &r) {
        const int num = r.rotary_dim / 4;
        const bool is_apart = n < num && !(r.flags & ATTN_PREFILL_INTERLEAVED);
        a = is_apart ? n : 2 * n;
        b = is_apart ? n + num : 2 * n + 1;
        to_x = is_apart ? 0x3210 : 0x5410;
        to_y = is_apart ? 0x7654 : 0x7632;
    }

    // change makes the pairs' x and y of the words, or the words of x and y.
    __device__ __forceinline__ void change(uint32_t &first, uint32_t &second) const {
        const uint32_t x = __byte_perm(first, second, to_x);
        second = __byte_perm(first, second, to_y);
        first = x;
    }
};

// prefill_angle is cosine and sine, each in two parts, times the attention factor.
struct prefill_angle {
    float cos, sin, cos_rest, sin_rest;
};

__device__ __forceinline__ prefill_angle prefill_angle_of(const attn_prefill_record &r,
                                                          int32_t position, int pair) {
    double sin_a, cos_a;
    sincospi(attn_half_turns(position, __ldg(r.inv_freq + pair)), &sin_a, &cos_a);
    sin_a *= (double)r.attention_factor;
    cos_a *= (double)r.attention_factor;
    prefill_angle a;
    a.cos = (float)cos_a;
    a.sin = (float)sin_a;
    a.cos_rest = (float)(cos_a - (double)a.cos);
    a.sin_rest = (float)(sin_a - (double)a.sin);
    return a;
}

// prefill_turn_exactly turns a pair; what rounding takes from a product is given back.
__device__ __forceinline__ void prefill_turn_exactly(float &x, float &y, const prefill_angle &a) {
    const float ys = y * a.sin, xs = x * a.sin;
    const float to_x = fmaf(x, a.cos_rest, -y * a.sin_rest) - fmaf(y, a.sin, -ys);
    const float to_y = fmaf(y, a.cos_rest, x * a.sin_rest) + fmaf(x, a.sin, -xs);
    x = fmaf(x, a.cos, -ys) + to_x;
    y = fmaf(y, a.cos, xs) + to_y;
}

// prefill_append_pieces writes a new token by a warp; each lane has a piece of every head, or of
// every other one.
template <int kHeadDim, typename T>
__device__ __forceinline__ void prefill_append_pieces(const prefill_args &args,
                                                      const attn_prefill_record &r, int32_t token) {
    constexpr int kPieces = kHeadDim / 4, kAtOnce = 32 / kPieces; // heads of an instruction
    constexpr int kHeads = 4, kBatch = kHeads / kAtOnce;          // read before any is written
    const int lane = (int)threadIdx.x % 32, n = lane % kPieces, num = r.rotary_dim / 4;
    const prefill_piece piece(n, r);
    const char *k_new = r.k_new + token * r.k_new_token_bytes;
    const char *v_new = r.v_new + token * r.v_new_token_bytes + n * 8;
    const int32_t key = r.kv_len - r.new_len + token;
    const int64_t in_pool =
        (int64_t)(__ldg(r.table + key / args.block_tokens) * args.block_stride) +
        (int64_t)(key % args.block_tokens) * (kHeadDim * 2);
    prefill_angle angles[2];
    if (n < num) {
        const int32_t position = r.k_positions ? __ldg(r.k_positions + token) : key;
#pragma unroll 1
        for (int i = 0; i < 2; i++) { // one after another: registers
            angles[0] = angles[1];
            angles[1] = prefill_angle_of(r, position, 2 * n + i);
        }
    }
#pragma unroll 1
    for (int first = 0; first < args.kv_heads; first += kHeads) {
        uint32_t x[kBatch], y[kBatch];
        uint2 v[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; i++) {
            const int head = first + i * kAtOnce + lane / kPieces;
            if (head < args.kv_heads) {
                const uint32_t *row = (const uint32_t *)(k_new + head * r.k_new_head_bytes);
                x[i] = __ldg(row + piece.a);
                y[i] = __ldg(row + piece.b);
                v[i] = __ldg((const uint2 *)(v_new + head * r.v_new_head_bytes));
            }
        }
#pragma unroll
        for (int i = 0; i < kBatch; i++) {
            const int head = first + i * kAtOnce + lane / kPieces;
            if (n < num) {
                piece.change(x[i], y[i]);
                float2 a = ptx::unpack<T>(x[i]), b = ptx::unpack<T>(y[i]);
                prefill_turn_exactly(a.x, b.x, angles[0]);
                prefill_turn_exactly(a.y, b.y, angles[1]);
                x[i] = ptx::pack<T>(a.x, a.y);
                y[i] = ptx::pack<T>(b.x, b.y);
                piece.change(x[i], y[i]);
            }
            if (head < args.kv_heads) {
                uint32_t *row = (uint32_t *)(r.k + head * args.k_head_bytes + in_pool);
                row[piece.a] = x[i];
                row[piece.b] = y[i];
                *(uint2 *)(r.v + head * args.v_head_bytes + in_pool + n * 8) = v[i];
            }
        }
    }
}

// prefill_append_pairs does the same one pair at a time.
template <int kHeadDim, typename T>
__device__ __forceinline__ void prefill_append_pairs(const prefill_args &args,
                                                     const attn_prefill_record &r, int32_t token) {
    const int lane = (int)threadIdx.x % 32;
    const int32_t key = r.kv_len - r.new_len + token;
    const int32_t position = r.k_positions ? __ldg(r.k_positions + token) : key;
    const int64_t in_pool =
        (int64_t)(__ldg(r.table + key / args.block_tokens) * args.block_stride) +
        (int64_t)(key % args.block_tokens) * (kHeadDim * 2);
#pragma unroll 1
    for (int head = 0; head < args.kv_heads; head++) {
        const T *k_new =
            (const T *)(r.k_new + token * r.k_new_token_bytes + head * r.k_new_head_bytes);
        const T *v_new =
            (const T *)(r.v_new + token * r.v_new_token_bytes + head * r.v_new_head_bytes);
        T *k = (T *)(r.k + head * args.k_head_bytes + in_pool);
        T *v = (T *)(r.v + head * args.v_head_bytes + in_pool);
        for (int p = lane; p < r.rotary_dim / 2; p += 32) {
            const int2 dims = prefill_pair_dims(p, r);
            float x = (float)k_new[dims.x], y = (float)k_new[dims.y];
            prefill_turn_exactly(x, y, prefill_angle_of(r, position, p));
            k[dims.x] = (T)x;
            k[dims.y] = (T)y;
        }
        for (int dim = lane; dim < kHeadDim; dim += 32) {
            v[dim] = v_new[dim];
            if (dim >= r.rotary_dim) {
                k[dim] = k_new[dim];
            }
        }
    }
}

template <int kHeadDim, typename T>
__global__ void __launch_bounds__(PREFILL_PREPARE_THREADS, PREFILL_PREPARE_CTAS)
    prefill_prepare(const __grid_constant__ prefill_args args) {
    constexpr int kWarps = PREFILL_PREPARE_THREADS / 32;
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
            if (r.rotary_dim % 4 == 0) {
                prefill_append_pieces<kHeadDim, T>(args, r, number);
            } else {
                prefill_append_pairs<kHeadDim, T>(args, r, number);
            }
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
