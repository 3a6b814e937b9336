// A case as a line and as JSON.  The JSON says everything that it takes to judge a figure: the
// whole protocol, the machine, the ceiling next to each time.
#include <stdio.h>
#include <string.h>

#include "proto/clock.h"
#include "tests/load/bench_host.h"
#include "tests/load/bench_kernels.h"

void bench_result_text(const bench_result *r, char out[BENCH_RESULT_BYTES]) {
    int used = snprintf(out, BENCH_RESULT_BYTES,
                        "%-40s | %11.1f us, spread %4.1f%% | %7.2f GB/s | %7.1f GFLOP/s", r->name,
                        r->us.median, 100 * r->us.spread, r->gbs, r->gflops);
    if (r->ceiling_value.median > 0) {
        used +=
            snprintf(out + used, (size_t)(BENCH_RESULT_BYTES - used), " | %5.1f%% of %.1f %s (%s)",
                     100 * r->ceiling_share, r->ceiling_value.median,
                     r->ceiling.is_bytes ? "GB/s" : "GFLOP/s", r->ceiling.what);
    }
    if (r->peer[0] != '\0') {
        used += snprintf(out + used, (size_t)(BENCH_RESULT_BYTES - used), " | %.2fx %.8s",
                         r->peer_us.median / r->us.median, r->peer);
        if (r->peer_pace.mhz > 0) {
            used += snprintf(out + used, (size_t)(BENCH_RESULT_BYTES - used),
                             ", spread %.1f%%, %.0f MHz beside %.0f", 100 * r->peer_us.spread,
                             r->peer_pace.mhz, r->pace.mhz);
        }
    }
    if (r->plan_us > 0) {
        used += snprintf(out + used, (size_t)(BENCH_RESULT_BYTES - used), " | plan %.1f us",
                         r->plan_us);
    }
    snprintf(out + used, (size_t)(BENCH_RESULT_BYTES - used),
             " | %s, %u splits (%s) | error %.2g of %.2g%s", r->choice.kernel, r->choice.splits,
             r->choice.why, r->error.max, r->error.bound,
             r->error.max <= r->error.bound ? "" : " WRONG");
}

static void add_spread(cJSON *o, const char *key, const bench_spread *s) {
    cJSON *one = cJSON_AddObjectToObject(o, key);
    cJSON_AddNumberToObject(one, "median", s->median);
    cJSON_AddNumberToObject(one, "min", s->min);
    cJSON_AddNumberToObject(one, "max", s->max);
    cJSON_AddNumberToObject(one, "spread", s->spread);
    cJSON_AddNumberToObject(one, "repetitions", s->num);
}

static void add_pace(cJSON *o, const char *key, const bench_pace *pace) {
    if (pace->mhz > 0) {
        cJSON *one = cJSON_AddObjectToObject(o, key);
        cJSON_AddNumberToObject(one, "mhz", pace->mhz);
        cJSON_AddNumberToObject(one, "watts", pace->watts);
    }
}

static void add_lengths(cJSON *one, const bench_case *c) {
    int32_t lengths[BENCH_MAX_BATCH];
    bench_case_lengths(c, lengths);
    if (c->kind == BENCH_RAGGED) {
        cJSON_AddItemToObject(one, "kv_lens", cJSON_CreateIntArray(lengths, c->batch));
    } else {
        cJSON_AddNumberToObject(one, "kv_len", c->kv_len);
    }
}

static cJSON *case_json(const bench_result *r) {
    cJSON *one = cJSON_CreateObject();
    cJSON_AddStringToObject(one, "case", r->name);
    cJSON_AddStringToObject(one, "q_dtype", attnd_dtype_name(r->c.q_dtype));
    cJSON_AddStringToObject(one, "kv_dtype", attnd_dtype_name(r->c.kv_dtype));
    cJSON_AddNumberToObject(one, "q_heads", r->c.q_heads);
    cJSON_AddNumberToObject(one, "kv_heads", r->c.kv_heads);
    cJSON_AddNumberToObject(one, "head_dim", r->c.head_dim);
    cJSON_AddNumberToObject(one, "block_tokens", r->c.block_tokens);
    cJSON_AddNumberToObject(one, "batch", r->c.batch);
    cJSON_AddNumberToObject(one, "q_len", r->c.q_len);
    add_lengths(one, &r->c);
    cJSON_AddNumberToObject(one, "new_len", r->c.new_len);
    cJSON_AddBoolToObject(one, "causal", r->c.kind != BENCH_FULL);
    cJSON_AddNumberToObject(one, "kv_bytes", (double)r->kv_bytes);
    cJSON_AddNumberToObject(one, "us", r->us.median);
    cJSON_AddNumberToObject(one, "spread", r->us.spread);
    cJSON_AddNumberToObject(one, "gbs", r->gbs);
    cJSON_AddNumberToObject(one, "gflops", r->gflops);
    add_spread(one, "time", &r->us);
    add_pace(one, "pace", &r->pace);
    cJSON_AddNumberToObject(one, "calls_per_repetition", r->calls);
    if (r->ceiling_value.median > 0) {
        cJSON_AddNumberToObject(one, "ceiling_share", r->ceiling_share);
        cJSON_AddStringToObject(one, "ceiling", r->ceiling.what);
        add_spread(one, r->ceiling.is_bytes ? "ceiling_gbs" : "ceiling_gflops", &r->ceiling_value);
    }
    cJSON_AddStringToObject(one, "kernel", r->choice.kernel);
    cJSON_AddStringToObject(one, "why", r->choice.why);
    cJSON_AddNumberToObject(one, "splits", r->choice.splits);
    if (r->plan_us > 0) {
        cJSON_AddNumberToObject(one, "plan_us", r->plan_us);
    }
    cJSON *error = cJSON_AddObjectToObject(one, "error");
    cJSON_AddNumberToObject(error, "max", r->error.max);
    cJSON_AddNumberToObject(error, "rms", r->error.rms);
    cJSON_AddNumberToObject(error, "bound", r->error.bound);
    cJSON_AddNumberToObject(error, "outputs_checked", (double)r->error.places * r->c.head_dim);
    if (r->peer[0] != '\0') {
        cJSON_AddStringToObject(one, "peer", r->peer);
        add_spread(one, "peer_us", &r->peer_us);
        add_pace(one, "peer_pace", &r->peer_pace);
        cJSON_AddNumberToObject(one, "speed_over_peer", r->peer_us.median / r->us.median);
    }
    return one;
}

static cJSON *verdict_json(const bench_verdict_line *v) {
    char text[BENCH_VERDICT_BYTES];
    cJSON *one = cJSON_CreateObject();
    bench_verdict_text(v, text);
    cJSON_AddStringToObject(one, "case", v->result->name);
    cJSON_AddStringToObject(one, "text", text);
    if (v->ask->at_least > 0) {
        cJSON_AddNumberToObject(one, "at_least", v->ask->at_least);
    }
    if (v->ask->at_most > 0) {
        cJSON_AddNumberToObject(one, "at_most", v->ask->at_most);
    }
    cJSON_AddNumberToObject(one, "measured", v->measured);
    cJSON_AddBoolToObject(one, "met", v->is_met);
    return one;
}

static void add_machine(cJSON *doc) {
    bench_host host;
    char time[ATTND_WALL_TEXT_BYTES];
    bench_host_read(&host);
    attnd_wall_text(time, attnd_wall_us());
    cJSON_AddStringToObject(doc, "version", ATTND_VERSION);
    cJSON_AddStringToObject(doc, "ended", time);
    cJSON_AddStringToObject(doc, "cpu", host.cpu);
    cJSON_AddNumberToObject(doc, "cpus", host.cpus);
    cJSON_AddNumberToObject(doc, "memory_bytes", (double)host.memory_bytes);
    cJSON_AddStringToObject(doc, "system", host.kernel);
}

cJSON *bench_kernels_json(const bench_kernels_report *r) {
    cJSON *doc = cJSON_CreateObject();
    cJSON_AddStringToObject(doc, "what", "attn-bench kernels");
    cJSON_AddStringToObject(doc, "command", r->command);
    add_machine(doc);
    cJSON_AddStringToObject(doc, "backend", r->backend);
    cJSON_AddStringToObject(doc, "device", r->device);
    if (r->state[0] != '\0') {
        cJSON_AddStringToObject(doc, "device_at_the_end", r->state);
    }
    cJSON_AddNumberToObject(doc, "last_cache_bytes", (double)r->last_cache);
    cJSON_AddNumberToObject(doc, "cold_bytes", (double)r->timing.cold_bytes);
    cJSON_AddNumberToObject(doc, "sample_bytes", (double)r->timing.sample_bytes);
    cJSON_AddNumberToObject(doc, "arena_bytes", (double)r->arena_bytes);
    cJSON_AddNumberToObject(doc, "arena_huge_page_bytes", (double)r->arena_huge);
    cJSON_AddNumberToObject(doc, "repetitions", r->timing.reps);
    cJSON_AddNumberToObject(doc, "seed", (double)r->timing.seed);
    cJSON_AddNumberToObject(doc, "seconds", r->seconds);
    if (r->peer_missing) {
        cJSON_AddStringToObject(doc, "peer_missing", r->peer_missing);
    }
    cJSON *machine = cJSON_AddArrayToObject(doc, "machine");
    for (uint32_t i = 0; i < r->num_machine; i++) {
        cJSON *one = cJSON_CreateObject();
        cJSON_AddStringToObject(one, "what", r->machine[i].what);
        cJSON_AddNumberToObject(one, r->machine[i].is_bytes ? "gbs" : "gflops",
                                r->machine[i].value);
        cJSON_AddItemToArray(machine, one);
    }
    cJSON *cases = cJSON_AddArrayToObject(doc, "cases");
    for (uint32_t i = 0; i < r->num_results; i++) {
        cJSON_AddItemToArray(cases, case_json(&r->results[i]));
    }
    cJSON *verdicts = cJSON_AddArrayToObject(doc, "asked");
    for (uint32_t i = 0; i < r->num_verdicts; i++) {
        cJSON_AddItemToArray(verdicts, verdict_json(&r->verdicts[i]));
    }
    return doc;
}

bool bench_json_write(const cJSON *doc, const char *path) {
    char *text = cJSON_Print(doc);
    FILE *f = text ? fopen(path, "we") : NULL;
    bool is_good = f && fprintf(f, "%s\n", text) > 0;
    is_good = (f && fclose(f) == 0) && is_good;
    cJSON_free(text);
    if (!is_good) {
        fprintf(stderr, "attn-bench: cannot write %s\n", path);
    }
    return is_good;
}
