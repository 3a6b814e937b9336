// `attn-bench audit`: how far the results of every kernel are from float64, by storage type and
// length, beside the bound that attention computed step by step in that type sets.  A sample of
// outputs of each case is computed once and held against all kernels.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/load/bench_backend.h"
#include "tests/load/bench_cmd.h"
#include "tests/load/bench_host.h"
#include "tests/load/bench_kernels.h"
#include "tests/load/bench_opts.h"
#include "tests/load/bench_team.h"

enum { MAX_KERNELS = 8, MAX_LINES = 512, AUDIT_KEYS = 1 << 18, SEED = 1 };

static const char *const types[] = {"f32", "bf16", "f16", "f8e4m3", NULL};

// What follows the type in the name of a case.
static const char *const shapes[] = {
    "decode %s 8/2 kv_len 1",
    "decode %s 8/2 kv_len 64",
    "decode %s 8/2 kv_len 512",
    "decode %s 8/2 kv_len 4096",
    "decode %s 8/2 kv_len 32768",
    "decode %s 8/2 kv_len 131072",
    "decode %s 8/8 kv_len 4096",
    "decode %s 8/2 head_dim 64 kv_len 4096",
    "prefill %s 8/2 q_len 64",
    "prefill %s 8/2 q_len 512",
    "prefill %s 8/2 q_len 2048",
    "prefill %s 8/2 q_len 128 kv_len 8192",
    NULL,
};

// line is one kernel on one case.
typedef struct line {
    char name[BENCH_CASE_BYTES];
    const char *kernel;
    bench_error error;
} line;

// audit is the run.
typedef struct audit {
    const bench_backend_ops *ops;
    bench_backend *kernels[MAX_KERNELS]; // one of each that there is here
    uint32_t num_kernels;
    line lines[MAX_LINES];
    uint32_t num, num_wrong;
} audit;

typedef struct audit_opts {
    const char *backend, *json, *pattern, *kernel;
    uint32_t threads;
    bool help;
} audit_opts;

static void add(audit *a, const char *name, const char *kernel, const bench_error *error) {
    line *l = &a->lines[a->num++];
    *l = (line){.kernel = kernel, .error = *error};
    snprintf(l->name, sizeof(l->name), "%s", name);
    bool is_right = error->max <= error->bound;
    a->num_wrong += !is_right;
    printf("%-40s | %-28s | %9.2e | %9.2e | %9.2e at row %u token %d head %d | %9.2e | %5.2f%s\n",
           name, kernel, error->max, error->rms, error->worst_rms, error->worst.row,
           error->worst.token, error->worst.head, error->bound, error->max / error->bound,
           is_right ? "" : " ABOVE");
    fflush(stdout);
}

// run_kernel computes a case on one kernel and compares.
static attnd_err run_kernel(audit *a, bench_backend *b, const bench_set *s,
                            const bench_exact *exact, const bench_arena *arena, const char *name,
                            attnd_errinfo *info) {
    attn_choice choice = {0};
    memset(s->out, 0xff, s->out_bytes);
    attnd_err err = a->ops->put(b, arena, info);
    err = err == ATTND_OK ? a->ops->run(b, &s->launch, &choice, info) : err;
    if (err == ATTND_ENOTSUP) {
        printf("%-40s | not supported: %s\n", name, info->text);
        return ATTND_OK;
    }
    err = err == ATTND_OK ? a->ops->get(b, s->out, s->out_bytes, info) : err;
    if (err == ATTND_OK) {
        bench_error error = bench_exact_compare(exact, &s->params);
        add(a, name, choice.kernel, &error);
    }
    return err;
}

static attnd_err run_case(audit *a, const bench_case *c, attnd_errinfo *info) {
    char name[BENCH_CASE_BYTES];
    bench_arena arena;
    bench_case_name(c, name);
    attnd_err err = bench_arena_open(&arena, bench_set_bytes(c), true, info);
    if (err != ATTND_OK) {
        return err;
    }
    for (uint32_t i = 0; i < a->num_kernels && err == ATTND_OK; i++) {
        bench_backend *b = a->kernels[i];
        uint32_t threads = a->ops->threads(b);
        int64_t delta = 0;
        bench_set set = {0};
        static bench_exact exact;
        bench_arena_reset(&arena);
        err = a->ops->place(b, &arena, &delta, info);
        err = err == ATTND_OK ? bench_set_init(&set, c, &arena, delta, SEED, threads, info) : err;
        if (err == ATTND_OK && i == 0) { // the data are the same for all
            bench_exact_fini(&exact);
            err = bench_exact_init(&exact, &set.params, AUDIT_KEYS, SEED, threads);
        }
        err = err == ATTND_OK ? run_kernel(a, b, &set, &exact, &arena, name, info) : err;
        bench_set_fini(&set);
    }
    bench_arena_close(&arena);
    return err;
}

static attnd_err run_all(audit *a, const char *pattern, attnd_errinfo *info) {
    printf("%-40s | %-28s | %9s | %9s | %-36s | %9s | %s\n", "case", "kernel", "max", "RMS",
           "RMS of the worst row", "bound", "max / bound");
    for (int t = 0; types[t]; t++) {
        for (int s = 0; shapes[s]; s++) {
            char text[BENCH_CASE_BYTES], name[BENCH_CASE_BYTES];
            const char *hole = strstr(shapes[s], "%s");
            bench_case c;
            snprintf(text, sizeof(text), "%.*s%s%s", (int)(hole - shapes[s]), shapes[s], types[t],
                     hole + 2);
            attnd_err err = bench_case_parse(&c, text, info);
            if (err != ATTND_OK) {
                return err;
            }
            bench_case_name(&c, name);
            err = bench_case_matches(name, pattern) ? run_case(a, &c, info) : ATTND_OK;
            if (err != ATTND_OK) {
                return err;
            }
        }
    }
    return ATTND_OK;
}

// open_kernels opens those that this machine has; one that was asked for must be there.
static attnd_err open_kernels(audit *a, const audit_opts *o, attnd_errinfo *info) {
    attnd_errinfo why = {.text = "no such name"};
    for (int i = 0; a->ops->kernels[i]; i++) {
        if (o->kernel && strcmp(o->kernel, a->ops->kernels[i]) != 0) {
            continue;
        }
        bench_backend_opts opts = {.kernel = a->ops->kernels[i], .threads = o->threads};
        attnd_err err = a->ops->open(&a->kernels[a->num_kernels], &opts, info);
        if (err == ATTND_OK) {
            a->num_kernels++;
        } else if (err != ATTND_ENOTSUP) {
            return err;
        }
        why = *info;
    }
    return a->num_kernels > 0
               ? ATTND_OK
               : attnd_fail(info, ATTND_ENOTSUP, "isa", "no kernels of \"%s\" on this machine: %s",
                            o->kernel ? o->kernel : o->backend, why.text);
}

static bool write_json(const audit *a, const char *path) {
    bench_host host;
    bench_host_read(&host);
    cJSON *doc = cJSON_CreateObject();
    cJSON_AddStringToObject(doc, "what", "attn-bench audit");
    cJSON_AddStringToObject(doc, "version", ATTND_VERSION);
    cJSON_AddStringToObject(doc, "cpu", host.cpu);
    cJSON_AddStringToObject(doc, "backend", a->ops->name);
    cJSON_AddNumberToObject(doc, "above_bound", a->num_wrong);
    cJSON *list = cJSON_AddArrayToObject(doc, "cases");
    for (uint32_t i = 0; i < a->num; i++) {
        const line *l = &a->lines[i];
        cJSON *one = cJSON_CreateObject();
        cJSON_AddStringToObject(one, "case", l->name);
        cJSON_AddStringToObject(one, "kernel", l->kernel);
        cJSON_AddNumberToObject(one, "max", l->error.max);
        cJSON_AddNumberToObject(one, "rms", l->error.rms);
        cJSON_AddNumberToObject(one, "worst_row_rms", l->error.worst_rms);
        cJSON_AddNumberToObject(one, "worst_row", l->error.worst.row);
        cJSON_AddNumberToObject(one, "worst_token", l->error.worst.token);
        cJSON_AddNumberToObject(one, "worst_head", l->error.worst.head);
        cJSON_AddNumberToObject(one, "bound", l->error.bound);
        cJSON_AddNumberToObject(one, "rows_compared", l->error.places);
        cJSON_AddItemToArray(list, one);
    }
    bool is_good = bench_json_write(doc, path);
    cJSON_Delete(doc);
    return is_good;
}

static int execute(const audit_opts *o, const bench_backend_ops *ops) {
    static audit a;
    attnd_errinfo info = {0};
    a.ops = ops;
    attnd_err err = open_kernels(&a, o, &info);
    err = err == ATTND_OK ? run_all(&a, o->pattern, &info) : err;
    for (uint32_t i = 0; i < a.num_kernels; i++) {
        ops->close(a.kernels[i]);
    }
    if (err != ATTND_OK) {
        fprintf(stderr, "attn-bench audit: %s: %s\n", attnd_errname(err), info.text);
        return BENCH_EXIT_FAILED;
    }
    if (a.num == 0) {
        fprintf(stderr, "attn-bench audit: no case is meant by \"%s\"\n", o->pattern);
        return BENCH_EXIT_USAGE;
    }
    printf("%u of %u within the bound\n", a.num - a.num_wrong, a.num);
    bool is_written = !o->json || write_json(&a, o->json);
    return a.num_wrong == 0 && is_written ? BENCH_EXIT_OK : BENCH_EXIT_FAILED;
}

int bench_audit(int argc, char **argv) {
    audit_opts o = {.backend = "cpu"};
    attnd_errinfo info = {0};
    bench_opt table[] = {
        {"backend", BENCH_OPT_TEXT, &o.backend, "NAME", "cpu (the default) or cuda", 0, 0, false},
        {"case", BENCH_OPT_TEXT, &o.pattern, "PATTERN",
         "only cases whose name contains or, with *?[, matches it", 0, 0, false},
        {"isa", BENCH_OPT_TEXT, &o.kernel, "NAME",
         "kernels of this instruction set (cuda: see kernels --help); default: all of this machine",
         0, 0, false},
        {"threads", BENCH_OPT_U32, &o.threads, "N", "cpu: default all processors", 1,
         BENCH_MAX_THREADS, false},
        {"json", BENCH_OPT_TEXT, &o.json, "FILE", "write the result there too", 0, 0, false},
        {"help", BENCH_OPT_FLAG, &o.help, NULL, "print this", 0, 0, false},
        {NULL, BENCH_OPT_HEADING, NULL, NULL, NULL, 0, 0, false},
    };
    const bench_backend_ops *ops = NULL;
    attnd_err err = bench_opts_parse(table, argc, argv, &info);
    err = err ? err : bench_backend_find(&ops, o.backend, &info);
    int status;
    if (bench_opts_ended(table, "audit", o.help, err, &info, &status)) {
        return status;
    }
    return execute(&o, ops);
}
