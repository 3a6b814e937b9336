// `attn-bench kernels`: time, bytes and operations of the kernels, each beside what the machine can
// do, and what is asked of them.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/load/bench_cmd.h"
#include "tests/load/bench_kernels.h"
#include "tests/load/bench_opts.h"
#include "tests/load/bench_team.h"

enum { DEFAULT_REPS = 11, MIN_COLD_BYTES = 256 << 20, COLD_CACHES = 3, MAX_COMMAND = 512 };
enum { MAX_LENGTH = 1 << 30 }; // of --lengths: their sum is exact

typedef struct kernels_opts {
    const char *backend, *json, *pattern, *kernel, *lengths, *peer;
    uint32_t threads, reps, cold_mib;
    bool help;
} kernels_opts;

static struct {
    bench_result results[BENCH_MAX_RESULTS];
    uint32_t num;
    bench_verdict_line verdicts[BENCH_MAX_VERDICTS];
    double lengths[BENCH_MAX_BATCH]; // of --lengths
    int32_t num_lengths;
    bool has_lengths; // some case has them
} run;

static int fail(const char *what, const attnd_errinfo *info) {
    fprintf(stderr, "attn-bench kernels: %s%s%s\n", what, what[0] != '\0' ? ": " : "", info->text);
    return BENCH_EXIT_FAILED;
}

// read_lengths reads --lengths: numbers, one a line.
static attnd_err read_lengths(const char *path, attnd_errinfo *info) {
    FILE *f = fopen(path, "re");
    while (f && run.num_lengths < BENCH_MAX_BATCH &&
           fscanf(f, "%lf", &run.lengths[run.num_lengths]) == 1 &&
           run.lengths[run.num_lengths] > 0 && run.lengths[run.num_lengths] <= MAX_LENGTH) {
        run.num_lengths++;
    }
    bool is_whole = f && feof(f) && run.num_lengths > 0;
    if (f) {
        fclose(f);
    }
    return is_whole ? ATTND_OK
                    : attnd_fail(info, ATTND_EINVAL, "lengths",
                                 "--lengths %s: not a file of up to %d positive numbers", path,
                                 BENCH_MAX_BATCH);
}

// select_cases parses the cases of a group that the pattern means.
static uint32_t select_cases(const char *const *group, const char *pattern, bench_case *cases) {
    uint32_t num = 0;
    for (; *group; group++) {
        attnd_errinfo info = {0};
        char name[BENCH_CASE_BYTES];
        bench_case c;
        if (bench_case_parse(&c, *group, &info) != ATTND_OK || num == BENCH_MAX_GROUP) {
            fprintf(stderr, "attn-bench: \"%s\": %s\n", *group, info.text);
            abort(); // the grid is ours
        }
        bench_case_name(&c, name);
        c.weights = c.kind == BENCH_RAGGED && c.batch == run.num_lengths ? run.lengths : NULL;
        if (bench_case_matches(name, pattern)) {
            cases[num++] = c;
            run.has_lengths = run.has_lengths || c.weights;
        }
    }
    return num;
}

// visit calls bench_group_run, or adds up what it needs when b is NULL, for every group that has a
// case of the pattern.
static attnd_err visit(const bench_backend_ops *ops, bench_backend *b, bench_arena *arena,
                       const char *const *const *groups, const char *pattern,
                       const bench_timing *timing, uint64_t *bytes, attnd_errinfo *info) {
    for (; *groups; groups++) {
        bench_case cases[BENCH_MAX_GROUP];
        uint32_t num = select_cases(*groups, pattern, cases);
        uint64_t need = num > 0 ? bench_group_bytes(cases, num, timing) : 0;
        *bytes = need > *bytes ? need : *bytes;
        if (num == 0 || !b) {
            continue;
        }
        attnd_err err =
            bench_group_run(b, ops, arena, cases, num, timing, &run.results[run.num], info);
        if (err != ATTND_OK) {
            return err;
        }
        for (uint32_t i = 0; i < num; i++) {
            char text[BENCH_RESULT_BYTES];
            bench_result_text(&run.results[run.num++], text);
            printf("%s\n", text);
        }
        fflush(stdout);
    }
    return ATTND_OK;
}

// conclude prints the verdicts; the exit status says whether every output was right.
static int conclude(const kernels_opts *o, bench_kernels_report *r, const bench_ask *asks) {
    r->results = run.results;
    r->num_results = run.num;
    r->verdicts = run.verdicts;
    r->num_verdicts = bench_verdicts(asks, run.results, run.num, run.verdicts, BENCH_MAX_VERDICTS);
    uint32_t met = 0;
    for (uint32_t i = 0; i < r->num_verdicts; i++) {
        char text[BENCH_VERDICT_BYTES];
        bench_verdict_text(&run.verdicts[i], text);
        printf("asked: %s\n", text);
        met += run.verdicts[i].is_met;
    }
    if (r->num_verdicts > 0) {
        printf("%u of %u met\n", met, r->num_verdicts);
    }
    bool is_right = true;
    for (uint32_t i = 0; i < run.num; i++) {
        is_right = is_right && run.results[i].error.max <= run.results[i].error.bound;
    }
    if (!is_right) {
        fprintf(stderr, "attn-bench kernels: outputs are WRONG\n");
    }
    if (o->json) {
        cJSON *doc = bench_kernels_json(r);
        is_right = bench_json_write(doc, o->json) && is_right;
        cJSON_Delete(doc);
    }
    return is_right ? BENCH_EXIT_OK : BENCH_EXIT_FAILED;
}

// set_timing decides how a run measures.
static void set_timing(bench_kernels_report *r, const kernels_opts *o,
                       const bench_backend_ops *ops) {
    uint64_t cold = COLD_CACHES * r->last_cache;
    cold = cold < MIN_COLD_BYTES ? MIN_COLD_BYTES : cold;
    cold = cold < 2 * ops->sample_bytes ? 2 * ops->sample_bytes : cold;
    r->timing = (bench_timing){.reps = o->reps,
                               .cold_bytes = o->cold_mib > 0 ? (uint64_t)o->cold_mib << 20 : cold,
                               .sample_bytes = ops->sample_bytes,
                               .sample_calls = ops->sample_calls,
                               .seed = 1};
}

// execute opens everything, runs, and closes.
static int execute(const kernels_opts *o, const bench_backend_ops *ops, const char *command) {
    attnd_errinfo info = {0}, why = {0};
    bench_backend *b = NULL;
    bench_backend_opts opts = {.kernel = o->kernel, .threads = o->threads, .peer = o->peer};
    // A case that is written out is a group of its own.
    bench_case whole;
    const char *const one[] = {o->pattern, NULL};
    const char *const *const alone[] = {one, NULL};
    bool is_whole = o->pattern && bench_case_parse(&whole, o->pattern, &why) == ATTND_OK;
    const char *const *const *groups = is_whole ? alone : ops->groups;
    const char *pattern = is_whole ? NULL : o->pattern;
    if (ops->open(&b, &opts, &info) != ATTND_OK) {
        return fail(ops->name, &info);
    }
    double begin = bench_now();
    bench_kernels_report r = {.backend = ops->name, .command = command};
    r.last_cache = ops->last_cache(b);
    set_timing(&r, o, ops);
    uint64_t bytes = 0;
    bench_arena arena = {0};
    visit(ops, NULL, NULL, groups, pattern, &r.timing, &bytes, &info);
    int status = BENCH_EXIT_USAGE;
    if (bytes == 0) {
        fprintf(stderr, "attn-bench kernels: no case is meant by \"%s\", nor is it one: %s\n",
                o->pattern, why.text);
    } else if (o->lengths && !run.has_lengths) {
        fprintf(stderr, "attn-bench kernels: --lengths: no ragged case of %d sequences is meant\n",
                run.num_lengths);
    } else if (bench_arena_open(&arena, bytes, true, &info) != ATTND_OK) {
        status = fail("arena", &info);
    } else {
        r.arena_bytes = arena.bytes;
        r.arena_huge = bench_arena_huge(&arena);
        r.peer_missing = ops->peer_missing ? ops->peer_missing(b) : NULL;
        ops->describe(b, r.device, sizeof(r.device));
        printf("attn-bench kernels: %s, %s; cold by %llu MiB (last cache %llu MiB), %llu of %llu "
               "MiB in huge pages; medians of %u or more\n",
               ops->name, r.device, (unsigned long long)(r.timing.cold_bytes >> 20),
               (unsigned long long)(r.last_cache >> 20), (unsigned long long)(r.arena_huge >> 20),
               (unsigned long long)(arena.bytes >> 20), o->reps);
        if (r.peer_missing) {
            printf("%s\n", r.peer_missing);
        }
        r.num_machine = ops->machine(b, &arena, r.machine);
        for (uint32_t i = 0; i < r.num_machine; i++) {
            printf("%s: %.1f %s\n", r.machine[i].what, r.machine[i].value,
                   r.machine[i].is_bytes ? "GB/s" : "GFLOP/s");
        }
        attnd_err err = visit(ops, b, &arena, groups, pattern, &r.timing, &bytes, &info);
        r.seconds = bench_now() - begin;
        if (ops->state) {
            ops->state(b, r.state, sizeof(r.state));
            printf("at the end: %s\n", r.state);
        }
        status = err == ATTND_OK ? conclude(o, &r, ops->asks) : fail(attnd_errname(err), &info);
    }
    bench_arena_close(&arena);
    ops->close(b);
    return status;
}

static void join_command(char out[MAX_COMMAND], int argc, char **argv) {
    size_t used = (size_t)snprintf(out, MAX_COMMAND, "attn-bench");
    for (int i = 0; i < argc && used < MAX_COMMAND; i++) {
        bool has_space = strchr(argv[i], ' ') != NULL;
        used +=
            (size_t)snprintf(out + used, MAX_COMMAND - used, has_space ? " '%s'" : " %s", argv[i]);
    }
}

int bench_kernels(int argc, char **argv) {
    kernels_opts o = {.backend = "cpu", .reps = DEFAULT_REPS};
    attnd_errinfo info = {0};
    char command[MAX_COMMAND];
    bench_opt table[] = {
        {"backend", BENCH_OPT_TEXT, &o.backend, "NAME", "cpu (the default) or cuda", 0, 0, false},
        {"case", BENCH_OPT_TEXT, &o.pattern, "PATTERN",
         "only cases whose name contains or, with *?[, matches it; or one written out, such as "
         "'decode bf16 32/8 kv_len 4096' or 'prefill f32 32/8 q_len 512'",
         0, 0, false},
        {"isa", BENCH_OPT_TEXT, &o.kernel, "NAME",
         "kernels of this instruction set; cuda: bulk, portable, decode or prefill (for all rows)",
         0, 0, false},
        {"lengths", BENCH_OPT_TEXT, &o.lengths, "FILE",
         "numbers, one a line, that the lengths of ragged cases of as many sequences are in "
         "proportion to",
         0, 0, false},
        {"peer", BENCH_OPT_TEXT, &o.peer, "COMMAND",
         "cuda: times the same cases in turns with ours, such as 'python3 tests/load/peers.py "
         "--serve'",
         0, 0, false},
        {"threads", BENCH_OPT_U32, &o.threads, "N", "cpu: default all processors", 1,
         BENCH_MAX_THREADS, false},
        {"reps", BENCH_OPT_U32, &o.reps, "N",
         "at least; default 11, up to 3 times as many while times spread", 1, BENCH_MAX_REPS,
         false},
        {"cold-mib", BENCH_OPT_U32, &o.cold_mib, "N",
         "copies of a group's data together; default 3 times the last cache", 1, 1 << 20, false},
        {"json", BENCH_OPT_TEXT, &o.json, "FILE", "write the result there too", 0, 0, false},
        {"help", BENCH_OPT_FLAG, &o.help, NULL, "print this", 0, 0, false},
        {NULL, BENCH_OPT_HEADING, NULL, NULL, NULL, 0, 0, false},
    };
    const bench_backend_ops *ops = NULL;
    attnd_err err = bench_opts_parse(table, argc, argv, &info);
    err = err ? err : bench_backend_find(&ops, o.backend, &info);
    err = err || !o.lengths ? err : read_lengths(o.lengths, &info);
    int status;
    if (bench_opts_ended(table, "kernels", o.help, err, &info, &status)) {
        return status;
    }
    join_command(command, argc, argv);
    return execute(&o, ops, command);
}
