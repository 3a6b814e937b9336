// Every code of every 16- and 8-bit type against its value computed in double from the definition
// of the format; every float halfway between two codes, and its neighbours, against ties-to-even.
#include "proto/dtype.h"

#include <math.h>
#include <stdbool.h>

#include "tests/check_main.h"

// must is ck_assert without its cost on success (a write to Check's pipe), for loops over all
// codes.
static void must(bool ok, uint32_t code) {
    if (!ok) {
        ck_abort_msg("wrong at code or bits 0x%x", code);
    }
}

// A format: sign, exp_bits, man_bits; value = (-1)^s 2^(e - bias) 1.m, subnormal when e = 0.
typedef struct format {
    int exp_bits, man_bits;
    uint32_t max_code; // of the largest finite magnitude
    float (*decode)(uint32_t code);
    uint32_t (*encode)(float f);
} format;

static float decode_f16(uint32_t code) {
    return attnd_f16_to_f32((uint16_t)code);
}
static float decode_bf16(uint32_t code) {
    return attnd_bf16_to_f32((uint16_t)code);
}
static float decode_f8(uint32_t code) {
    return attnd_f8e4m3_to_f32((uint8_t)code);
}
static uint32_t encode_f16(float f) {
    return attnd_f32_to_f16(f);
}
static uint32_t encode_bf16(float f) {
    return attnd_f32_to_bf16(f);
}
static uint32_t encode_f8(float f) {
    return attnd_f32_to_f8e4m3(f);
}

static const format formats[] = {
    {5, 10, 0x7bff, decode_f16, encode_f16},
    {8, 7, 0x7f7f, decode_bf16, encode_bf16},
    {4, 3, 0x7e, decode_f8, encode_f8},
};
enum { NUM_FORMATS = sizeof(formats) / sizeof(formats[0]) };

static double value_of(const format *f, uint32_t magnitude) {
    int bias = (1 << (f->exp_bits - 1)) - 1;
    int e = (int)(magnitude >> f->man_bits);
    double m = (double)(magnitude & ((1u << f->man_bits) - 1)) / (double)(1u << f->man_bits);
    return e == 0 ? m * exp2(1 - bias) : (1.0 + m) * exp2(e - bias);
}

START_TEST(dtype_decodes_every_finite_code) {
    const format *f = &formats[_i];
    uint32_t sign = 1u << (f->exp_bits + f->man_bits);
    for (uint32_t code = 0; code <= f->max_code; code++) {
        double want = value_of(f, code);
        must((double)f->decode(code) == want, code);
        must((double)f->decode(code | sign) == -want, code);
        must(signbit(f->decode(code | sign)), code);
    }
}
END_TEST

START_TEST(dtype_round_trips_every_finite_code) {
    const format *f = &formats[_i];
    uint32_t sign = 1u << (f->exp_bits + f->man_bits);
    for (uint32_t code = 0; code <= f->max_code; code++) {
        must(f->encode(f->decode(code)) == code, code);
        must(f->encode(f->decode(code | sign)) == (code | sign), code);
    }
}
END_TEST

// Between neighbours lo and lo + 1: the middle goes to the even code, anything nearer to the near
// one.  The middle needs one bit more than the format, so it is exact in float32 (subnormal bf16
// included: their middle is a float32 subnormal).
START_TEST(dtype_rounds_to_nearest_ties_to_even) {
    const format *f = &formats[_i];
    uint32_t sign = 1u << (f->exp_bits + f->man_bits);
    for (uint32_t lo = 0; lo < f->max_code; lo++) {
        float middle = (float)((value_of(f, lo) + value_of(f, lo + 1)) / 2);
        must(f->encode(middle) == lo + (lo & 1), lo);
        must(f->encode(-middle) == (sign | (lo + (lo & 1))), lo);
        must(f->encode(nextafterf(middle, 0)) == lo, lo);
        must(f->encode(nextafterf(middle, INFINITY)) == lo + 1, lo);
    }
}
END_TEST

START_TEST(dtype_f16_overflows_to_infinity) {
    ck_assert_uint_eq(attnd_f32_to_f16(65519.0f), 0x7bff);
    ck_assert_uint_eq(attnd_f32_to_f16(nextafterf(65520.0f, 0)), 0x7bff);
    ck_assert_uint_eq(attnd_f32_to_f16(65520.0f), 0x7c00); // the tie goes to the even 2^16
    ck_assert_uint_eq(attnd_f32_to_f16(-65520.0f), 0xfc00);
    ck_assert_uint_eq(attnd_f32_to_f16(3.0e38f), 0x7c00);
    ck_assert_uint_eq(attnd_f32_to_f16(INFINITY), 0x7c00);
    ck_assert_uint_eq(attnd_f32_to_f16(-INFINITY), 0xfc00);
    ck_assert(isinf(attnd_f16_to_f32(0x7c00)) && attnd_f16_to_f32(0x7c00) > 0);
    ck_assert(isinf(attnd_f16_to_f32(0xfc00)) && attnd_f16_to_f32(0xfc00) < 0);
}
END_TEST

START_TEST(dtype_bf16_overflows_to_infinity) {
    ck_assert_uint_eq(attnd_f32_to_bf16(3.3895314e38f), 0x7f7f); // the largest bf16
    ck_assert_uint_eq(attnd_f32_to_bf16(3.4028235e38f), 0x7f80); // the largest float32
    ck_assert_uint_eq(attnd_f32_to_bf16(INFINITY), 0x7f80);
    ck_assert_uint_eq(attnd_f32_to_bf16(-INFINITY), 0xff80);
}
END_TEST

START_TEST(dtype_f8e4m3_saturates_at_448) {
    const float big[] = {448.0f, 449.0f, 463.9f, 464.0f, 480.0f, 1e9f, INFINITY};
    for (size_t i = 0; i < sizeof(big) / sizeof(big[0]); i++) {
        ck_assert_uint_eq(attnd_f32_to_f8e4m3(big[i]), 0x7e);
        ck_assert_uint_eq(attnd_f32_to_f8e4m3(-big[i]), 0xfe);
    }
    ck_assert(attnd_f8e4m3_to_f32(0x7e) == 448.0f);
}
END_TEST

START_TEST(dtype_nan_stays_nan) {
    for (uint32_t code = 0x7c01; code <= 0x7fff; code++) {
        must(isnan(attnd_f16_to_f32((uint16_t)code)), code);
        must(isnan(attnd_f16_to_f32((uint16_t)(code | 0x8000))), code);
    }
    for (uint32_t code = 0x7f81; code <= 0x7fff; code++) {
        must(isnan(attnd_bf16_to_f32((uint16_t)code)), code);
    }
    ck_assert(isnan(attnd_f8e4m3_to_f32(0x7f)));
    ck_assert(isnan(attnd_f8e4m3_to_f32(0xff)));
    // NaNs of every payload width, whose high bits may all be zero
    for (uint32_t payload = 1; payload < 0x800000u; payload <<= 1) {
        uint32_t bits = 0x7f800000u | payload;
        float f;
        memcpy(&f, &bits, sizeof(f));
        for (int i = 0; i < NUM_FORMATS; i++) {
            ck_assert(isnan(formats[i].decode(formats[i].encode(f))));
            ck_assert(isnan(formats[i].decode(formats[i].encode(-f))));
        }
    }
}
END_TEST

START_TEST(dtype_tiny_values_become_signed_zero) {
    ck_assert_uint_eq(attnd_f32_to_f16(1e-30f), 0x0000);
    ck_assert_uint_eq(attnd_f32_to_f16(-1e-30f), 0x8000);
    ck_assert_uint_eq(attnd_f32_to_f8e4m3(-1e-30f), 0x80);
    ck_assert_uint_eq(attnd_f32_to_f16(-0.0f), 0x8000);
    ck_assert_uint_eq(attnd_f32_to_bf16(-0.0f), 0x8000);
    ck_assert_uint_eq(attnd_f32_to_f8e4m3(0.0f), 0x00);
}
END_TEST

#ifdef __FLT16_MANT_DIG__
static uint16_t compiler_f16(float f) {
    _Float16 half = (_Float16)f;
    uint16_t code;
    memcpy(&code, &half, sizeof(code));
    return code;
}

START_TEST(dtype_f16_agrees_with_the_compiler) {
    for (uint64_t bits = 0; bits <= UINT32_MAX; bits += 4093) { // a prime: every exponent and tail
        uint32_t u = (uint32_t)bits;
        float f;
        memcpy(&f, &u, sizeof(f));
        must(isnan(f) || attnd_f32_to_f16(f) == compiler_f16(f), u);
    }
}
END_TEST
#endif

START_TEST(dtype_names_and_sizes) {
    const char *const names[] = {"f32", "bf16", "f16", "f8e4m3"};
    const uint32_t bytes[] = {4, 2, 2, 1};
    for (uint32_t i = 0; i < ATTND_NUM_DTYPES; i++) {
        ck_assert_str_eq(attnd_dtype_name(i), names[i]);
        ck_assert_uint_eq(attnd_dtype_parse(names[i]), i);
        ck_assert_uint_eq(attnd_dtype_bytes(i), bytes[i]);
    }
    ck_assert_uint_eq(attnd_dtype_bytes(ATTND_NUM_DTYPES), 0);
    ck_assert_uint_eq(attnd_dtype_bytes(UINT32_MAX), 0);
    ck_assert_str_eq(attnd_dtype_name(UINT32_MAX), "?");
    ck_assert_uint_eq(attnd_dtype_parse("f64"), ATTND_NUM_DTYPES);
    ck_assert_uint_eq(attnd_dtype_parse(""), ATTND_NUM_DTYPES);
}
END_TEST

START_TEST(dtype_load_and_store_address_one_element) {
    for (uint32_t i = 0; i < ATTND_NUM_DTYPES; i++) {
        float memory[4] = {0}, zero[4] = {0};
        attnd_store(memory, (attnd_dtype)i, 2, -1.5);
        ck_assert(attnd_load(memory, (attnd_dtype)i, 2) == -1.5);
        uint8_t *element = (uint8_t *)memory + 2 * attnd_dtype_bytes(i);
        memset(element, 0, attnd_dtype_bytes(i));
        ck_assert_mem_eq(memory, zero, sizeof(memory));
    }
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("dtype");
    TCase *tc = tcase_create("dtype");
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, dtype_decodes_every_finite_code, 0, NUM_FORMATS);
    tcase_add_loop_test(tc, dtype_round_trips_every_finite_code, 0, NUM_FORMATS);
    tcase_add_loop_test(tc, dtype_rounds_to_nearest_ties_to_even, 0, NUM_FORMATS);
    tcase_add_test(tc, dtype_f16_overflows_to_infinity);
    tcase_add_test(tc, dtype_bf16_overflows_to_infinity);
    tcase_add_test(tc, dtype_f8e4m3_saturates_at_448);
    tcase_add_test(tc, dtype_nan_stays_nan);
    tcase_add_test(tc, dtype_tiny_values_become_signed_zero);
#ifdef __FLT16_MANT_DIG__
    tcase_add_test(tc, dtype_f16_agrees_with_the_compiler);
#endif
    tcase_add_test(tc, dtype_names_and_sizes);
    tcase_add_test(tc, dtype_load_and_store_address_one_element);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
