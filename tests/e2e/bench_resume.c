// bench_resume [BATCH [KV_LEN [LAYERS]]]: how long clients wait for a daemon that was killed.
// Sequences of llama-3-8b's geometry (bf16, some of its layers) are filled, then read by decodes;
// the worker is killed by SIGKILL in between.  Prints the median of the attends before, the time
// until the session is attached again, and each layer's first attend after it, beside the median of
// the same process's later ones.
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "proto/client/attnd.h"

enum { Q_HEADS = 32, KV_HEADS = 8, DIM = 128, MAX_BATCH = 64, CHUNK = 256, REPS = 15 };

static attnd_client *c;
static attnd_errinfo info;
static uint32_t model, layers = 4, batch = 8, kv_len = 1024;
static uint64_t seqs[MAX_BATCH];
static uint16_t *q, *k, *v, *out; // bf16

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void must(attnd_err err) {
    if (err) {
        fprintf(stderr, "bench_resume: %s %s: %s\n", attnd_errname(err), info.field, info.text);
        exit(1);
    }
}

static void need(bool good, const char *what) {
    if (!good) {
        fprintf(stderr, "bench_resume: %s\n", what);
        exit(1);
    }
}

// start runs a keeper in dir and waits until its worker is ready.
static pid_t start(const char *url) {
    int fds[2];
    char line[256] = "";
    need(pipe(fds) == 0, "pipe");
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(fds[1], STDOUT_FILENO);
        execl(ATTND_BINARY, "attnd", "--listen", url, "--set", "server.log_level=error", "--set",
              "cache.memory=1GiB", NULL);
        _exit(127);
    }
    close(fds[1]);
    FILE *out_of = fdopen(fds[0], "r");
    need(out_of && fgets(line, sizeof(line), out_of) && strncmp(line, "attnd ready", 11) == 0,
         "attnd did not start");
    return pid; // the pipe stays open for what later workers print
}

static void open_model(void) {
    attnd_model_opts opts = {.name = "llama",
                             .dtype = ATTND_BF16,
                             .kv_dtype = ATTND_BF16,
                             .layers = layers,
                             .q_heads = Q_HEADS,
                             .kv_heads = KV_HEADS,
                             .head_dim = DIM,
                             .all = ATTND_LAYER_DEFAULT};
    must(attnd_model_open(c, &opts, &model, &info));
}

static double attend(uint64_t step, uint32_t layer, uint32_t rows, bool new) {
    attnd_attend_args args = {.step = step,
                              .model = model,
                              .layer = layer,
                              .rows = rows,
                              .new_rows = new ? rows : 0,
                              .q = q,
                              .k = new ? k : NULL,
                              .v = new ? v : NULL,
                              .out = out};
    double from = now_us();
    must(attnd_attend(c, &args, NULL, &info));
    return now_us() - from;
}

static void fill(uint32_t i) {
    must(attnd_seq_create(c, model, &seqs[i], &info));
    for (uint32_t len = 0; len < kv_len; len += CHUNK) {
        attnd_step_seq s = {.seq = seqs[i], .new_len = CHUNK};
        uint64_t step;
        must(attnd_step_open(c, model, &s, 1, NULL, &step, &info));
        for (uint32_t l = 0; l < layers; l++) {
            attend(step, l, CHUNK, true);
        }
        must(attnd_step_commit(c, step, &(attnd_accept){.accepted = CHUNK}, 1, NULL, &info));
    }
}

// read_all attends every layer once for the whole batch; us [layers].
static void read_all(double *us) {
    attnd_step_seq s[MAX_BATCH];
    uint64_t step;
    for (uint32_t i = 0; i < batch; i++) {
        s[i] = (attnd_step_seq){.seq = seqs[i], .q_len = 1};
    }
    must(attnd_step_open(c, model, s, batch, NULL, &step, &info));
    for (uint32_t l = 0; l < layers; l++) {
        us[l] = attend(step, l, batch, false);
    }
    must(attnd_step_cancel(c, step, &info));
}

static double steady(void) {
    double *us = calloc((size_t)layers * REPS, sizeof(*us));
    for (uint32_t i = 0; i < REPS; i++) {
        read_all(us + i * layers);
    }
    qsort(us, (size_t)layers * REPS, sizeof(*us), by_value);
    double median = us[layers * REPS / 2];
    free(us);
    return median;
}

static double kill_and_attach(pid_t keeper) {
    char path[64];
    int worker = 0;
    snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)keeper, (int)keeper);
    FILE *f = fopen(path, "re");
    need(f && fscanf(f, "%d", &worker) == 1, path);
    fclose(f);
    double from = now_us();
    kill(worker, SIGKILL);
    char *reply;
    while (!attnd_admin(c, "stats", NULL, &reply, &info)) { // until the loss is noticed
        attnd_free(reply);
    }
    must(attnd_reconnect(c, &info));
    return now_us() - from;
}

int main(int argc, char **argv) {
    char dir[] = "/tmp/attnd_resume_XXXXXX", url[64];
    batch = argc > 1 ? (uint32_t)atoi(argv[1]) : batch;
    kv_len = argc > 2 ? (uint32_t)atoi(argv[2]) : kv_len;
    layers = argc > 3 ? (uint32_t)atoi(argv[3]) : layers;
    need(batch >= 1 && batch <= MAX_BATCH && kv_len % CHUNK == 0 && layers >= 1,
         "BATCH up to 64, KV_LEN a multiple of 256");
    q = calloc(CHUNK * Q_HEADS * DIM, 2);
    out = calloc(CHUNK * Q_HEADS * DIM, 2);
    k = calloc(CHUNK * KV_HEADS * DIM, 2);
    v = calloc(CHUNK * KV_HEADS * DIM, 2);
    double *first = calloc(layers, sizeof(*first));
    need(q && out && k && v && first && mkdtemp(dir), "no memory, or no folder");
    snprintf(url, sizeof(url), "ipc://%s/s", dir);
    pid_t keeper = start(url);
    must(attnd_connect(&c, url, NULL, &info));
    open_model();
    for (uint32_t i = 0; i < batch; i++) {
        fill(i);
    }
    double before = steady();
    double away = kill_and_attach(keeper);
    read_all(first);
    double after = steady(), worst = 0;
    for (uint32_t l = 0; l < layers; l++) {
        worst = first[l] > worst ? first[l] : worst;
    }
    printf(
        "resume batch=%u kv=%u layers=%u llama-3-8b bf16 | away %.1f ms | attend before %.0f us, "
        "first after %.0f us, worst first of a layer %.0f us, then %.0f us | worst %.2fx\n",
        batch, kv_len, layers, away / 1e3, before, first[0], worst, after, worst / after);
    attnd_close(c);
    kill(keeper, SIGTERM);
    waitpid(keeper, NULL, 0);
    rmdir(dir);
    return 0;
}
