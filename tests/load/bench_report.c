// Rates are counts over the time from the first request's admission to the last answer; prefill and
// decode share steps, so neither has a time of its own.  An infinite or NaN figure (there is one
// only behind a mismatch) is null in JSON.
#include "tests/load/bench_report.h"

#include <cjson/cJSON.h>
#include <gnu/libc-version.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"

#ifndef ATTND_VERSION
#error "the build defines ATTND_VERSION"
#endif

bool bench_report_ok(const bench_report *r) {
    return r->ended[0] == '\0' && r->stats->requests > 0 && r->stats->errors == 0 &&
           r->stats->failed == 0 && r->verdict->mismatches == 0;
}

static double per_second(const bench_report *r, uint64_t count) {
    return r->stats->elapsed_us > 0 ? (double)count * 1e6 / (double)r->stats->elapsed_us : 0;
}

static double hit_rate(const bench_stats *s) {
    return s->prefill_tokens > 0 ? (double)s->cached_tokens / (double)s->prefill_tokens : 0;
}

// ---- table

static void print_times(const bench_report *r, FILE *out) {
    fprintf(out, "  %-8s %10s %10s %10s %10s %10s %10s %10s\n", "ms", "mean", "p50", "p90", "p99",
            "p99.9", "max", "count");
    for (int i = 0; i < BENCH_NUM_TIMES; i++) {
        bench_ms_summary t = bench_summarize(&r->stats->times[i]);
        fprintf(out, "  %-8s %10.3f %10.3f %10.3f %10.3f %10.3f %10.3f %10" PRIu64 "\n",
                bench_time_name((bench_time)i), t.mean, t.p50, t.p90, t.p99, t.p99_9, t.max,
                t.count);
    }
}

static void print_errors(const bench_report *r, FILE *out) {
    const bench_stats *s = r->stats;
    fprintf(out, "  %-22s %" PRIu64, "errors", s->errors);
    for (int code = 0; code < BENCH_NUM_CODES; code++) {
        if (s->by_code[code] > 0) {
            fprintf(out, "  %s %" PRIu64, attnd_errname((attnd_err)-code), s->by_code[code]);
        }
    }
    fprintf(out, "\n");
    if (s->first_error[0] != '\0') {
        fprintf(out, "  %-22s %s\n", "first error", s->first_error);
    }
    if (r->ended[0] != '\0') {
        fprintf(out, "  %-22s %s\n", "ended by", r->ended);
    }
}

static void print_verdict(const bench_report *r, FILE *out) {
    const bench_verdict *v = r->verdict;
    if (r->verify == 0) {
        fprintf(out, "  %-22s nothing (--verify 0)\n", "verified");
        return;
    }
    fprintf(out, "  %-22s %" PRIu64 " of %" PRIu64 " rows (tokens x layers) against float64\n",
            "verified", v->rows, r->stats->rows);
    fprintf(out, "  %-22s %" PRIu64 "\n", "mismatches", v->mismatches);
    fprintf(out, "  %-22s %.3g (bound of that row: %.3g)\n", "max error", v->max_error,
            v->max_error_bound);
    if (v->mismatches > 0) {
        fprintf(out, "  %-22s %s\n", "first mismatch", v->first);
    }
}

static void print_daemon(const bench_report *r, FILE *out) {
    if (r->daemon_pid == 0) {
        fprintf(out, "  %-22s unknown process (--daemon-pid names it)\n", "daemon");
        return;
    }
    fprintf(out, "  %-22s pid %" PRId64 ", %.2f CPU s, %.1f MiB resident, %.1f MiB at most\n",
            "daemon", r->daemon_pid, r->after.cpu_s - r->before.cpu_s,
            (double)r->after.rss_bytes / 1048576, (double)r->after.peak_bytes / 1048576);
}

void bench_report_table(const bench_report *r, FILE *out) {
    const bench_stats *s = r->stats;
    const bench_model *m = r->model;
    fprintf(out,
            "attn-bench serve: %s, %" PRIu32 " layers, %" PRIu32 "/%" PRIu32
            " heads, head_dim %" PRIu32 ", %s, cache %s\n",
            m->preset, m->layers, m->q_heads, m->kv_heads, m->head_dim, attnd_dtype_name(m->dtype),
            attnd_dtype_name(m->kv_dtype));
    fprintf(out, "  %-22s %s; %s; %" PRIu32 " at a time, %" PRIu32 " prompt tokens a step\n",
            "load", r->lengths, r->arrivals, r->concurrency, r->stats->prefill_chunk);
    fprintf(out, "  %-22s %" PRIu64 " in %.2f s, %" PRIu64 " unfinished, %" PRIu64 " failed\n",
            "requests", s->requests, (double)s->elapsed_us * 1e-6, s->unfinished, s->failed);
    print_errors(r, out);
    print_verdict(r, out);
    fprintf(out, "  %-22s %.0f (%" PRIu64 " attends of all running sequences)\n", "layer calls/s",
            per_second(r, s->layer_calls), s->layer_calls);
    fprintf(out,
            "  %-22s %.0f (attention only, %" PRIu32 " layers; %" PRIu64 " tokens, %" PRIu64
            " of them again)\n",
            "prefill tokens/s", per_second(r, s->prefill_tokens), m->layers, s->prefill_tokens,
            s->recomputed_tokens);
    fprintf(out, "  %-22s %" PRIu64 " of the prefill tokens were cached (%.2f%%)\n", "prefix cache",
            s->cached_tokens, 100 * hit_rate(s));
    fprintf(out, "  %-22s %.0f (attention only, %" PRIu32 " layers; %" PRIu64 " tokens)\n",
            "decode tokens/s", per_second(r, s->decode_tokens), m->layers, s->decode_tokens);
    print_times(r, out);
    fprintf(out, "  %-22s %" PRIu64 " preemptions, %" PRIu64 " retries of EBUSY\n", "pool",
            s->preemptions, s->retries);
    print_daemon(r, out);
    for (uint32_t i = 0; i < s->num_kernels; i++) {
        const bench_kernel *k = &s->kernels[i];
        fprintf(out,
                "  %-22s %s: %" PRIu64 " calls, up to %" PRIu32 " splits and %" PRIu32
                " rows (%s)\n",
                "kernel", k->name, k->calls, k->max_splits, k->max_batch_rows, k->why);
    }
    fprintf(out, "  %-22s %.2f s making q, k, v between the calls\n", "this client",
            (double)s->fill_us * 1e-6);
    fprintf(out, "  %-22s %s, %" PRIu32 " CPUs, %.1f GiB, %s\n", "machine", r->host->cpu,
            r->host->cpus, (double)r->host->memory_bytes / 1073741824, r->host->kernel);
    for (int i = 0; i <= BENCH_TIME_e2e; i++) {
        fprintf(out, "  %s: %s\n", bench_time_name((bench_time)i), bench_time_text((bench_time)i));
    }
}

// ---- JSON

static void add_u64(cJSON *o, const char *key, uint64_t x) {
    cJSON_AddNumberToObject(o, key, (double)x);
}

static void add_text(cJSON *o, const char *key, const char *text) {
    if (text == NULL || text[0] == '\0') {
        cJSON_AddNullToObject(o, key);
    } else {
        cJSON_AddStringToObject(o, key, text);
    }
}

static void add_counts(cJSON *root, const bench_report *r) {
    const bench_stats *s = r->stats;
    cJSON_AddBoolToObject(root, "ok", bench_report_ok(r));
    add_u64(root, "requests", s->requests);
    add_u64(root, "unfinished", s->unfinished);
    add_u64(root, "failed", s->failed);
    add_text(root, "ended_by", r->ended);
    add_u64(root, "errors", s->errors);
    cJSON *codes = cJSON_AddObjectToObject(root, "errors_by_code");
    for (int code = 0; code < BENCH_NUM_CODES; code++) {
        if (s->by_code[code] > 0) {
            add_u64(codes, attnd_errname((attnd_err)-code), s->by_code[code]);
        }
    }
    add_text(root, "first_error", s->first_error);
    add_u64(root, "rows", s->rows);
    add_u64(root, "verified", r->verdict->rows);
    add_u64(root, "mismatches", r->verdict->mismatches);
    add_u64(root, "plain_runs", r->verdict->plain_runs);
    add_u64(root, "appeals", r->verdict->appeals);
    cJSON_AddNumberToObject(root, "max_error", r->verdict->max_error);
    cJSON_AddNumberToObject(root, "max_error_bound", r->verdict->max_error_bound);
    add_text(root, "first_mismatch", r->verdict->first);
}

static void add_rates(cJSON *root, const bench_report *r) {
    const bench_stats *s = r->stats;
    char scope[96];
    snprintf(scope, sizeof(scope),
             "attention only, %" PRIu32 " layers: no projections, MLP or sampling",
             r->model->layers);
    cJSON_AddNumberToObject(root, "elapsed_s", (double)s->elapsed_us * 1e-6);
    cJSON_AddNumberToObject(root, "requests_per_s", per_second(r, s->requests));
    add_u64(root, "layer_calls", s->layer_calls);
    cJSON_AddNumberToObject(root, "layer_calls_per_s", per_second(r, s->layer_calls));
    add_text(root, "tokens_are", scope);
    add_u64(root, "prefill_tokens", s->prefill_tokens);
    cJSON_AddNumberToObject(root, "prefill_tokens_per_s", per_second(r, s->prefill_tokens));
    add_u64(root, "cached_tokens", s->cached_tokens);
    cJSON_AddNumberToObject(root, "prefix_hit_rate", hit_rate(s));
    add_u64(root, "decode_tokens", s->decode_tokens);
    cJSON_AddNumberToObject(root, "decode_tokens_per_s", per_second(r, s->decode_tokens));
    add_u64(root, "recomputed_tokens", s->recomputed_tokens);
    add_u64(root, "preemptions", s->preemptions);
    add_u64(root, "retries", s->retries);
    add_u64(root, "steps", s->steps);
    cJSON_AddNumberToObject(root, "client_fill_s", (double)s->fill_us * 1e-6);
}

static void add_times(cJSON *root, const bench_report *r) {
    for (int i = 0; i < BENCH_NUM_TIMES; i++) {
        bench_ms_summary t = bench_summarize(&r->stats->times[i]);
        char key[32];
        snprintf(key, sizeof(key), "%s_ms", bench_time_name((bench_time)i));
        cJSON *o = cJSON_AddObjectToObject(root, key);
        cJSON_AddNumberToObject(o, "mean", t.mean);
        cJSON_AddNumberToObject(o, "p50", t.p50);
        cJSON_AddNumberToObject(o, "p90", t.p90);
        cJSON_AddNumberToObject(o, "p99", t.p99);
        cJSON_AddNumberToObject(o, "p99.9", t.p99_9);
        cJSON_AddNumberToObject(o, "max", t.max);
        add_u64(o, "count", t.count);
    }
}

static void add_daemon(cJSON *root, const bench_report *r) {
    cJSON *o = cJSON_AddObjectToObject(root, "daemon");
    if (r->daemon_pid == 0) {
        cJSON_AddNullToObject(o, "pid");
        return;
    }
    cJSON_AddNumberToObject(o, "pid", (double)r->daemon_pid);
    cJSON_AddNumberToObject(o, "cpu_s", r->after.cpu_s - r->before.cpu_s);
    add_u64(o, "rss_bytes", r->after.rss_bytes);
    add_u64(o, "peak_bytes", r->after.peak_bytes);
}

static void add_kernels(cJSON *root, const bench_report *r) {
    cJSON *list = cJSON_AddArrayToObject(root, "kernels");
    for (uint32_t i = 0; i < r->stats->num_kernels; i++) {
        const bench_kernel *k = &r->stats->kernels[i];
        cJSON *o = cJSON_CreateObject();
        add_text(o, "name", k->name);
        add_text(o, "why", k->why);
        add_u64(o, "calls", k->calls);
        add_u64(o, "max_splits", k->max_splits);
        add_u64(o, "max_batch_rows", k->max_batch_rows);
        cJSON_AddItemToArray(list, o);
    }
}

static void add_definitions(cJSON *root) {
    cJSON *o = cJSON_AddObjectToObject(root, "definitions");
    for (int i = 0; i < BENCH_NUM_TIMES; i++) {
        char key[32];
        snprintf(key, sizeof(key), "%s_ms", bench_time_name((bench_time)i));
        add_text(o, key, bench_time_text((bench_time)i));
    }
    add_text(o, "rows", "output rows attended: tokens x layers, each of all query heads");
    add_text(o, "verified", "rows compared with float64");
    add_text(o, "plain_runs", "of these, the ones that were off by more than 1 ulp");
    add_text(o, "appeals", "of these, the ones whose bound came from the other rows of their call");
    add_text(
        o, "max_error_bound",
        "bound of the row with max_error: 2 x the error of a plain unfused run (worst of three "
        "summation orders, of the row or relative to size of the 32 rows round it) + 1 ulp of "
        "the output type at the row's largest output; made only as far as was needed");
    add_text(o, "prefill_tokens",
             "tokens fed that do not each generate one; recomputed and cached ones included");
    add_text(o, "cached_tokens", "of these, found in the daemon's prefix cache and not computed");
    add_text(o, "prefix_hit_rate", "cached_tokens over prefill_tokens");
    add_text(o, "rates", "counts over elapsed_s; prefill and decode share steps");
    add_text(o, "quantiles",
             "log-linear histogram of microseconds, error at most 1%; mean, max exact");
}

static void add_model(cJSON *protocol, const bench_model *m) {
    cJSON *o = cJSON_AddObjectToObject(protocol, "model");
    add_text(o, "preset", m->preset);
    add_u64(o, "layers", m->layers);
    add_u64(o, "q_heads", m->q_heads);
    add_u64(o, "kv_heads", m->kv_heads);
    add_u64(o, "head_dim", m->head_dim);
    add_u64(o, "v_head_dim", m->v_head_dim);
    add_text(o, "dtype", attnd_dtype_name(m->dtype));
    add_text(o, "kv_dtype", attnd_dtype_name(m->kv_dtype));
    add_u64(o, "block_tokens", m->block_tokens);
    add_u64(o, "window", m->window);
    add_u64(o, "window_every", m->window_every);
    cJSON_AddNumberToObject(o, "scale", (double)m->scale);
    cJSON_AddNumberToObject(o, "softcap", (double)m->softcap);
    cJSON_AddNumberToObject(o, "rope_theta", m->rope_theta);
    cJSON_AddNumberToObject(o, "rope_factor", m->rope_factor);
    add_u64(o, "rotary_dim", m->rope_theta != 0 ? m->rotary_dim : 0);
    cJSON_AddBoolToObject(o, "rope_interleaved", m->rope_interleaved);
    cJSON_AddBoolToObject(o, "sinks", m->sinks);
    cJSON_AddBoolToObject(o, "alibi", m->alibi);
}

static void add_protocol(cJSON *root, const bench_report *r) {
    cJSON *o = cJSON_AddObjectToObject(root, "protocol");
    char date[ATTND_WALL_TEXT_BYTES];
    attnd_wall_text(date, attnd_wall_us());
    add_text(o, "date", date);
    add_text(o, "command_line", r->command_line);
    add_text(o, "connect", r->url);
    add_text(o, "transport", r->transport ? r->transport : "auto");
    add_u64(o, "seed", r->seed);
    cJSON_AddNumberToObject(o, "repetitions", 1);
    add_model(o, r->model);
    add_text(o, "lengths", r->lengths);
    add_text(o, "trace", r->trace);
    add_text(o, "arrivals", r->arrivals);
    add_u64(o, "concurrency", r->concurrency);
    add_u64(o, "prefill_chunk", r->stats->prefill_chunk);
    cJSON_AddNumberToObject(o, "verify", r->verify);
    cJSON *machine = cJSON_AddObjectToObject(o, "machine");
    add_text(machine, "cpu", r->host->cpu);
    add_u64(machine, "cpus", r->host->cpus);
    add_u64(machine, "memory_bytes", r->host->memory_bytes);
    add_text(machine, "kernel", r->host->kernel);
    cJSON *versions = cJSON_AddObjectToObject(o, "versions");
    add_text(versions, "attn-bench", ATTND_VERSION);
    add_text(versions, "compiler", __VERSION__);
    add_text(versions, "libc", gnu_get_libc_version());
}

char *bench_report_json(const bench_report *r) {
    cJSON *root = cJSON_CreateObject();
    cJSON_AddNumberToObject(root, "schema", 1);
    cJSON_AddStringToObject(root, "command", "attn-bench serve");
    add_counts(root, r);
    add_rates(root, r);
    add_times(root, r);
    add_daemon(root, r);
    add_kernels(root, r);
    add_definitions(root);
    add_protocol(root, r);
    char *text = cJSON_Print(root);
    cJSON_Delete(root);
    if (text == NULL) {
        return NULL;
    }
    size_t len = strlen(text);
    char *line = realloc(text, len + 2);
    if (line == NULL) {
        free(text);
        return NULL;
    }
    memcpy(line + len, "\n", 2);
    return line;
}
