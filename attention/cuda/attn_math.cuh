// attn_math is arithmetic that the CUDA kernels share: softcap's tanh, and RoPE's angles.
#ifndef ATTND_ATTENTION_CUDA_ATTN_MATH_CUH
#define ATTND_ATTENTION_CUDA_ATTN_MATH_CUH

#include "attention/cuda/ptx.cuh"

// attn_tanh is tanh to some 2^-22 of its value: by its series near 0, where 1 - 2 / (e^2u + 1)
// would cancel.
__device__ __forceinline__ float attn_tanh(float u) {
    const float far = 1 - __fdividef(2, 1 + ptx::exp2(2.8853900817779268f * u));
    const float v = u * u;
    const float near =
        u + u * v * (-0.33333333f + v * (0.13333333f + v * (-0.05396825f + v * 0.02186949f)));
    return fabsf(u) < 0.25f ? near : far;
}

// attn_half_turns returns the angle position * inv_freq, in half turns from -1 to 1.  In float64,
// so that positions of a million are as exact as small ones.
__device__ __forceinline__ double attn_half_turns(int32_t position, float inv_freq) {
    const double turns = 0.15915494309189535 * ((double)position * (double)inv_freq);
    return 2 * (turns - rint(turns));
}

// attn_angle returns cosine and sine of the same angle.
__device__ __forceinline__ float2 attn_angle(int32_t position, float inv_freq) {
    const double half_turns = attn_half_turns(position, inv_freq);
    const float angle = (float)half_turns;
    const float rest = 3.14159265f * (float)(half_turns - (double)angle);
    float sin_a, cos_a;
    sincospif(angle, &sin_a, &cos_a);
    return make_float2(fmaf(-sin_a, rest, cos_a), fmaf(cos_a, rest, sin_a));
}

// attn_rotate turns the pair (x, y) by an angle, given as its cosine and sine.
template <typename T>
__device__ __forceinline__ void attn_rotate(T &x, T &y, float2 angle, float factor) {
    const float a = (float)x, b = (float)y;
    // The two products may cancel: what rounding takes from the second one is given back.
    const float bs = b * angle.y, as = a * angle.y;
    x = (T)(factor * (fmaf(a, angle.x, -bs) - fmaf(b, angle.y, -bs)));
    y = (T)(factor * (fmaf(b, angle.x, as) + fmaf(a, angle.y, -as)));
}

#endif
