// decoder nng|ring|inproc|reference URL [SEED [PAUSE_MS [f32|bf16]]]: answers a prompt with 100
// tokens, as numbers; with a pause before each step, to have time to be disturbed.  In bf16 over a
// daemon it is fed the reference's tokens, so that one token that was close does not change all
// that follow; a token that neither is the reference's nor was close is an error.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "attention/attn_engine.h"
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

// run takes a.
static bool run(decoder *d, decoder_attention *a, long pause_ms, const decoder_talk *talk,
                void (*close)(decoder_attention *a)) {
    paused slow = {a, pause_ms};
    decoder_attention with_pause = {&slow, begin, attend, end};
    bool good = a && decoder_run(d, &with_pause, talk);
    if (a) {
        close(a);
    }
    return good;
}

static bool compare(const uint8_t *want, const float *margins, const uint8_t *got) {
    int close = 0;
    for (int i = 0; i < NUM; i++) {
        if (got[i] != want[i] && margins[i] >= DECODER_CLOSE) {
            fprintf(stderr, "decoder: token %d is %d, the reference's is %d by %.4f\n", i, got[i],
                    want[i], (double)margins[i]);
            return false;
        }
        close += got[i] != want[i];
    }
    fprintf(stderr, "decoder: %d of %d tokens are the reference's, %d were close\n", NUM - close,
            NUM, close);
    return true;
}

int main(int argc, char **argv) {
    const char *how = argc > 2 ? argv[1] : "";
    bool ring = strcmp(how, "ring") == 0, reference = strcmp(how, "reference") == 0;
    bool inproc = strcmp(how, "inproc") == 0;
    if (!ring && !reference && !inproc && strcmp(how, "nng") != 0) {
        fprintf(stderr,
                "usage: decoder nng|ring|inproc|reference URL [SEED [PAUSE_MS [f32|bf16]]]\n");
        return 2;
    }
    bool is_bf16 = argc > 5 && strcmp(argv[5], "bf16") == 0;
    const decoder_kind *kind = is_bf16 ? &decoder_bf16 : &decoder_f32;
    attnd_client *c = NULL;
    attnd_errinfo info = {0};
    attnd_connect_opts opts = {.transport = ring     ? ATTND_TRANSPORT_RING
                                            : inproc ? ATTND_TRANSPORT_AUTO
                                                     : ATTND_TRANSPORT_NNG,
                               .engine = inproc ? attn_engine_cpu() : NULL};
    if (!reference && attnd_connect(&c, argv[2], &opts, &info)) {
        fprintf(stderr, "decoder: %s\n", info.text);
        return 1;
    }
    decoder *d = decoder_create(kind, argc > 3 ? strtoull(argv[3], NULL, 10) : 1);
    uint8_t want[NUM] = {0}, out[NUM] = {0};
    float margins[NUM];
    decoder_talk talk = {
        .prompt = (const uint8_t *)prompt, .num_prompt = strlen(prompt), .num = NUM, .out = out};
    long pause_ms = argc > 4 ? strtol(argv[4], NULL, 10) : 0;
    bool good = d != NULL;
    if (good && is_bf16 && !reference) {
        decoder_talk first = talk;
        first.out = want;
        first.margins = margins;
        good = run(d, decoder_reference_open(kind), 0, &first, decoder_reference_close);
        talk.forced = want;
    }
    decoder_attention *a = reference ? decoder_reference_open(kind) : decoder_attnd_open(kind, c);
    good = good &&
           run(d, a, pause_ms, &talk, reference ? decoder_reference_close : decoder_attnd_close);
    if (good && talk.forced) {
        good = compare(want, margins, out);
    }
    for (int i = 0; good && i < NUM; i++) {
        printf("%d%c", out[i], i + 1 < NUM ? ' ' : '\n');
    }
    decoder_free(d);
    attnd_close(c);
    return good ? 0 : 1;
}
