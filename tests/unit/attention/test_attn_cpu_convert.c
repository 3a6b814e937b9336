// The fast conversions against the plain ones of proto/dtype.h: every narrow value, and floats
// around every one that a narrow type can hold.
#include "attention/cpu/attn_cpu_convert.h"

#include <math.h>
#include <stdbool.h>

#include "tests/check_main.h"

// same says that two floats are alike: bits, or both NaN.
static bool same(float a, float b) {
    return (isnan(a) && isnan(b)) || attn_bits_of(a) == attn_bits_of(b);
}

// element is room for any type; little endian, so that a number's low bytes come first.
typedef union element {
    uint32_t bits;
    unsigned char bytes[4];
} element;

static float narrow_to_f32(attnd_dtype dtype, uint32_t x) {
    element e = {.bits = x};
    float f;
    attn_to_f32(&f, e.bytes, dtype, 1);
    return f;
}

static uint32_t f32_to_narrow(attnd_dtype dtype, float f) {
    element e = {0};
    attn_from_f32(e.bytes, &f, dtype, 1);
    return e.bits;
}

static float plain_to_f32(attnd_dtype dtype, uint32_t x) {
    element e = {.bits = x};
    return (float)attnd_load(e.bytes, dtype, 0);
}

static const attnd_dtype narrow[] = {ATTND_BF16, ATTND_F16, ATTND_F8E4M3};

START_TEST(every_narrow_value_becomes_the_same_float) {
    uint32_t num = 1u << 8 * attnd_dtype_bytes(narrow[_i]);
    uint32_t num_same = 0;
    for (uint32_t x = 0; x < num; x++) {
        num_same += same(narrow_to_f32(narrow[_i], x), plain_to_f32(narrow[_i], x));
    }
    ck_assert_uint_eq(num_same, num);
}
END_TEST

static void compare(attnd_dtype dtype, float f) {
    element e = {0};
    attnd_store(e.bytes, dtype, 0, (double)f);
    float want = (float)attnd_load(e.bytes, dtype, 0);
    float got = plain_to_f32(dtype, f32_to_narrow(dtype, f));
    if (!same(got, want)) { // a check that holds costs a microsecond, and there are a million
        ck_abort_msg("%a: %a, want %a", (double)f, (double)got, (double)want);
    }
}

// The values themselves, what lies half way to the next, and the floats beside both.
START_TEST(floats_round_alike) {
    attnd_dtype dtype = narrow[_i];
    uint32_t num = 1u << (8 * attnd_dtype_bytes(dtype) - 1);
    for (uint32_t x = 0; x + 1 < num; x++) {
        float a = plain_to_f32(dtype, x);
        float b = plain_to_f32(dtype, x + 1);
        float middle = isfinite(b) ? a + (b - a) / 2 : a * 1.5f;
        const float some[] = {a, middle, nextafterf(middle, 0), nextafterf(middle, INFINITY),
                              nextafterf(a, INFINITY)};
        for (int i = 0; i < 5; i++) {
            compare(dtype, some[i]);
            compare(dtype, -some[i]);
        }
    }
}
END_TEST

START_TEST(extreme_floats_convert_alike) {
    const float some[] = {0.0f,   -0.0f,   INFINITY, NAN,      65504.0f, 65519.9f, 65520.0f,
                          1e30f,  3.4e38f, 448.0f,   449.0f,   464.0f,   480.0f,   1e-8f,
                          1e-40f, 2e-45f,  0x1p-25f, 0x1p-24f, 0x1p-10f, 0x1p-9f};
    for (size_t i = 0; i < sizeof(some) / sizeof(some[0]); i++) {
        compare(narrow[_i], some[i]);
        compare(narrow[_i], -some[i]);
    }
}
END_TEST

START_TEST(f32_is_copied) {
    const float x[3] = {1, 2, 3};
    float a[3];
    float b[3];
    attn_to_f32(a, x, ATTND_F32, 3);
    attn_from_f32(b, a, ATTND_F32, 3);
    ck_assert_mem_eq(b, x, sizeof(x));
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("attn_cpu_convert");
    TCase *c = tcase_create("convert");
    tcase_set_timeout(c, 60);
    tcase_add_loop_test(c, every_narrow_value_becomes_the_same_float, 0, 3);
    tcase_add_loop_test(c, floats_round_alike, 0, 3);
    tcase_add_loop_test(c, extreme_floats_convert_alike, 0, 3);
    tcase_add_test(c, f32_is_copied);
    suite_add_tcase(s, c);
    return s;
}

CHECK_MAIN(suite)
