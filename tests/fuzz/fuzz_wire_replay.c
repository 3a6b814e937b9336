// Without libFuzzer: every seed, every cut of it (with the old and with a fitting body_bytes), and
// every aligned 32-bit field at 0, 1, the values round its own, and the largest ones.  With a
// folder as argument it writes the seeds there instead, for libFuzzer to start from.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/fuzz_wire.h"

enum { BODY_BYTES_AT = 20, HEADER_BYTES = 32 };

static void cut(const uint8_t *seed, size_t bytes) {
    static uint8_t copy[FUZZ_SEED_BYTES];
    for (size_t n = 0; n < bytes; n++) {
        LLVMFuzzerTestOneInput(seed, n);
        if (n >= HEADER_BYTES) {
            uint32_t body = (uint32_t)n - HEADER_BYTES;
            memcpy(copy, seed, n);
            memcpy(copy + BODY_BYTES_AT, &body, sizeof(body));
            LLVMFuzzerTestOneInput(copy, n);
        }
    }
}

static void change_fields(uint8_t *seed, size_t bytes) {
    for (size_t at = 0; at + 4 <= bytes; at += 4) {
        uint32_t was;
        memcpy(&was, seed + at, sizeof(was));
        const uint32_t values[] = {0,           1,           was - 1,   was + 1,
                                   was + 8,     was - 8,     was * 2,   0x7fffffffu,
                                   0x80000000u, 0xfffffff8u, UINT32_MAX};
        for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
            memcpy(seed + at, &values[i], sizeof(was));
            LLVMFuzzerTestOneInput(seed, bytes);
        }
        memcpy(seed + at, &was, sizeof(was));
    }
}

static int write_seed(const char *folder, int i, const uint8_t *seed, size_t bytes) {
    char path[4096];
    snprintf(path, sizeof(path), "%s/seed-%02d", folder, i);
    FILE *f = fopen(path, "wb");
    int ok = f && fwrite(seed, 1, bytes, f) == bytes;
    if (!f || fclose(f) || !ok) {
        perror(path);
        return 0;
    }
    return 1;
}

int main(int argc, char **argv) {
    uint8_t seed[FUZZ_SEED_BYTES];
    size_t bytes;
    int num = 0;
    while ((bytes = fuzz_wire_seed(num, seed)) > 0) {
        if (argc > 1) {
            if (!write_seed(argv[1], num, seed, bytes)) {
                return EXIT_FAILURE;
            }
        } else {
            LLVMFuzzerTestOneInput(seed, bytes);
            cut(seed, bytes);
            change_fields(seed, bytes);
        }
        num++;
    }
    printf("%d seeds\n", num);
    return EXIT_SUCCESS;
}
