// decode_merge ends an item: the eight warps' states become one, which is written out, or left in a
// slot for whoever of the head's parts comes last.
//
//     state of a query row = (m, d, o):  d = sum exp2(x - m),  o = sum exp2(x - m) * v
//     merged: m = max m_i,  d = sum exp2(m_i - m) * d_i,  o likewise;  out = o / (d + exp2(sink -
//     m))
//
// The scratch for it is the item's last stage, which is handed back afterwards.  Merging aside
// (decode_aside.cuh) has its own.
#ifndef ATTND_ATTENTION_CUDA_DECODE_MERGE_CUH
#define ATTND_ATTENTION_CUDA_DECODE_MERGE_CUH

#include "attention/cuda/decode_math.cuh"

template <typename Traits>
struct decode_merge {
    static constexpr int kQuads = Traits::kDim / 4; // float4s of an output row
    static constexpr int kSlotBytes = 8 * Traits::kDim * 4;
    static_assert(Traits::kWarps * kSlotBytes <= 2 * Traits::kStageBytes,
                  "a stage holds what the warps have of 8 query rows");

    typename Traits::smem &s;
    const decode_args &args;
    const decode_item &item;
    const attn_cuda_record &r;
    const int thread; // of the consumers; aside, of the warp

    __device__ decode_merge(typename Traits::smem &smem, const decode_args &a, const decode_item &i)
        : s(smem), args(a), item(i), r(i.record), thread(ptx::thread()) {}
    __device__ decode_merge(typename Traits::smem &smem, const decode_args &a, const decode_item &i,
                            int lane)
        : s(smem), args(a), item(i), r(i.record), thread(lane) {}

    __device__ float *slot(int part) const {
        const uint64_t slot_floats = item.piece.slot_rows * (Traits::kDim + 4);
        return args.slots + attn_cuda_slot(&item.piece, part) * slot_floats;
    }

    // quad_address is where dims [4 * quad, + 4) of query row q of 8 lie among a warp's sums.  The
    // quads are swapped about such that the eight lanes that store at a time hit all banks.
    static __device__ uint32_t quad_address(uint32_t s_sums, int q, int quad) {
        const int pair = q / 2; // of rows, one a lane
        uint32_t swap = (uint32_t)(Traits::kDim == 128 ? pair : (pair & 1) | (pair & 2) << 1);
        return s_sums + (uint32_t)(q * Traits::kDim * 4) + (((uint32_t)quad ^ swap) * 16);
    }

    // write writes dims [4 * quad, + 4) of a query row of the whole head.
    __device__ void write(int row, int quad, float4 o, float m, float d) const {
        const int token = decode_token(r, row);
        const int head = item.piece.kv_head * args.group + r.head_first + row - token * r.heads;
        float whole = d;
        if (r.sinks && !(r.flags & ATTN_PARTIAL)) {
            whole += ptx::exp2(1.4426950408889634f * __ldg(r.sinks + head) - m);
        }
        const float scale = d == 0 ? 0 : 1 / whole;
        uint2 y = {ptx::pack<typename Traits::type>(o.x * scale, o.y * scale),
                   ptx::pack<typename Traits::type>(o.z * scale, o.w * scale)};
        if (d == 0) {
            y = make_uint2(0, 0);
        }
        typename Traits::type *out = (typename Traits::type *)((char *)r.out + args.shift.out);
        *(uint2 *)(out + token * r.out_token + head * r.out_head + quad * 4) = y;
        if (r.lse && quad == 0) {
            float *lse = (float *)((char *)r.lse + args.shift.lse);
            lse[head * r.lse_head + token] =
                d == 0 ? -INFINITY : fmaf(m, 0.6931471805599453f, logf(d));
        }
    }

    // write_part writes the same to this part's slot.
    __device__ void write_part(int row, int quad, float4 o, float m, float d) const {
        float *g_slot = slot(item.piece.part);
        *(float4 *)(g_slot + row * Traits::kDim + quad * 4) = o;
        if (quad == 0) {
            float2 *states = (float2 *)(g_slot + item.piece.slot_rows * Traits::kDim);
            states[row] = make_float2(m, d);
        }
    }

    __device__ void write_empty() const {
        const int quads = r.tokens * r.heads * kQuads;
#pragma unroll 1
        for (int i = thread; i < quads; i += Traits::kConsumers) {
            write(i / kQuads, i % kQuads, make_float4(0, 0, 0, 0), 0, 0);
        }
    }

    // other_part is four dims of a query row in the slot of the second of two parts.
    struct other_part {
        float2 *g_state;
        float4 *g_sums;
        float2 state;
        float4 sums;

        __device__ void look() {
            state = ptx::g_load_now((const float2 *)g_state);
            sums = ptx::g_load_now((const float4 *)g_sums);
        }
    };

    __device__ other_part second(int row, int quad) const {
        float *g_slot = slot(1);
        other_part x;
        x.g_state = (float2 *)(g_slot + item.piece.slot_rows * Traits::kDim) + row;
        x.g_sums = (float4 *)(g_slot + row * Traits::kDim + quad * 4);
        return x;
    }

    // take_second adds the other part, and leaves its sums as they were before the launch.
    __device__ void take_second(other_part &x, float4 &o, float &m, float &d) const {
        const float none = __uint_as_float(~0u);
        while (!is_there(x.state) || !is_there(x.sums)) {
            x.look();
        }
        const float top = fmaxf(m, x.state.x);
        const float own = ptx::exp2(m - top), other = ptx::exp2(x.state.x - top);
        m = top;
        d = fmaf(x.state.y, other, d * own);
        o = make_float4(fmaf(x.sums.x, other, o.x * own), fmaf(x.sums.y, other, o.y * own),
                        fmaf(x.sums.z, other, o.z * own), fmaf(x.sums.w, other, o.w * own));
        *x.g_sums = make_float4(none, none, none, none);
    }

    // total is dims [4 * quad, + 4) of a query row over the warps that share it.
    struct total {
        float4 o;
        float m, d;
    };

    // add_up makes it from the states and sums that the warps have left: first, and each 1 <<
    // sets_log2 from there on.  A warp's sums are those of query row q of 8 at s_sums, each further
    // warp's warp_bytes behind.
    template <int kNt>
    __device__ total add_up(int sets_log2, int first, int in_states, int q, int quad,
                            uint32_t s_sums, uint32_t warp_bytes) const {
        total x = {make_float4(0, 0, 0, 0), DECODE_NO_MAX, 0};
        float2 state[Traits::kWarps];
#pragma unroll
        for (int i = 0; i < Traits::kWarps; i++) {
            const int warp = kNt == 1 ? i : first + (i << sets_log2);
            state[i] =
                warp < Traits::kWarps ? s.states[warp][in_states] : make_float2(DECODE_NO_MAX, 0);
            x.m = fmaxf(x.m, state[i].x);
        }
#pragma unroll
        for (int i = 0; i < Traits::kWarps; i++) {
            const int warp = kNt == 1 ? i : first + (i << sets_log2);
            if (warp < Traits::kWarps) {
                const float w = ptx::exp2(state[i].x - x.m);
                const float4 y =
                    ptx::s_load_f32(quad_address(s_sums + (uint32_t)warp * warp_bytes, q, quad));
                x.d = fmaf(state[i].y, w, x.d);
                x.o = make_float4(fmaf(y.x, w, x.o.x), fmaf(y.y, w, x.o.y), fmaf(y.z, w, x.o.z),
                                  fmaf(y.w, w, x.o.w));
            }
        }
        return x;
    }

    // gather ends dims [4 * quad, + 4) of a query row.
    template <int kNt>
    __device__ void gather(int sets_log2, int row, int quad, uint32_t s_stage) const {
        const int first = kNt == 1 ? 0 : row / 16, in_warp = row % (8 * kNt);
        const bool takes_second = item.piece.merge == ATTN_CUDA_MERGE_SECOND;
        other_part other = second(row, quad);
        if (takes_second) {
            other.look(); // on its way while the warps' sums are added up
        }
        total x = add_up<kNt>(sets_log2, first, in_warp, in_warp % 8, quad, s_stage, kSlotBytes);
        if (takes_second) {
            take_second(other, x.o, x.m, x.d);
        }
        if (item.piece.num_parts == 1 || takes_second) {
            write(row, quad, x.o, x.m, x.d);
        } else {
            write_part(row, quad, x.o, x.m, x.d);
        }
    }

    // put stores a warp's sums of the first num_rows of 8 query rows.
    template <int kNt>
    __device__ void put(const decode_rows<Traits, kNt> &rows, int nt, int num_rows, uint32_t s_sums,
                        decode_lane at) const {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int q = 2 * at.t + e;
            // A lane has kDim / 8 dims side by side; the upper half of them lies in c[2] and c[3].
#pragma unroll
            for (int half = 0; half < 2 && q < num_rows; half++) {
                const int c = 2 * half + e;
#pragma unroll
                for (int i = 0; i < Traits::kOuts / 4; i++) {
                    const int quad = at.g * (kQuads / 8) + half * (kQuads / 16) + i;
                    ptx::s_store_f32(quad_address(s_sums, q, quad), rows.o[nt][4 * i][c],
                                     rows.o[nt][4 * i + 1][c], rows.o[nt][4 * i + 2][c],
                                     rows.o[nt][4 * i + 3][c]);
                }
            }
        }
    }

    // put_states stores a warp's states of 8 * kNt query rows.
    template <int kNt>
    __device__ void put_states(const decode_rows<Traits, kNt> &rows, float2 *s_states,
                               decode_lane at) const {
#pragma unroll
        for (int nt = 0; nt < kNt; nt++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float d = rows.l[nt][e];
                d += __shfl_xor_sync(~0u, d, 4);
                d += __shfl_xor_sync(~0u, d, 8);
                d += __shfl_xor_sync(~0u, d, 16);
                if (at.g == 0) {
                    s_states[nt * 8 + 2 * at.t + e] = make_float2(rows.m[nt][e], d);
                }
            }
        }
    }

    // aside_sums is where a warp leaves its sums to be merged aside: slot_rows query rows of them.
    __device__ uint32_t aside_sums(int warp) const {
        return ptx::s_addr(s.queries) + Traits::kItems * Traits::kSmallBytes +
               (uint32_t)warp * item.piece.slot_rows * Traits::kDim * 4;
    }

    // leave hands a warp's states over to be merged aside.
    template <int kNt>
    __device__ void leave(const decode_rows<Traits, kNt> &rows) const {
        const int warp = thread / 32;
        const decode_lane at(thread % 32);
        decode_ring ring = s.aside_rings[warp];
        ring.wait_empty(&s.aside_empty);
        put_states(rows, &s.states[warp][8], at);
        put(rows, 0, r.tokens * r.heads, aside_sums(warp), at);
        decode_release(&s.aside_full, ring);
        ring.advance(1);
        s.aside_rings[warp] = ring;
    }

    // merge_left merges what the warps have left, by one warp.
    __device__ void merge_left() const {
        const int quads = r.tokens * r.heads * kQuads;
#pragma unroll 1
        for (int i = thread; i < quads; i += 32) {
            const int row = i / kQuads, quad = i % kQuads;
            const total x = add_up<1>(0, 0, 8 + row, row, quad, aside_sums(0),
                                      item.piece.slot_rows * Traits::kDim * 4);
            if (item.piece.num_parts == 1) {
                write(row, quad, x.o, x.m, x.d);
            } else {
                write_part(row, quad, x.o, x.m, x.d);
            }
        }
    }

    // finish merges the warps, in the item's last stage, 8 query rows of each set at a time.
    template <int kNt>
    __device__ void finish(const decode_rows<Traits, kNt> &rows, uint32_t s_stage) {
        const int sets_log2 = decode_sets_log2<kNt>(r.tokens * r.heads);
        const decode_lane at(thread % 32);
        const int warp = thread / 32;
        put_states(rows, s.states[warp], at);
        const int num_rows = r.tokens * r.heads;
        const int padded = (num_rows + 8 * kNt - 1) / (8 * kNt) * 8;
#pragma unroll
        for (int nt = 0; nt < kNt; nt++) {
            const int first = (warp & ((1 << sets_log2) - 1)) * 8 * kNt + nt * 8;
            ptx::bar_sync(BAR_CONSUMERS, Traits::kConsumers); // states written, stage read
            put(rows, nt, num_rows - first, s_stage + (uint32_t)(warp * kSlotBytes), at);
            ptx::bar_sync(BAR_CONSUMERS, Traits::kConsumers); // sums written
#pragma unroll 1
            for (int i = thread; i < padded * kQuads; i += Traits::kConsumers) {
                const int j = i / kQuads, row = j / 8 * (8 * kNt) + nt * 8 + j % 8;
                if (row < num_rows) {
                    gather<kNt>(sets_log2, row, i % kQuads, s_stage);
                }
            }
            if (item.piece.merge == ATTN_CUDA_MERGE_SECOND) {
                __syncwarp(); // a row's states are read by one warp
#pragma unroll 1
                for (int i = thread; i < padded * kQuads; i += Traits::kConsumers) {
                    const int j = i / kQuads, row = j / 8 * (8 * kNt) + nt * 8 + j % 8;
                    if (row < num_rows && i % kQuads == 0) {
                        const float none = __uint_as_float(~0u);
                        *second(row, 0).g_state = make_float2(none, none);
                    }
                }
            }
        }
    }

    // A word of a slot that nobody has written holds 0xffffffff, a NaN that no operation gives: so
    // each word tells by itself whether it is there, and needs neither counter nor fence.
    static __device__ bool is_there(float2 v) {
        return __float_as_uint(v.x) != ~0u && __float_as_uint(v.y) != ~0u;
    }
    static __device__ bool is_there(float4 v) {
        return is_there(make_float2(v.x, v.y)) && is_there(make_float2(v.z, v.w));
    }

    // merge_parts merges the slots of all parts, in ascending order, writes the result, and leaves
    // the slots as they were before the launch.  A thread takes four dims of a query row.
    __device__ void merge_parts() const {
        const float2 none = make_float2(__uint_as_float(~0u), __uint_as_float(~0u));
        const int num_rows = r.tokens * r.heads;
#pragma unroll 1
        for (int i = thread; i < num_rows * kQuads; i += Traits::kConsumers) {
            merge_quad(i / kQuads, i % kQuads);
        }
        ptx::bar_sync(BAR_CONSUMERS, Traits::kConsumers); // states read
#pragma unroll 1
        for (int part = thread / 32; part < item.piece.num_parts; part += Traits::kWarps) {
            float2 *g_states = (float2 *)(slot(part) + item.piece.slot_rows * Traits::kDim);
            for (int row = thread % 32; row < num_rows; row += 32) {
                g_states[row] = none;
            }
        }
    }

  private:
    static constexpr int kAtOnce = 8; // parts whose loads are under way

    // look loads states and sums of up to kAtOnce parts, and returns whether all of them are there.
    // The sums of the second part lie to_second bytes behind those of the first, each further one
    // step bytes, and a part's state to_state bytes behind its sums.
    __device__ bool look(float2 (&state)[kAtOnce], float4 (&x)[kAtOnce], const char *g_sums,
                         int num, int64_t to_second, int64_t step, int32_t to_state) const {
        uint32_t most = 0;
#pragma unroll
        for (int k = 0; k < kAtOnce; k++) {
            state[k] = make_float2(DECODE_NO_MAX, 0);
            x[k] = make_float4(0, 0, 0, 0);
            if (k < num) {
                state[k] = ptx::g_load_now((const float2 *)(g_sums + to_state));
                x[k] = ptx::g_load_now((const float4 *)g_sums);
            }
            g_sums += k == 0 ? to_second : step;
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; k++) {
            most = __vimax3_u32(most, __float_as_uint(state[k].x), __float_as_uint(state[k].y));
            most = __vimax3_u32(most, __float_as_uint(x[k].x), __float_as_uint(x[k].y));
            most = __vimax3_u32(most, __float_as_uint(x[k].z), __float_as_uint(x[k].w));
        }
        return most != ~0u;
    }

    __device__ void merge_quad(int row, int quad) const {
        const float none = __uint_as_float(~0u);
        const int64_t slot_bytes = item.piece.slot_rows * (Traits::kDim + 4) * 4;
        const int64_t step = item.piece.slot_step * slot_bytes;
        const int32_t in_sums = (row * Traits::kDim + quad * 4) * 4;
        const int32_t to_state =
            (int32_t)item.piece.slot_rows * Traits::kDim * 4 + row * 8 - in_sums;
        int64_t to_second = (int64_t)(item.piece.slot_second - item.piece.slot_first) * slot_bytes;
        char *g_sums = (char *)slot(0) + in_sums;
        float m = DECODE_NO_MAX, d = 0;
        float4 o = make_float4(0, 0, 0, 0);
#pragma unroll 1
        for (int left = item.piece.num_parts; left > 0; left -= kAtOnce) {
            float2 state[kAtOnce];
            float4 x[kAtOnce];
            while (!look(state, x, g_sums, left, to_second, step, to_state)) {
            }
            float top = m;
#pragma unroll
            for (int k = 0; k < kAtOnce; k++) {
                top = fmaxf(top, state[k].x);
            }
            const float shrink = ptx::exp2(m - top);
            m = top;
            d *= shrink;
            o = make_float4(o.x * shrink, o.y * shrink, o.z * shrink, o.w * shrink);
#pragma unroll
            for (int k = 0; k < kAtOnce; k++) {
                const float w = ptx::exp2(state[k].x - m);
                d = fmaf(state[k].y, w, d);
                o = make_float4(fmaf(x[k].x, w, o.x), fmaf(x[k].y, w, o.y), fmaf(x[k].z, w, o.z),
                                fmaf(x[k].w, w, o.w));
            }
#pragma unroll 1
            for (int k = 0; k < kAtOnce && k < left; k++) {
                *(float4 *)g_sums = make_float4(none, none, none, none);
                g_sums += k == 0 ? to_second : step;
            }
            to_second = step;
        }
        write(row, quad, o, m, d);
    }
};

#endif
