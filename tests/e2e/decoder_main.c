// decoder nng|ring|reference URL [SEED [PAUSE_MS]]: answers a prompt with 100 tokens, as numbers;
// with a pause before each step, to have time to be disturbed.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/e2e/decoder.h"

enum { NUM = 100 };

static const char prompt[] = "The keeper of the cache answers:";

// paused is an attention with a pause before each step.
typedef struct paused {
    decoder_attention *inner;
    long ms;
} paused;

static bool begin(void *ctx, uint32_t rows) {
    const paused *p = ctx;
    nanosleep(&(struct timespec){p->ms / 1000, p->ms % 1000 * 1000000}, NULL);
    return p->inner->begin(p->inner->ctx, rows);
}

static bool attend(void *ctx, uint32_t layer, uint32_t rows, const float *q, const float *k,
                   const float *v, float *out) {
    const paused *p = ctx;
    return p->inner->attend(p->inner->ctx, layer, rows, q, k, v, out);
}

static bool end(void *ctx, uint32_t rows) {
    const paused *p = ctx;
    return p->inner->end(p->inner->ctx, rows);
}

int main(int argc, char **argv) {
    const char *how = argc > 2 ? argv[1] : "";
    bool ring = strcmp(how, "ring") == 0, reference = strcmp(how, "reference") == 0;
    if (!ring && !reference && strcmp(how, "nng") != 0) {
        fprintf(stderr, "usage: decoder nng|ring|reference URL [SEED [PAUSE_MS]]\n");
        return 2;
    }
    attnd_client *c = NULL;
    attnd_errinfo info = {0};
    attnd_connect_opts opts = {.transport = ring ? ATTND_TRANSPORT_RING : ATTND_TRANSPORT_NNG};
    if (!reference && attnd_connect(&c, argv[2], &opts, &info)) {
        fprintf(stderr, "decoder: %s\n", info.text);
        return 1;
    }
    decoder *d = decoder_create(argc > 3 ? strtoull(argv[3], NULL, 10) : 1);
    decoder_attention *a = reference ? decoder_reference_open() : decoder_attnd_open(c);
    uint8_t out[NUM] = {0};
    paused slow = {a, argc > 4 ? strtol(argv[4], NULL, 10) : 0};
    decoder_attention with_pause = {&slow, begin, attend, end};
    bool good =
        d && a && decoder_run(d, &with_pause, (const uint8_t *)prompt, strlen(prompt), out, NUM);
    for (int i = 0; good && i < NUM; i++) {
        printf("%d%c", out[i], i + 1 < NUM ? ' ' : '\n');
    }
    if (a) {
        (reference ? decoder_reference_close : decoder_attnd_close)(a);
    }
    decoder_free(d);
    attnd_close(c);
    return good ? 0 : 1;
}
