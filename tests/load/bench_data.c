// Keys are a chain of 64-bit hashes over the coordinates; numbers come from bench_uniform by key.
// Rows are made in pieces of 256 floats on the stack and rounded to the type on the way out.
// No state; any thread.
#include "tests/load/bench_data.h"

#include <math.h>
#include <string.h>

#include "proto/err.h"
#include "tests/load/bench_math.h"

enum { PIECE = 256 };
#define SHARED (UINT64_C(1) << 63) // an origin that is a hash id, not a request

uint64_t bench_prompt_origin(const bench_prompt *prompt, uint32_t token) {
    uint32_t block = token / BENCH_SHARED_TOKENS;
    bool shared = token < prompt->input && block < prompt->num_ids;
    return shared ? SHARED | prompt->ids[block] : prompt->request;
}

uint32_t bench_token_id(uint64_t seed, uint64_t origin, uint32_t token) {
    uint64_t key = bench_hash64(bench_hash64(seed ^ 0x746f6b656eu) ^ bench_hash64(origin));
    return (uint32_t)bench_hash64(key ^ token);
}

uint64_t bench_row_key(uint64_t seed, uint64_t origin, uint32_t layer, bench_tensor tensor,
                       uint32_t token) {
    uint64_t key = bench_hash64(seed ^ bench_hash64(origin));
    key = bench_hash64(key ^ ((uint64_t)layer << 2 | (uint64_t)tensor));
    return bench_hash64(key ^ token);
}

static void store(void *out, attnd_dtype dtype, const float *x, uint32_t n) {
    switch (dtype) {
    case ATTND_F32:
        memcpy(out, x, n * sizeof(*x));
        break;
    case ATTND_BF16:
        for (uint32_t i = 0; i < n; i++) {
            ((uint16_t *)out)[i] = attnd_f32_to_bf16(x[i]);
        }
        break;
    case ATTND_F16:
        for (uint32_t i = 0; i < n; i++) {
            ((uint16_t *)out)[i] = attnd_f32_to_f16(x[i]);
        }
        break;
    case ATTND_F8E4M3:
        for (uint32_t i = 0; i < n; i++) {
            ((uint8_t *)out)[i] = attnd_f32_to_f8e4m3(x[i]);
        }
        break;
    default:
        ATTND_ASSERT(!"a storage type");
    }
}

void bench_fill(void *out, attnd_dtype dtype, bench_tensor tensor, uint64_t key, uint32_t first,
                uint32_t n) {
    float piece[PIECE];
    uint8_t *dst = out;
    for (uint32_t done = 0; done < n;) {
        uint32_t len = n - done < PIECE ? n - done : PIECE;
        bench_uniform(piece, key, first + done, len);
        if (tensor == BENCH_Q) {
            for (uint32_t i = 0; i < len; i++) {
                piece[i] *= 2;
            }
        }
        store(dst, dtype, piece, len);
        dst += (uint64_t)len * attnd_dtype_bytes(dtype);
        done += len;
    }
}

void bench_round(float *x, attnd_dtype dtype, uint32_t n) {
    switch (dtype) {
    case ATTND_F32:
        break;
    case ATTND_BF16:
        for (uint32_t i = 0; i < n; i++) {
            x[i] = attnd_bf16_to_f32(attnd_f32_to_bf16(x[i]));
        }
        break;
    case ATTND_F16:
        for (uint32_t i = 0; i < n; i++) {
            x[i] = attnd_f16_to_f32(attnd_f32_to_f16(x[i]));
        }
        break;
    case ATTND_F8E4M3:
        for (uint32_t i = 0; i < n; i++) {
            x[i] = attnd_f8e4m3_to_f32(attnd_f32_to_f8e4m3(x[i]));
        }
        break;
    default:
        ATTND_ASSERT(!"a storage type");
    }
}

bool bench_sampled(uint64_t seed, uint64_t request, uint32_t token, double p) {
    uint64_t h = bench_hash64(bench_hash64(seed ^ 0x73616d706c65u) ^ bench_hash64(request) ^ token);
    return (double)(h >> 11) * 0x1p-53 < p;
}

double bench_rng_uniform(bench_rng *rng) {
    rng->state++;
    return ((double)(bench_hash64(rng->state) >> 12) + 0.5) * 0x1p-52;
}

// Box and Muller 1958; one of the pair is thrown away.
double bench_rng_normal(bench_rng *rng) {
    double r = sqrt(-2 * log(bench_rng_uniform(rng)));
    return r * cos(2 * M_PI * bench_rng_uniform(rng));
}
