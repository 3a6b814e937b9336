// What all replays need: the full blocks of each prompt, numbered densely, and when each is needed
// next; and the two that need no cache: everything kept, and Belady's.
//
// Belady's heap holds an entry for each use of a block, so all but the last one of a block are
// stale; they are left where they are and skipped when they come up.
#include "tests/load/bench_replay.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "tests/load/bench_replay_prompts.h"

#define NEVER UINT64_MAX // needed next

static int by_id(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

// find_prompts fills in where each prompt's full blocks are.
static attnd_err find_prompts(bench_replay *r, attnd_errinfo *info) {
    for (uint64_t i = 0; i < r->info.requests; i++) {
        const bench_trace_row *row = &r->trace->rows[i];
        uint32_t full = row->input / BENCH_TRACE_BLOCK;
        if (row->num_ids < full) {
            return attnd_fail(info, ATTND_EINVAL, "trace",
                              "request %llu has %u full blocks, but %u hash ids",
                              (unsigned long long)i, full, row->num_ids);
        }
        r->prompts[i] = (bench_replay_prompt){.first = r->num_uses, .blocks = full};
        memcpy(r->blocks + r->num_uses, r->trace->ids + row->first_id, full * sizeof(*r->blocks));
        r->num_uses += full;
        r->info.input_tokens += row->input;
        r->info.longest = full > r->info.longest ? full : r->info.longest;
    }
    return ATTND_OK;
}

// number_blocks replaces hash ids by numbers from 0 on.
static attnd_err number_blocks(bench_replay *r, attnd_errinfo *info) {
    uint32_t *sorted = malloc((r->num_uses + 1) * sizeof(*sorted)), unique = 0;
    if (!sorted) {
        return attnd_fail(info, ATTND_ENOMEM, NULL, "no memory to replay a trace");
    }
    memcpy(sorted, r->blocks, r->num_uses * sizeof(*sorted));
    qsort(sorted, r->num_uses, sizeof(*sorted), by_id);
    for (uint64_t i = 0; i < r->num_uses; i++) {
        if (i == 0 || sorted[i] != sorted[unique - 1]) {
            sorted[unique++] = sorted[i];
        }
    }
    for (uint64_t i = 0; i < r->num_uses; i++) {
        const uint32_t *at = bsearch(&r->blocks[i], sorted, unique, sizeof(*sorted), by_id);
        r->blocks[i] = (uint32_t)(at - sorted);
    }
    free(sorted);
    r->info.unique_blocks = unique;
    return ATTND_OK;
}

static attnd_err count_unbounded(bench_replay *r, attnd_errinfo *info) {
    bool *cached = calloc(r->info.unique_blocks + 1, sizeof(*cached));
    if (!cached) {
        return attnd_fail(info, ATTND_ENOMEM, NULL, "no memory to replay a trace");
    }
    for (uint64_t i = 0; i < r->info.requests; i++) {
        const uint32_t *blocks = r->blocks + r->prompts[i].first;
        uint32_t num = r->prompts[i].blocks, hit = 0;
        while (hit < num && cached[blocks[hit]]) {
            hit++;
        }
        for (uint32_t b = hit; b < num; b++) {
            cached[blocks[b]] = true;
        }
        r->info.unbounded_hits += (uint64_t)hit * BENCH_TRACE_BLOCK;
    }
    free(cached);
    return ATTND_OK;
}

attnd_err bench_replay_create(bench_replay **out, const bench_trace *trace, attnd_errinfo *info) {
    bench_replay *r = calloc(1, sizeof(*r));
    if (!r) {
        return attnd_fail(info, ATTND_ENOMEM, NULL, "no memory to replay a trace");
    }
    r->trace = trace;
    r->info.requests = trace->num_rows;
    r->prompts = calloc(trace->num_rows, sizeof(*r->prompts));
    r->blocks = malloc((trace->num_ids + 1) * sizeof(*r->blocks));
    attnd_err err = ATTND_OK;
    if (trace->num_ids == 0) {
        err = attnd_fail(info, ATTND_EINVAL, "trace", "the trace has no hash_ids");
    } else if (!r->prompts || !r->blocks) {
        err = attnd_fail(info, ATTND_ENOMEM, NULL, "no memory to replay a trace");
    } else if (!(err = find_prompts(r, info)) && !(err = number_blocks(r, info))) {
        err = count_unbounded(r, info);
    }
    if (err) {
        bench_replay_free(r);
        return err;
    }
    *out = r;
    return ATTND_OK;
}

void bench_replay_free(bench_replay *r) {
    if (r) {
        free(r->prompts);
        free(r->blocks);
        free(r);
    }
}

bench_replay_info bench_replay_get_info(const bench_replay *r) {
    return r->info;
}

attnd_err bench_replay_check(const bench_replay *r, uint32_t blocks, attnd_errinfo *info) {
    if (blocks < r->info.longest) {
        return attnd_fail(info, ATTND_EINVAL, "blocks",
                          "%u blocks: the longest prompt alone has %u full ones", blocks,
                          r->info.longest);
    }
    return ATTND_OK;
}

// ---- Belady

typedef struct entry {
    uint64_t next; // request that needs the block next
    uint32_t depth, block;
} entry;

typedef struct belady {
    const bench_replay *r;
    entry *heap;     // [num_uses], the one that goes first on top
    uint64_t num;    // entries of the heap
    uint64_t *next;  // [unique_blocks], request that needs the block next
    bool *cached;    // [unique_blocks]
    uint64_t *needs; // [num_uses], request that needs the block of that use next
} belady;

// goes_first says which of two blocks is of less use.  Of blocks of one path the deeper one goes,
// since what lies before it may be needed for another.
static bool goes_first(const entry *a, const entry *b) {
    return a->next != b->next ? a->next > b->next : a->depth > b->depth;
}

static void push(belady *b, entry e) {
    uint64_t at = b->num++;
    while (at > 0 && goes_first(&e, &b->heap[(at - 1) / 2])) {
        b->heap[at] = b->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    b->heap[at] = e;
}

static entry pop(belady *b) {
    entry top = b->heap[0], last = b->heap[--b->num];
    uint64_t at = 0;
    for (;;) {
        uint64_t child = 2 * at + 1;
        if (child + 1 < b->num && goes_first(&b->heap[child + 1], &b->heap[child])) {
            child++;
        }
        if (child >= b->num || !goes_first(&b->heap[child], &last)) {
            break;
        }
        b->heap[at] = b->heap[child];
        at = child;
    }
    b->heap[at] = last;
    return top;
}

// look_ahead fills in when the block of each use is needed next; next is left all NEVER.
static void look_ahead(belady *b) {
    const bench_replay *r = b->r;
    for (uint32_t i = 0; i < r->info.unique_blocks; i++) {
        b->next[i] = NEVER;
    }
    for (uint64_t i = r->info.requests; i-- > 0;) {
        const bench_replay_prompt *p = &r->prompts[i];
        for (uint64_t use = p->first; use < p->first + p->blocks; use++) {
            b->needs[use] = b->next[r->blocks[use]];
            b->next[r->blocks[use]] = i;
        }
    }
}

// serve looks a prompt up, makes room for it and keeps it; returns its blocks that were there.
static uint32_t serve(belady *b, uint64_t request, uint32_t room, uint32_t *used) {
    const bench_replay_prompt *p = &b->r->prompts[request];
    const uint32_t *blocks = b->r->blocks + p->first;
    uint32_t hit = 0, missing = 0;
    while (hit < p->blocks && b->cached[blocks[hit]]) {
        hit++;
    }
    for (uint32_t i = 0; i < p->blocks; i++) {
        missing += !b->cached[blocks[i]];
        b->next[blocks[i]] = request; // so what the heap has of it is stale: it must not go
    }
    while (*used + missing > room) {
        entry e = pop(b);
        if (b->cached[e.block] && b->next[e.block] == e.next) {
            b->cached[e.block] = false;
            --*used;
        }
    }
    *used += missing;
    for (uint32_t i = 0; i < p->blocks; i++) {
        b->cached[blocks[i]] = true;
        b->next[blocks[i]] = b->needs[p->first + i];
        push(b, (entry){.next = b->next[blocks[i]], .depth = i, .block = blocks[i]});
    }
    return hit;
}

attnd_err bench_replay_belady(const bench_replay *r, uint32_t blocks, uint64_t *hits,
                              attnd_errinfo *info) {
    attnd_err err = bench_replay_check(r, blocks, info);
    if (err) {
        return err;
    }
    belady b = {
        .r = r,
        .heap = calloc(r->num_uses + 1, sizeof(*b.heap)),
        .next = malloc((r->info.unique_blocks + 1) * sizeof(*b.next)),
        .cached = calloc(r->info.unique_blocks + 1, sizeof(*b.cached)),
        .needs = malloc((r->num_uses + 1) * sizeof(*b.needs)),
    };
    if (!b.heap || !b.next || !b.cached || !b.needs) {
        err = attnd_fail(info, ATTND_ENOMEM, NULL, "no memory to replay a trace");
    } else {
        uint32_t used = 0;
        uint64_t hit = 0;
        look_ahead(&b);
        for (uint64_t i = 0; i < r->info.requests; i++) {
            hit += serve(&b, i, blocks, &used);
        }
        *hits = hit * BENCH_TRACE_BLOCK;
    }
    free(b.heap);
    free(b.next);
    free(b.cached);
    free(b.needs);
    return err;
}
