// A pool of batches, a queue of submitted ones, and threads that check them.
//
// The pool is large enough that the runtime never waits for itself: every sequence may hold an open
// batch, one step may open as many more as its rows fill, and some are left for the queue.  A batch
// holds up to 64 rows or BATCH_BYTES of outputs, whichever is less, but at least one row.
#include "tests/load/bench_verify.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_BATCH_ROWS = 64,
    BATCH_BYTES = 8 << 20,
    QUEUE_BATCHES = 8, // beyond what the runtime may hold
    MAX_THREADS = 64,
};

struct bench_verify {
    const bench_model *model;
    uint64_t seed;
    uint32_t capacity;  // rows of a batch
    uint64_t row_bytes; // of one layer
    bench_batch *batches;
    uint32_t num_batches;
    pthread_t threads[MAX_THREADS];
    uint32_t num_threads; // that run

    pthread_mutex_t lock; // guards all below
    pthread_cond_t queued, given;
    bench_batch *idle;
    bench_batch *head, **tail; // submitted, oldest first
    bool stopping;
    attnd_err failed; // of a verifier
    bench_verdict verdict;
};

// check_batch checks all layers of a batch; the verdict is the thread's own until it is done.
static attnd_err check_batch(const bench_verify *v, bench_check *check, const bench_batch *batch,
                             bench_verdict *sum) {
    for (uint32_t layer = 0; layer < v->model->layers; layer++) {
        bench_rows rows = {
            .prompt = batch->prompt,
            .layer = layer,
            .num_rows = batch->num_rows,
            .positions = batch->positions,
            .calls = batch->calls,
            .out = bench_verify_out(v, batch, layer, 0),
        };
        attnd_err err = bench_check_rows(check, &rows, sum);
        if (err != ATTND_OK) {
            return err;
        }
    }
    return ATTND_OK;
}

// next waits for a submitted batch; NULL when there is none and there will be none.
static bench_batch *next(bench_verify *v) {
    pthread_mutex_lock(&v->lock);
    while (v->head == NULL && !v->stopping) {
        pthread_cond_wait(&v->queued, &v->lock);
    }
    bench_batch *batch = v->head;
    if (batch != NULL) {
        v->head = batch->next;
        v->tail = v->head == NULL ? &v->head : v->tail;
    }
    pthread_mutex_unlock(&v->lock);
    return batch;
}

static void finish(bench_verify *v, bench_batch *batch, attnd_err err, const bench_verdict *sum) {
    pthread_mutex_lock(&v->lock);
    v->failed = err != ATTND_OK ? err : v->failed;
    bench_verdict_add(&v->verdict, sum);
    batch->next = v->idle;
    v->idle = batch;
    pthread_cond_signal(&v->given);
    pthread_mutex_unlock(&v->lock);
}

static void *verifier(void *arg) {
    bench_verify *v = arg;
    bench_check *check = NULL;
    attnd_err err = bench_check_create(&check, v->model, v->seed);
    for (bench_batch *batch = next(v); batch != NULL; batch = next(v)) {
        bench_verdict sum = {0};
        if (check != NULL) {
            err = check_batch(v, check, batch, &sum);
        }
        finish(v, batch, err, &sum);
    }
    bench_check_free(check);
    return NULL;
}

static attnd_err make_batches(bench_verify *v) {
    v->batches = calloc(v->num_batches, sizeof(*v->batches));
    if (v->batches == NULL) {
        return ATTND_ENOMEM;
    }
    for (uint32_t i = 0; i < v->num_batches; i++) {
        bench_batch *b = &v->batches[i];
        b->positions = calloc(v->capacity, sizeof(*b->positions));
        b->calls = calloc(v->capacity, sizeof(*b->calls));
        b->out = malloc(v->row_bytes * v->capacity * v->model->layers);
        b->next = v->idle;
        v->idle = b;
        if (b->positions == NULL || b->calls == NULL || b->out == NULL) {
            return ATTND_ENOMEM;
        }
    }
    return ATTND_OK;
}

static void stop_threads(bench_verify *v) {
    pthread_mutex_lock(&v->lock);
    v->stopping = true;
    pthread_cond_broadcast(&v->queued);
    pthread_mutex_unlock(&v->lock);
    for (uint32_t i = 0; i < v->num_threads; i++) {
        pthread_join(v->threads[i], NULL);
    }
}

static void destroy(bench_verify *v) {
    for (uint32_t i = 0; v->batches != NULL && i < v->num_batches; i++) {
        free(v->batches[i].positions);
        free(v->batches[i].calls);
        free(v->batches[i].out);
    }
    free(v->batches);
    pthread_cond_destroy(&v->queued);
    pthread_cond_destroy(&v->given);
    pthread_mutex_destroy(&v->lock);
    free(v);
}

attnd_err bench_verify_start(bench_verify **out, const bench_model *m,
                             const bench_verify_opts *opts, attnd_errinfo *info) {
    bench_verify *v = calloc(1, sizeof(*v));
    if (v == NULL) {
        return attnd_fail(info, ATTND_ENOMEM, "verify", "no memory for the verifier");
    }
    v->model = m;
    v->seed = opts->seed;
    v->row_bytes = bench_model_out_bytes(m);
    uint64_t fit = BATCH_BYTES / (v->row_bytes * m->layers);
    v->capacity = fit < 1 ? 1 : fit < MAX_BATCH_ROWS ? (uint32_t)fit : MAX_BATCH_ROWS;
    v->num_batches = opts->num_sequences + opts->step_rows / v->capacity + 1 + QUEUE_BATCHES;
    v->tail = &v->head;
    pthread_mutex_init(&v->lock, NULL);
    pthread_cond_init(&v->queued, NULL);
    pthread_cond_init(&v->given, NULL);
    attnd_err err = make_batches(v);
    for (uint32_t i = 0; i < opts->num_threads && i < MAX_THREADS && err == ATTND_OK; i++) {
        err = pthread_create(&v->threads[i], NULL, verifier, v) == 0 ? ATTND_OK : ATTND_ENOMEM;
        v->num_threads += err == ATTND_OK;
    }
    if (err != ATTND_OK) {
        stop_threads(v);
        destroy(v);
        return attnd_fail(info, err, "verify", "no memory or thread for the verifier");
    }
    *out = v;
    return ATTND_OK;
}

uint32_t bench_verify_capacity(const bench_verify *v) {
    return v->capacity;
}

bench_batch *bench_verify_take(bench_verify *v, const bench_prompt *prompt) {
    pthread_mutex_lock(&v->lock);
    while (v->idle == NULL) {
        pthread_cond_wait(&v->given, &v->lock);
    }
    bench_batch *batch = v->idle;
    v->idle = batch->next;
    pthread_mutex_unlock(&v->lock);
    batch->prompt = *prompt;
    batch->num_rows = 0;
    batch->next = NULL;
    return batch;
}

void *bench_verify_out(const bench_verify *v, const bench_batch *batch, uint32_t layer,
                       uint32_t row) {
    return batch->out + ((uint64_t)layer * v->capacity + row) * v->row_bytes;
}

void bench_verify_submit(bench_verify *v, bench_batch *batch) {
    if (batch == NULL) {
        return;
    }
    pthread_mutex_lock(&v->lock);
    batch->next = NULL;
    *v->tail = batch;
    v->tail = &batch->next;
    pthread_cond_signal(&v->queued);
    pthread_mutex_unlock(&v->lock);
}

void bench_verify_discard(bench_verify *v, bench_batch *batch) {
    if (batch == NULL) {
        return;
    }
    pthread_mutex_lock(&v->lock);
    batch->next = v->idle;
    v->idle = batch;
    pthread_mutex_unlock(&v->lock);
}

void bench_verify_progress(bench_verify *v, bench_verdict *out) {
    pthread_mutex_lock(&v->lock);
    *out = v->verdict;
    pthread_mutex_unlock(&v->lock);
}

attnd_err bench_verify_stop(bench_verify *v, bench_verdict *out) {
    *out = (bench_verdict){0};
    if (v == NULL) {
        return ATTND_OK;
    }
    stop_threads(v);
    *out = v->verdict;
    attnd_err err = v->failed;
    destroy(v);
    return err;
}
