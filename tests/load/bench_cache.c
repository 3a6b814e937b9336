// `attn-bench cache`: how much of a trace's prompts the prefix cache has, by its size and policy.
#include <cjson/cJSON.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvcache/kv_policy.h"
#include "tests/load/bench_cmd.h"
#include "tests/load/bench_kernels.h"
#include "tests/load/bench_opts.h"
#include "tests/load/bench_replay.h"
#include "tests/load/bench_replay_prompts.h"

enum { MAX_CELLS = 8, MAX_BLOCKS = INT32_MAX / 2 };

static const double default_shares[] = {1, 5, 10, 20, 50}; // % of the different full blocks

// cell is one size of the cache.  Rates are shares of all input tokens.
typedef struct cell {
    uint32_t blocks;
    double policy, lru, belady;
} cell;

typedef struct cache_opts {
    const char *trace, *blocks, *policy, *json;
    double size; // what --blocks says, 0 = nothing
    bool is_share;
    bool help;
} cache_opts;

typedef struct table {
    const cache_opts *opts;
    uint32_t policy, lru; // indices
    bench_replay_info info;
    double unbounded;
    cell cells[MAX_CELLS];
    uint32_t num;
} table;

// closed returns which part of the way from LRU to Belady a policy goes; 0 where there is none.
static double closed(const cell *c) {
    return c->belady > c->lru ? (c->policy - c->lru) / (c->belady - c->lru) : 0;
}

static attnd_err fill_cell(const bench_replay *r, const table *t, cell *c, attnd_errinfo *info) {
    uint64_t policy = 0, lru = 0, belady = 0;
    attnd_err err = bench_replay_policy(r, c->blocks, t->policy, &policy, info);
    if (!err) {
        err = bench_replay_policy(r, c->blocks, t->lru, &lru, info);
    }
    if (!err) {
        err = bench_replay_belady(r, c->blocks, &belady, info);
    }
    double tokens = (double)t->info.input_tokens;
    c->policy = (double)policy / tokens;
    c->lru = (double)lru / tokens;
    c->belady = (double)belady / tokens;
    return err;
}

// read_blocks takes --blocks, a number or a percentage.
static attnd_err read_blocks(cache_opts *o, attnd_errinfo *info) {
    const char *text = o->blocks;
    if (!text) {
        return ATTND_OK;
    }
    char *end;
    errno = 0;
    o->size = strtod(text, &end);
    o->is_share = *end == '%';
    if (end == text || errno || end[o->is_share] ||
        !(o->size > 0 && o->size <= (o->is_share ? 100 : MAX_BLOCKS)) ||
        (!o->is_share && o->size != (double)(uint32_t)o->size)) {
        return attnd_fail(info, ATTND_EINVAL, "blocks",
                          "--blocks: \"%.40s\" is neither a number of blocks nor a percentage "
                          "above 0 and up to 100",
                          text);
    }
    return ATTND_OK;
}

// set_sizes takes what --blocks says, or the default shares, of which those that the longest prompt
// would not fit are made to.
static attnd_err set_sizes(table *t, const bench_replay *r, attnd_errinfo *info) {
    const cache_opts *o = t->opts;
    double unique = t->info.unique_blocks;
    if (!o->blocks) {
        t->num = sizeof(default_shares) / sizeof(default_shares[0]);
        for (uint32_t i = 0; i < t->num; i++) {
            uint32_t blocks = (uint32_t)(default_shares[i] * unique / 100);
            t->cells[i].blocks = blocks > t->info.longest ? blocks : t->info.longest;
        }
        return ATTND_OK;
    }
    double blocks = o->is_share ? o->size * unique / 100 : o->size;
    if (blocks > unique) {
        return attnd_fail(info, ATTND_EINVAL, "blocks",
                          "--blocks: %.40s are more than the %u different full ones of the trace",
                          o->blocks, t->info.unique_blocks);
    }
    t->num = 1;
    t->cells[0].blocks = (uint32_t)blocks;
    return bench_replay_check(r, t->cells[0].blocks, info);
}

static void print_head(const table *t) {
    printf("attn-bench cache: %s, policy %s\n", t->opts->trace, t->opts->policy);
    printf("  %" PRIu64 " requests of %" PRIu64 " input tokens in all, %" PRIu32
           " different full blocks of %d tokens\n",
           t->info.requests, t->info.input_tokens, t->info.unique_blocks, BENCH_TRACE_BLOCK);
    printf("  input tokens found in the cache when it keeps all: %.2f%%; of fewer blocks:\n",
           100 * t->unbounded);
    printf("  %10s %8s %9s %9s %9s %10s %12s\n", "blocks", "of all", t->opts->policy, "lru",
           "belady", "over lru", "gap closed");
}

static void print_cell(const table *t, const cell *c) {
    printf("  %10" PRIu32 " %7.1f%% %8.2f%% %8.2f%% %8.2f%% %+8.2fpp %11.1f%%\n", c->blocks,
           100.0 * c->blocks / t->info.unique_blocks, 100 * c->policy, 100 * c->lru,
           100 * c->belady, 100 * (c->policy - c->lru), 100 * closed(c));
    fflush(stdout);
}

static bool write_json(const table *t) {
    cJSON *doc = cJSON_CreateObject();
    cJSON_AddNumberToObject(doc, "schema", 1);
    cJSON_AddStringToObject(doc, "command", "attn-bench cache");
    cJSON_AddStringToObject(doc, "trace", t->opts->trace);
    cJSON_AddStringToObject(doc, "policy", t->opts->policy);
    cJSON_AddNumberToObject(doc, "requests", (double)t->info.requests);
    cJSON_AddNumberToObject(doc, "input_tokens", (double)t->info.input_tokens);
    cJSON_AddNumberToObject(doc, "block_tokens", BENCH_TRACE_BLOCK);
    cJSON_AddNumberToObject(doc, "unique_blocks", t->info.unique_blocks);
    cJSON_AddNumberToObject(doc, "unbounded_hit_rate", t->unbounded);
    cJSON *cells = cJSON_AddArrayToObject(doc, "cells");
    for (uint32_t i = 0; i < t->num; i++) {
        const cell *c = &t->cells[i];
        cJSON *o = cJSON_CreateObject();
        cJSON_AddNumberToObject(o, "blocks", c->blocks);
        cJSON_AddNumberToObject(o, "hit_rate", c->policy);
        cJSON_AddNumberToObject(o, "lru_hit_rate", c->lru);
        cJSON_AddNumberToObject(o, "belady_hit_rate", c->belady);
        cJSON_AddNumberToObject(o, "gap_closed", closed(c));
        cJSON_AddItemToArray(cells, o);
    }
    bool is_good = bench_json_write(doc, t->opts->json);
    cJSON_Delete(doc);
    return is_good;
}

static attnd_err find_policies(table *t, attnd_errinfo *info) {
    t->policy = kv_policy_find(t->opts->policy);
    t->lru = kv_policy_find(kv_policy_lru.name);
    if (t->policy == UINT32_MAX) {
        char names[80] = "";
        for (uint32_t i = 0; kv_policies[i]; i++) {
            size_t len = strlen(names);
            snprintf(names + len, sizeof(names) - len, "%s%s", i ? ", " : "", kv_policies[i]->name);
        }
        return attnd_fail(info, ATTND_EINVAL, "policy", "--policy: \"%.40s\" is none of %s",
                          t->opts->policy, names);
    }
    return ATTND_OK;
}

static attnd_err fill_table(table *t, attnd_errinfo *info) {
    bench_trace trace = {0};
    bench_replay *replay = NULL;
    attnd_err err = find_policies(t, info);
    if (!err) {
        err = bench_trace_read(&trace, t->opts->trace, 0, info);
    }
    if (!err) {
        err = bench_replay_create(&replay, &trace, info);
    }
    if (!err) {
        t->info = bench_replay_get_info(replay);
        t->unbounded = (double)t->info.unbounded_hits / (double)t->info.input_tokens;
        err = set_sizes(t, replay, info);
    }
    if (!err) {
        print_head(t);
    }
    for (uint32_t i = 0; i < t->num && !err; i++) {
        err = fill_cell(replay, t, &t->cells[i], info);
        if (!err) {
            print_cell(t, &t->cells[i]);
        }
    }
    bench_replay_free(replay);
    bench_trace_free(&trace);
    return err;
}

int bench_cache(int argc, char **argv) {
    cache_opts o = {.policy = "reuse"};
    bench_opt opts[] = {
        {"Cache", BENCH_OPT_HEADING, NULL, NULL, NULL, 0, 0, false},
        {"trace", BENCH_OPT_TEXT, &o.trace, "FILE", "a Mooncake JSON-lines trace, with hash_ids", 0,
         0, false},
        {"blocks", BENCH_OPT_TEXT, &o.blocks, "N|P%",
         "size, also as a share of the different full blocks; default 1, 5, 10, 20 and 50%", 0, 0,
         false},
        {"policy", BENCH_OPT_TEXT, &o.policy, "NAME",
         "of eviction (cache.eviction); default reuse; lru and belady are always shown", 0, 0,
         false},
        {"json", BENCH_OPT_TEXT, &o.json, "FILE", "write the result there too", 0, 0, false},
        {"help", BENCH_OPT_FLAG, &o.help, NULL, "print this", 0, 0, false},
        {NULL, BENCH_OPT_HEADING, NULL, NULL, NULL, 0, 0, false},
    };
    attnd_errinfo info = {0};
    int status;
    attnd_err err = bench_opts_parse(opts, argc, argv, &info);
    if (!err && !o.help && !o.trace) {
        err = attnd_fail(&info, ATTND_EINVAL, "trace", "--trace FILE is needed");
    }
    err = err ? err : read_blocks(&o, &info);
    if (bench_opts_ended(opts, "cache", o.help, err, &info, &status)) {
        return status;
    }
    table t = {.opts = &o};
    err = fill_table(&t, &info);
    if (err) {
        fprintf(stderr, "attn-bench cache: %s\n", info.text[0] ? info.text : attnd_strerror(err));
        return BENCH_EXIT_FAILED;
    }
    return o.json && !write_json(&t) ? BENCH_EXIT_FAILED : BENCH_EXIT_OK;
}
