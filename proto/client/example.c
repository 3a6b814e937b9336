// A first request to attnd in C: a model of one layer, a sequence, a prompt of 20 tokens, one token
// more; the last output is checked against softmax(q k / sqrt(head_dim)) v.
//     cc example.c $(pkg-config --cflags --libs attnd) -lm && ./a.out ipc:///run/attnd/attnd.sock
#include <attnd.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 4, KV_HEADS = 2, DIM = 16, PROMPT = 20, TOKENS = PROMPT + 1 };

static float q[TOKENS][HEADS][DIM], k[TOKENS][KV_HEADS][DIM], v[TOKENS][KV_HEADS][DIM];
static float out[TOKENS][HEADS][DIM];

static void check(attnd_err err, const attnd_errinfo *info) {
    if (err) {
        fprintf(stderr, "%s: %s\n", attnd_errname(err), info->text);
        exit(1);
    }
}

static void fill(float *x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        x[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    }
}

// expected is the definition for the last token, which sees every key.
static double expected(int head, int d) {
    double sum = 0, weighted = 0;
    int kv_head = head / (HEADS / KV_HEADS);
    for (int j = 0; j < TOKENS; j++) {
        double x = 0;
        for (int i = 0; i < DIM; i++) {
            x += (double)q[TOKENS - 1][head][i] * (double)k[j][kv_head][i];
        }
        double p = exp(x / sqrt(DIM));
        sum += p;
        weighted += p * (double)v[j][kv_head][d];
    }
    return weighted / sum;
}

// forward appends new_len tokens from `first` on and attends their one layer.
static void forward(attnd_client *c, uint32_t model, uint64_t seq, int first, uint32_t new_len) {
    attnd_errinfo info = {0};
    uint64_t step = 0;
    attnd_step_seq s = {.seq = seq, .new_len = new_len};
    attnd_step_opts opts = {.deadline_ms = 1000};
    check(attnd_step_open(c, model, &s, 1, &opts, &step, &info), &info);
    attnd_attend_args args = {.step = step,
                              .model = model,
                              .layer = 0,
                              .rows = new_len,
                              .new_rows = new_len,
                              .q = q[first],
                              .k = k[first],
                              .v = v[first],
                              .out = out[first]};
    attnd_ran ran;
    check(attnd_attend(c, &args, &ran, &info), &info);
    check(attnd_step_commit(c, step, &(attnd_accept){.accepted = new_len}, 1, NULL, &info), &info);
    printf("%u tokens by %s\n", new_len, ran.kernel);
}

int main(int argc, char **argv) {
    attnd_errinfo info = {0};
    attnd_client *c = NULL;
    const char *url = argc > 1 ? argv[1] : "ipc:///run/attnd/attnd.sock";
    check(attnd_connect(&c, url, NULL, &info), &info);
    attnd_model_opts opts = {.name = "example-c",
                             .dtype = ATTND_F32,
                             .kv_dtype = ATTND_F32,
                             .layers = 1,
                             .q_heads = HEADS,
                             .kv_heads = KV_HEADS,
                             .head_dim = DIM,
                             .all = ATTND_LAYER_DEFAULT};
    uint32_t model = 0;
    uint64_t seq = 0;
    check(attnd_model_open(c, &opts, &model, &info), &info);
    check(attnd_seq_create(c, model, &seq, &info), &info);

    fill(&q[0][0][0], sizeof(q) / sizeof(float));
    fill(&k[0][0][0], sizeof(k) / sizeof(float));
    fill(&v[0][0][0], sizeof(v) / sizeof(float));
    forward(c, model, seq, 0, PROMPT);
    forward(c, model, seq, PROMPT, 1);

    double worst = 0;
    for (int i = 0; i < HEADS * DIM; i++) {
        double error = fabs((double)out[TOKENS - 1][i / DIM][i % DIM] - expected(i / DIM, i % DIM));
        worst = error > worst ? error : worst;
    }
    printf("max error %.1e\n", worst);
    attnd_close(c);
    return worst < 1e-5 ? 0 : 1;
}
