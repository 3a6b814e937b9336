// A long random run of everything that kvcache does, against the naive model.
//
// Each token has a value of its own, and its rows, in every layer and head, K and V, hold bytes
// that are made from that value; so whether sharing, copies, moves, truncating, forking and freeing
// are right is seen in the bytes that a sequence's table leads to.  New rows are written with
// garbage when the step opens and rightly before its commit, reserved ones only with garbage: what
// one sequence writes must never be seen by another.  Where token ids are given they are few, so
// that prompts begin alike, and a token's value is made of all ids up to it: rows that a step finds
// in the prefix cache are right when their bytes are.  After every operation the numbers of blocks
// are compared; the bytes of some sequences often, of all sequences now and then.
//
// ATTND_TEST_SEED and ATTND_TEST_CHANGES choose another run.
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "kvcache/kv_cache.h"
#include "kvcache/kv_pool.h"
#include "tests/check_main.h"
#include "tests/unit/kvcache/kv_naive.h"
#include "tests/unit/kvcache/kv_rows.h"

#if defined(__SANITIZE_THREAD__) // slow, and there is one thread
enum { DEFAULT_CHANGES = 20000 };
#elif defined(__SANITIZE_ADDRESS__) || !defined(__OPTIMIZE__)
enum { DEFAULT_CHANGES = 200000 };
#else
enum { DEFAULT_CHANGES = 1000000 };
#endif

enum {
    SLAB_BYTES = 2048,
    SLABS = 24,
    ALL_CHECKED_EVERY = 2000, // operations
    RECOUNTED_EVERY = 64,
};

static char memory[SLABS * SLAB_BYTES] __attribute__((aligned(KV_BLOCK_UNIT)));
static const kv_arena arena = {
    .base = memory, .bytes = sizeof(memory), .fd = -1, .ops = &kv_arena_host_ops};
static kv_cache *kv;
static naive n;
static uint32_t tenants[NAIVE_TENANTS];
static uint64_t seed, rng, now_ms;
static uint32_t op;
static attnd_errinfo info;
static uint32_t done, refused, waits, moved, copied, closed; // how often the run came by
static uint32_t found_blocks, found_rows;                    // likewise

// Blocks of 256, 512 and 768 bytes: 8, 4 and 2 a slab.
static const uint32_t shape_bytes[] = {256, 512, 768}, shape_slab[] = {8, 4, 2};

// Only a failure goes to Check, which writes to a pipe for every assertion that holds.
#define FAIL(...)                                                      \
    do {                                                               \
        printf("kv_random seed=%" PRIu64 " operation=%u\n", seed, op); \
        ck_abort_msg(__VA_ARGS__);                                     \
    } while (0)
#define CHECK(cond)                            \
    do {                                       \
        if (!(cond)) {                         \
            FAIL("%s (%s)", #cond, info.text); \
        }                                      \
    } while (0)
#define CHECK_ERR(expr, want)                                                                 \
    do {                                                                                      \
        attnd_err got_err = (expr);                                                           \
        if (got_err != (want)) {                                                              \
            FAIL("%s is %s, not %s (%s)", #expr, attnd_errname(got_err), attnd_errname(want), \
                 info.text);                                                                  \
        }                                                                                     \
    } while (0)

static uint32_t below(uint32_t limit) {
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return (uint32_t)((rng >> 32) * limit >> 32);
}

// value_of makes the value of a token from that of the one before it and its id.
static uint32_t value_of(uint32_t before, uint32_t id) {
    uint64_t h = ((uint64_t)before << 32 | id) + UINT64_C(0x9e3779b97f4a7c15);
    h = (h ^ h >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    h = (h ^ h >> 27) * UINT64_C(0x94d049bb133111eb);
    return (uint32_t)(h ^ h >> 31);
}

static bool chance(uint32_t percent) {
    return below(100) < percent;
}

// ---- bytes

// write_rows writes tokens [from, num) behind the committed ones of sequence i of a step, all
// groups.
static void write_rows(const naive_step *st, uint32_t i, uint32_t from, const uint32_t *tokens,
                       uint32_t num) {
    const naive_seq *s = &n.seqs[st->seqs[i].seq];
    const kv_model_spec *spec = kv_model_get(kv, n.models[s->model].index);
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        uint32_t entries;
        const uint32_t *table = kv_step_table(kv, st->handle, i, g, &entries);
        CHECK(table && entries == naive_blocks(s->len + st->seqs[i].new_len + st->seqs[i].reserve,
                                               spec->groups[g].block_tokens));
        for (uint32_t t = from; t < num; t++) {
            rows_write(spec, g, memory, table, s->len + t, tokens[t]);
        }
    }
}

// check_found checks the rows that were found for sequence i of a step.
static void check_found(const naive_step *st, uint32_t i) {
    const naive_seq *s = &n.seqs[st->seqs[i].seq];
    const kv_model_spec *spec = kv_model_get(kv, n.models[s->model].index);
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        uint32_t entries;
        const uint32_t *table = kv_step_table(kv, st->handle, i, g, &entries);
        for (uint32_t t = 0; t < st->seqs[i].cached; t++) {
            CHECK(rows_right(spec, g, memory, table, s->len + t, st->seqs[i].tokens[t]));
        }
    }
}

// check_rows checks the committed tokens of sequence i of a step.
static void check_rows(const naive_step *st, uint32_t i) {
    const naive_seq *s = &n.seqs[st->seqs[i].seq];
    const kv_model_spec *spec = kv_model_get(kv, n.models[s->model].index);
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        uint32_t entries;
        const uint32_t *table = kv_step_table(kv, st->handle, i, g, &entries);
        for (uint32_t t = 0; t < s->len; t++) {
            CHECK(rows_right(spec, g, memory, table, t, s->tokens[t]));
        }
    }
}

// ---- requests

static kv_request request(int session) {
    naive_session *s = &n.sessions[session];
    uint64_t id = s->highest + 1 + below(3);
    if (chance(20) && s->highest > 64) { // one that was skipped, if there is one
        uint64_t old = s->highest - below(65);
        id = s->replies[old % NAIVE_REQUESTS].request == old ? id : old;
    }
    return (kv_request){.session = s->handle, .request = chance(5) ? 0 : id};
}

static void answered(int session, kv_request rq, kv_op kind, uint64_t id, const uint32_t *values,
                     uint32_t num_values) {
    naive_session *s = &n.sessions[session];
    done++;
    if (rq.request == 0) {
        return;
    }
    naive_reply *reply = &s->replies[rq.request % NAIVE_REQUESTS];
    *reply = (naive_reply){.request = rq.request, .id = id, .op = kind, .num_values = num_values};
    if (num_values) {
        memcpy(reply->values, values, num_values * sizeof(values[0]));
    }
    s->highest = rq.request > s->highest ? rq.request : s->highest;
}

static void op_reply(int session) {
    const naive_session *s = &n.sessions[session];
    uint64_t id = s->highest + 3 - below(75);
    const naive_reply *want = &s->replies[id % NAIVE_REQUESTS];
    kv_reply reply;
    attnd_err err = kv_reply_find(kv, (kv_request){s->handle, id}, &reply);
    if (id == 0 || id > s->highest || id > UINT64_MAX / 2) {
        CHECK_ERR(err, ATTND_ENOENT);
        return;
    }
    if (s->highest - id > KV_REPLY_WINDOW) {
        CHECK_ERR(err, ATTND_ESTALE);
        return;
    }
    CHECK_ERR(err, want->request == id ? ATTND_OK : ATTND_ENOENT);
    if (err == ATTND_OK) {
        CHECK(reply.request == id && reply.op == want->op && reply.id == want->id);
        CHECK(reply.num_values == want->num_values);
        CHECK(memcmp(reply.values, want->values, want->num_values * sizeof(uint32_t)) == 0);
        uint64_t seq; // the same id does nothing again
        CHECK_ERR(kv_seq_create(kv, (kv_request){s->handle, id}, 0, &seq, &info), ATTND_EEXIST);
    }
}

// ---- picking

static int free_seq(void) {
    for (int i = 0; i < NAIVE_SEQS; i++) {
        if (!n.seqs[i].live) {
            return i;
        }
    }
    return -1;
}

// pick_seq returns a random live sequence, mostly one of the session; -1 when chance finds none.
static int pick_seq(int session) {
    bool own = chance(80);
    for (int tries = 0; tries < 16; tries++) {
        int i = (int)below(NAIVE_SEQS);
        if (n.seqs[i].live && (!own || n.seqs[i].session == session)) {
            return i;
        }
    }
    return -1;
}

static uint32_t tenant_of(int seq) {
    return n.models[n.seqs[seq].model].tenant;
}

// rights returns what a session is answered that wants to change a sequence.
static attnd_err rights(int session, int seq, bool needs_idle) {
    const naive_seq *s = &n.seqs[seq];
    if (tenant_of(seq) != n.sessions[session].tenant) {
        return ATTND_ESTALE;
    }
    if (s->session != session) {
        return s->session < 0 ? ATTND_EPERM : ATTND_EBUSY;
    }
    return needs_idle && s->step >= 0 ? ATTND_EBUSY : ATTND_OK;
}

static int find_name(uint32_t tenant, int name) {
    for (int i = 0; i < NAIVE_SEQS; i++) {
        if (n.seqs[i].live && n.seqs[i].name == name && tenant_of(i) == tenant) {
            return i;
        }
    }
    return -1;
}

static const char *name_text(int name) {
    static char text[NAIVE_NAMES][16];
    if (name < 0) {
        return "";
    }
    snprintf(text[name], sizeof(text[name]), "n%d", name);
    return text[name];
}

// ---- sequences

static void op_create(int session) {
    kv_request rq = request(session);
    uint32_t model = below(NAIVE_MODELS);
    int slot = free_seq();
    uint64_t handle = 0;
    attnd_err want = n.models[model].tenant != n.sessions[session].tenant ? ATTND_ENOENT
                     : slot < 0                                           ? ATTND_EBUSY
                                                                          : ATTND_OK;
    CHECK_ERR(kv_seq_create_priority(kv, rq, n.models[model].index, below(4), &handle, &info),
              want);
    if (want == ATTND_OK) {
        n.seqs[slot] = (naive_seq){.live = true,
                                   .handle = handle,
                                   .model = model,
                                   .session = session,
                                   .name = -1,
                                   .end = UINT64_MAX,
                                   .step = -1};
        answered(session, rq, KV_OP_CREATE, handle, NULL, 0);
    }
}

static void op_fork(int session) {
    int from = pick_seq(session), to = free_seq();
    if (from < 0) {
        return;
    }
    kv_request rq = request(session);
    uint64_t handle;
    uint32_t committed;
    attnd_err want = rights(session, from, false);
    want = want ? want : to < 0 ? ATTND_EBUSY : ATTND_OK;
    CHECK_ERR(kv_seq_fork(kv, rq, n.seqs[from].handle, &handle, &committed, &info), want);
    if (want == ATTND_OK) {
        CHECK(committed == n.seqs[from].len);
        n.seqs[to].handle = handle;
        naive_fork(&n, (uint32_t)from, (uint32_t)to);
        answered(session, rq, KV_OP_FORK, handle, &committed, 1);
    }
}

static void op_truncate(int session) {
    int seq = pick_seq(session);
    if (seq < 0) {
        return;
    }
    kv_request rq = request(session);
    uint32_t len = below(n.seqs[seq].len + 2);
    attnd_err want = rights(session, seq, true);
    want = want ? want : len > n.seqs[seq].len ? ATTND_EINVAL : ATTND_OK;
    CHECK_ERR(kv_seq_truncate(kv, rq, n.seqs[seq].handle, len, &info), want);
    if (want == ATTND_OK) {
        naive_truncate(&n, (uint32_t)seq, len);
        answered(session, rq, KV_OP_TRUNCATE, n.seqs[seq].handle, NULL, 0);
    }
}

static void op_free(int session) {
    int seq = pick_seq(session);
    if (seq < 0) {
        return;
    }
    kv_request rq = request(session);
    attnd_err want = rights(session, seq, true);
    CHECK_ERR(kv_seq_free(kv, rq, n.seqs[seq].handle, &info), want);
    if (want == ATTND_OK) {
        naive_free(&n, (uint32_t)seq);
        answered(session, rq, KV_OP_FREE, n.seqs[seq].handle, NULL, 0);
        CHECK_ERR(kv_seq_free(kv, request(session), n.seqs[seq].handle, &info), ATTND_ESTALE);
    }
}

static void op_keep(int session) {
    int seq = pick_seq(session), name = (int)below(NAIVE_NAMES + 3);
    if (seq < 0) {
        return;
    }
    name = name < NAIVE_NAMES ? name : -1;
    kv_request rq = request(session);
    uint64_t ttl = chance(30) ? 0 : 1 + below(3000);
    attnd_err want = rights(session, seq, true);
    int other = name < 0 ? -1 : find_name(tenant_of(seq), name);
    want = want ? want : other >= 0 && other != seq ? ATTND_EEXIST : ATTND_OK;
    CHECK_ERR(kv_seq_keep(kv, rq, n.seqs[seq].handle, name_text(name), ttl, &info), want);
    if (want == ATTND_OK) {
        n.seqs[seq].name = name;
        n.seqs[seq].ttl = name < 0 ? 0 : ttl;
        answered(session, rq, KV_OP_KEEP, n.seqs[seq].handle, NULL, 0);
    }
}

static void op_attach(int session) {
    int name = (int)below(NAIVE_NAMES), seq = find_name(n.sessions[session].tenant, name);
    uint32_t model = seq >= 0 && chance(90) ? n.seqs[seq].model : below(NAIVE_MODELS);
    kv_request rq = request(session);
    uint64_t handle;
    uint32_t committed;
    attnd_err want = ATTND_OK;
    if (n.models[model].tenant != n.sessions[session].tenant || seq < 0 ||
        n.seqs[seq].model != model) {
        want = ATTND_ENOENT;
    } else if (n.seqs[seq].session >= 0 && n.seqs[seq].session != session) {
        want = ATTND_EBUSY;
    }
    CHECK_ERR(
        kv_seq_attach(kv, rq, n.models[model].index, name_text(name), &handle, &committed, &info),
        want);
    if (want == ATTND_OK) {
        CHECK(handle == n.seqs[seq].handle && committed == n.seqs[seq].len);
        n.seqs[seq].session = session;
        n.seqs[seq].end = UINT64_MAX;
        answered(session, rq, KV_OP_ATTACH, handle, &committed, 1);
    }
}

static void op_expire(int session) {
    (void)session;
    uint64_t next = UINT64_MAX;
    for (uint32_t i = 0; i < NAIVE_SEQS; i++) {
        naive_seq *s = &n.seqs[i];
        if (s->live && s->end <= now_ms) {
            naive_free(&n, i);
        } else if (s->live && s->end < next) {
            next = s->end;
        }
    }
    uint64_t got = kv_expire(kv, now_ms);
    CHECK(got == next);
}

// ---- steps

// look_for_nodes asks which of the last blocks are found by their tokens: the one thing that is
// taken from kvcache.  If it were wrong, a block would be written that others find.
static void look_for_nodes(const naive_step *st) {
    for (uint32_t i = 0; i < st->num_seqs; i++) {
        const naive_seq *s = &n.seqs[st->seqs[i].seq];
        const naive_model *m = &n.models[s->model];
        for (uint32_t g = 0; g < m->num_groups; g++) {
            if (s->len % m->block_tokens[g]) {
                uint32_t last = s->blocks[g][s->len / m->block_tokens[g]];
                n.indexed[last] = kv_pool_is_indexed(kv, n.entry[last]);
            }
        }
    }
}

// expect_room returns whether the step fits now, by the public counters, and checks *may_wait when
// it does not: against what would be left if all others were gone.
static attnd_err expect_room(const naive_step *st, uint32_t tenant, bool got_wait, attnd_err got) {
    uint32_t need[4], held[4], total = 0, all_held = 0, slabs = 0, least = 0, most = 0;
    look_for_nodes(st);
    naive_need(&n, st->seqs, st->num_seqs, need);
    naive_held(&n, st->seqs, st->num_seqs, held);
    kv_info all;
    kv_get_info(kv, &all);
    for (int s = 0; s < 3; s++) {
        kv_class_info class = {0};
        for (uint32_t i = 0; kv_class_get(kv, i, &class) == ATTND_OK; i++) {
            if (class.block_bytes == shape_bytes[s]) {
                break;
            }
        }
        total += need[s];
        all_held += held[s];
        slabs += need[s] > class.free ? naive_blocks(need[s] - class.free, shape_slab[s]) : 0;
        least += naive_blocks(need[s] + held[s], shape_slab[s]);
        most += naive_blocks(need[s], shape_slab[s]) + held[s];
    }
    uint32_t quota = n.quota[tenant];
    bool over = quota > 0 && total > 0 &&
                n.tenant_blocks[tenant] + kv_tenant_cached(kv, tenants[tenant]) + total > quota;
    if (!over && slabs <= all.unassigned_slabs) {
        return ATTND_OK; // without evicting or finding any
    }
    bool never = (quota > 0 && all_held + total > quota) || least > SLABS;
    bool sure = (quota == 0 || all_held + total <= quota) && most <= SLABS;
    CHECK(got != ATTND_ENOSPC || !never || !got_wait);
    CHECK(got != ATTND_ENOSPC || !sure || got_wait);
    return ATTND_ENOSPC;
}

// make_tokens makes the new tokens of a sequence, with ids or without.
static void make_tokens(naive_step_seq *in, bool read) {
    const naive_seq *s = &n.seqs[in->seq];
    uint32_t value = s->len ? s->tokens[s->len - 1] : s->model;
    in->with_ids = n.models[s->model].has_tree && !read && chance(80);
    for (uint32_t t = 0; t < in->new_len; t++) {
        in->ids[t] = in->with_ids ? chance(15) : ++n.next_token;
        value = in->tokens[t] = value_of(value, in->ids[t]);
    }
}

// shared_tokens returns how many of the new tokens, in whole blocks, the step must find: those that
// a sequence has committed with their ids.
static uint32_t shared_tokens(const naive_step_seq *in) {
    const naive_seq *s = &n.seqs[in->seq];
    uint32_t block_tokens = n.models[s->model].block_tokens[0], most = 0;
    if (!in->with_ids || s->known != s->len || s->len % block_tokens || in->new_len < 2) {
        return 0;
    }
    for (uint32_t i = 0; i < NAIVE_SEQS; i++) {
        const naive_seq *other = &n.seqs[i];
        for (uint32_t b = 1; other->live && other->model == s->model; b++) {
            uint32_t len = s->len + b * block_tokens;
            if (len > other->known || b * block_tokens > in->new_len - 1 ||
                other->tokens[len - 1] != in->tokens[b * block_tokens - 1]) {
                break;
            }
            most = b * block_tokens > most ? b * block_tokens : most;
        }
    }
    return most;
}

// number_of returns the number of the block that kvcache has at an entry, with one user more.
static uint32_t number_of(const naive_model *m, uint32_t g, uint32_t entry) {
    for (uint32_t b = 0; b < NAIVE_BLOCKS; b++) {
        if (n.users[b] && n.entry[b] == entry) {
            naive_hold(&n, b);
            return b;
        }
    }
    uint32_t b = naive_new_block(&n, m->tenant, m->shape[g]); // nobody used it
    n.entry[b] = entry;
    return b;
}

// take_found gives sequence i of a step the blocks that were found.
static void take_found(naive_step *st, uint32_t i, const kv_copy *copies, uint32_t num_copies) {
    naive_step_seq *in = &st->seqs[i];
    const naive_seq *s = &n.seqs[in->seq];
    const naive_model *m = &n.models[s->model];
    uint32_t entries;
    for (uint32_t g = 0; g < m->num_groups && in->cached; g++) {
        const uint32_t *table = kv_step_table(kv, st->handle, i, g, &entries);
        uint32_t have = s->len / m->block_tokens[g], num = in->cached / m->block_tokens[g];
        for (uint32_t b = have; b < have + num; b++) {
            in->blocks[g][b] = number_of(m, g, table[b]);
            found_blocks++;
        }
        for (uint32_t c = 0; c < num_copies && in->cached % m->block_tokens[g]; c++) {
            if (copies[c].group == g && copies[c].dst == table[have + num]) {
                in->copied[g] = number_of(m, g, copies[c].src) + 1;
                found_rows += copies[c].num_tokens;
            }
        }
        CHECK(in->cached % m->block_tokens[g] == 0 || in->copied[g]);
    }
}

// note_entries notes where kvcache has the blocks of a step.
static void note_entries(const naive_step *st) {
    for (uint32_t i = 0; i < st->num_seqs; i++) {
        const naive_step_seq *in = &st->seqs[i];
        const naive_seq *s = &n.seqs[in->seq];
        const naive_model *m = &n.models[s->model];
        for (uint32_t g = 0; g < m->num_groups; g++) {
            uint32_t entries;
            const uint32_t *table = kv_step_table(kv, st->handle, i, g, &entries);
            for (uint32_t b = 0; b < entries; b++) {
                n.entry[in->blocks[g][b]] = table[b];
            }
        }
    }
}

// choose fills a step with different idle sequences of the session and of one model.
static bool choose(naive_step *st, int session, uint32_t *model) {
    bool read = chance(30);
    st->num_seqs = 0;
    st->session = session;
    for (int tries = 0; tries < 12 && st->num_seqs < NAIVE_STEP_SEQS; tries++) {
        int seq = (int)below(NAIVE_SEQS);
        bool fits = n.seqs[seq].live && rights(session, seq, true) == ATTND_OK &&
                    (st->num_seqs == 0 || n.seqs[seq].model == *model);
        for (uint32_t i = 0; i < st->num_seqs; i++) {
            fits = fits && st->seqs[i].seq != (uint32_t)seq;
        }
        if (fits) {
            naive_step_seq *in = &st->seqs[st->num_seqs++];
            *in = (naive_step_seq){.seq = (uint32_t)seq};
            *model = n.seqs[seq].model;
            uint32_t room = NAIVE_MAX_LEN - n.seqs[seq].len;
            in->new_len = read ? 0 : below((room < 12 ? room : 12) + 1);
            make_tokens(in, read);
            in->reserve = read || chance(70) ? 0 : below(room - in->new_len + 1) % 6;
        }
    }
    return st->num_seqs > 0;
}

static void opened(naive_step *st, int slot, int session, kv_request rq, const kv_step_seq *seqs,
                   const kv_copy *copies, uint32_t num_copies) {
    uint32_t values[2 * NAIVE_STEP_SEQS], garbage[NAIVE_MAX_LEN];
    for (uint32_t i = 0; i < st->num_seqs; i++) {
        st->seqs[i].cached = seqs[i].cached;
        CHECK(seqs[i].cached >= shared_tokens(&st->seqs[i]));
        CHECK(seqs[i].cached == 0 || (st->seqs[i].with_ids && seqs[i].cached < seqs[i].new_len));
    }
    for (uint32_t i = 0; i < st->num_seqs; i++) {
        take_found(st, i, copies, num_copies);
    }
    look_for_nodes(st); // again: one that nobody used may have made way
    naive_open(&n, slot);
    note_entries(st);
    st->live = true;
    for (uint32_t t = 0; t < NAIVE_MAX_LEN; t++) {
        garbage[t] = ++n.next_token;
    }
    for (uint32_t i = 0; i < st->num_seqs; i++) {
        naive_step_seq *in = &st->seqs[i];
        CHECK(seqs[i].committed == n.seqs[in->seq].len);
        values[2 * i] = seqs[i].committed;
        values[2 * i + 1] = seqs[i].cached;
        check_rows(st, i);
        check_found(st, i);
        write_rows(st, i, in->cached, garbage, in->new_len + in->reserve);
    }
    answered(session, rq, KV_OP_STEP, st->handle, values, 2 * st->num_seqs);
}

static void op_open(int session) {
    int slot = (int)below(NAIVE_STEPS);
    naive_step *st = &n.steps[slot];
    uint32_t model = 0;
    if (st->live || !choose(st, session, &model)) {
        return;
    }
    kv_step_seq seqs[NAIVE_STEP_SEQS];
    for (uint32_t i = 0; i < st->num_seqs; i++) {
        const naive_step_seq *in = &st->seqs[i];
        seqs[i] = (kv_step_seq){.seq = n.seqs[in->seq].handle,
                                .new_len = in->new_len,
                                .reserve = in->reserve,
                                .tokens = in->with_ids ? in->ids : NULL};
    }
    kv_request rq = request(session);
    bool may_wait = false;
    const kv_copy *copies;
    uint32_t num_copies;
    attnd_err want = expect_room(st, n.sessions[session].tenant, false, ATTND_OK);
    attnd_err err = kv_step_open(kv, rq, n.models[model].index, seqs, st->num_seqs, &st->handle,
                                 &copies, &num_copies, &may_wait, &info);
    CHECK(err == want || (want == ATTND_ENOSPC && err == ATTND_OK)); // some made way, or were found
    if (err == ATTND_OK) {
        ATTND_CK_OK(kv_copy_run(kv, copies, num_copies, NULL));
        copied += num_copies;
        opened(st, slot, session, rq, seqs, copies, num_copies);
    } else {
        expect_room(st, n.sessions[session].tenant, may_wait, err);
        refused++;
        waits += may_wait;
    }
}

// pick_step returns a random slot, mostly of an open step of the session.
static int pick_step(int session) {
    int slot = (int)below(NAIVE_STEPS);
    for (int tries = 0; tries < 8 && chance(95); tries++) {
        if (n.steps[slot].live && n.steps[slot].session == session) {
            break;
        }
        slot = (slot + 1) % NAIVE_STEPS;
    }
    return slot;
}

// gather moves the rows of a random path of sequence i to its front; returns its length.
static uint32_t gather(const naive_step *st, uint32_t i, uint32_t path[NAIVE_MAX_LEN]) {
    uint32_t num_path = 0, num;
    kv_copy moves[NAIVE_MAX_LEN * NAIVE_GROUPS];
    for (uint32_t t = 0; t < st->seqs[i].new_len - st->seqs[i].cached; t++) {
        if (chance(60)) {
            path[num_path++] = t;
        }
    }
    CHECK_ERR(kv_step_moves(kv, st->handle, i, path, num_path, moves, NAIVE_MAX_LEN * NAIVE_GROUPS,
                            &num, &info),
              ATTND_OK);
    ATTND_CK_OK(kv_copy_run(kv, moves, num, NULL));
    moved += num;
    return num_path;
}

static void op_commit(int session) {
    int slot = pick_step(session);
    naive_step *st = &n.steps[slot];
    if (!st->live) {
        return;
    }
    kv_request rq = request(session);
    if (st->session != session) {
        CHECK_ERR(kv_step_commit(kv, rq, st->handle, (const uint32_t[4]){0}, st->num_seqs, &info),
                  ATTND_ESTALE);
        return;
    }
    uint32_t accepted[NAIVE_STEP_SEQS], lens[NAIVE_STEP_SEQS];
    uint32_t paths[NAIVE_STEP_SEQS][NAIVE_MAX_LEN];
    const uint32_t *path[NAIVE_STEP_SEQS], *ids[NAIVE_STEP_SEQS];
    for (uint32_t i = 0; i < st->num_seqs; i++) {
        naive_step_seq *in = &st->seqs[i];
        write_rows(st, i, in->cached, in->tokens, in->new_len);
        check_rows(st, i);
        check_found(st, i);
        bool tree = chance(30) && !in->cached;
        path[i] = tree ? paths[i] : NULL;
        accepted[i] = tree ? gather(st, i, paths[i])
                           : in->new_len - (chance(60) ? 0 : below(in->new_len - in->cached + 1));
        in->with_ids &= !tree; // other rows than those of the sequence of these ids
        ids[i] = in->with_ids ? in->ids : NULL;
        lens[i] = n.seqs[in->seq].len + accepted[i];
    }
    accepted[0] += 100;
    CHECK_ERR(kv_step_commit(kv, rq, st->handle, accepted, st->num_seqs, &info), ATTND_EINVAL);
    accepted[0] -= 100;
    CHECK_ERR(kv_step_commit_ids(kv, rq, st->handle, accepted, ids, st->num_seqs, &info), ATTND_OK);
    answered(session, rq, KV_OP_COMMIT, st->handle, lens, st->num_seqs);
    naive_end(&n, slot, accepted, path);
}

static void abort_step(int slot, kv_request rq) {
    naive_step *st = &n.steps[slot];
    CHECK_ERR(kv_step_abort(kv, rq, st->handle), ATTND_OK);
    naive_end(&n, slot, NULL, NULL);
    CHECK_ERR(kv_step_abort(kv, (kv_request){0}, st->handle), ATTND_ESTALE);
}

static void op_abort(int session) {
    int slot = pick_step(session);
    naive_step *st = &n.steps[slot];
    if (st->live && st->session == session) {
        kv_request rq = request(session);
        abort_step(slot, rq);
        answered(session, rq, KV_OP_ABORT, st->handle, NULL, 0);
    }
}

// ---- sessions and tenants

static void open_session(int slot) {
    naive_session *s = &n.sessions[slot];
    uint32_t tenant = below(NAIVE_TENANTS);
    const uint8_t secret[KV_SECRET_BYTES] = {0};
    memset(s, 0, sizeof(*s));
    *s = (naive_session){.live = true, .tenant = tenant};
    CHECK_ERR(kv_session_open(kv, tenants[tenant], secret, &s->handle), ATTND_OK);
}

static void op_close(int session) {
    naive_session *s = &n.sessions[session];
    for (int i = 0; i < NAIVE_STEPS; i++) {
        if (n.steps[i].live && n.steps[i].session == session) {
            CHECK_ERR(kv_session_close(kv, s->handle, now_ms), ATTND_EBUSY);
            abort_step(i, (kv_request){0});
        }
    }
    CHECK_ERR(kv_session_close(kv, s->handle, now_ms), ATTND_OK);
    for (uint32_t i = 0; i < NAIVE_SEQS; i++) {
        naive_seq *seq = &n.seqs[i];
        if (seq->live && seq->session == session && seq->name < 0) {
            naive_free(&n, i);
        } else if (seq->live && seq->session == session) {
            seq->session = -1;
            seq->end = seq->ttl ? now_ms + seq->ttl : UINT64_MAX;
        }
    }
    s->live = false;
    closed++;
}

static void op_quota(int session) {
    (void)session;
    static const char *const names[NAIVE_TENANTS] = {"t0", "t1"};
    uint32_t t = below(NAIVE_TENANTS);
    n.quota[t] = chance(50) ? 0 : 20 + below(80);
    uint32_t again;
    CHECK_ERR(kv_tenant_set(kv, names[t], n.quota[t], &again), ATTND_OK);
    CHECK(again == tenants[t]);
    CHECK_ERR(kv_tenant_cache(kv, t, below(3) * 10, below(4)), ATTND_OK);
}

// ---- comparing

static void compare_counts(void) {
    kv_info all;
    kv_get_info(kv, &all);
    CHECK(all.in_use == n.in_use[0] + n.in_use[1] + n.in_use[2]);
    for (uint32_t t = 0; t < NAIVE_TENANTS; t++) {
        char name[KV_NAME_BYTES];
        uint32_t blocks, quota;
        CHECK_ERR(kv_tenant_get(kv, tenants[t], name, &blocks, &quota), ATTND_OK);
        CHECK(blocks == n.tenant_blocks[t] && quota == n.quota[t]);
    }
    CHECK(kv_check_fast(kv));
}

// compare_seq checks what is told about a sequence, and its bytes when no step hinders.
static void compare_seq(uint32_t i) {
    naive_seq *s = &n.seqs[i];
    kv_seq_info got;
    CHECK_ERR(kv_seq_get(kv, 0, s->handle, &got), ATTND_OK);
    CHECK(got.committed == s->len && got.in_step == (s->step >= 0));
    CHECK(got.session == (s->session < 0 ? 0 : n.sessions[s->session].handle));
    CHECK(got.ttl_ms == s->ttl && strcmp(got.name, name_text(s->name)) == 0);
    if (s->step >= 0) {
        naive_step *st = &n.steps[s->step];
        for (uint32_t at = 0; at < st->num_seqs; at++) {
            check_rows(st, at);
        }
    } else if (s->session >= 0) {
        naive_step st = {.num_seqs = 1, .seqs = {{.seq = i}}};
        kv_step_seq seq = {.seq = s->handle};
        const kv_copy *copies;
        uint32_t num;
        bool may_wait;
        attnd_err err = kv_step_open(kv, (kv_request){n.sessions[s->session].handle, 0},
                                     n.models[s->model].index, &seq, 1, &st.handle, &copies, &num,
                                     &may_wait, &info);
        if (err == ATTND_EBUSY) {
            return; // all steps are open
        }
        CHECK_ERR(err, ATTND_OK);
        check_rows(&st, 0);
        CHECK_ERR(kv_step_abort(kv, (kv_request){0}, st.handle), ATTND_OK);
    }
}

static void compare_all(void) {
    uint32_t live = 0;
    kv_info all;
    for (uint32_t i = 0; i < NAIVE_SEQS; i++) {
        if (n.seqs[i].live) {
            live++;
            compare_seq(i);
        }
    }
    kv_get_info(kv, &all);
    CHECK(all.seqs == live);
}

// ---- the run

static void make_model(uint32_t i, uint32_t tenant, uint32_t num_groups,
                       const kv_group_spec *groups, const uint32_t *shape) {
    naive_model *m = &n.models[i];
    kv_model_spec spec = {.tenant = tenants[tenant], .num_groups = num_groups};
    snprintf(spec.name, sizeof(spec.name), "m%u", i);
    m->tenant = tenant;
    m->num_groups = num_groups;
    for (uint32_t g = 0; g < num_groups; g++) {
        spec.groups[g] = groups[g];
        m->block_tokens[g] = groups[g].block_tokens;
        m->shape[g] = shape[g];
    }
    m->has_tree = groups[num_groups - 1].block_tokens == 4;
    CHECK_ERR(kv_model_open(kv, &spec, &m->index, &info), ATTND_OK);
}

static void start(void) {
    const kv_opts opts = {
        .slab_bytes = SLAB_BYTES,
        .max_blocks = SLABS * 8,
        .max_seqs = NAIVE_SEQS,
        .max_seq_blocks = NAIVE_SEQ_BLOCKS,
        .max_models = NAIVE_MODELS,
        .max_tenants = NAIVE_TENANTS,
        .max_sessions = NAIVE_SESSIONS,
        .max_steps = NAIVE_STEPS,
        .max_step_seqs = NAIVE_STEP_SEQS,
        .prefix_blocks = SLABS * 8,
        .prefix_block_tokens = 4,
    };
    // layers, kv_heads, k_row_bytes, v_row_bytes, block_tokens: 256, 420, 384, 128, 672 bytes
    const kv_group_spec two[] = {{2, 2, 8, 8, 4, -1}, {1, 3, 12, 8, 7, 20}};
    const kv_group_spec one[] = {{1, 3, 24, 8, 4, -1}};
    const kv_group_spec wide[] = {{1, 1, 20, 12, 4, -1}, {3, 2, 8, 8, 7, 5}};
    const kv_group_spec tree[] = {{2, 2, 8, 8, 4, -1}, {1, 3, 24, 8, 4, -1}};
    memset(&n, 0, sizeof(n));
    CHECK_ERR(kv_create(&kv, &arena, &opts, &info), ATTND_OK);
    CHECK_ERR(kv_tenant_set(kv, "t0", 0, &tenants[0]), ATTND_OK);
    CHECK_ERR(kv_tenant_set(kv, "t1", 0, &tenants[1]), ATTND_OK);
    make_model(0, 0, 2, two, (const uint32_t[]){0, 1});
    make_model(1, 0, 1, one, (const uint32_t[]){1});
    make_model(2, 1, 2, wide, (const uint32_t[]){0, 2});
    make_model(3, 0, 2, tree, (const uint32_t[]){0, 1});
    for (int i = 0; i < NAIVE_SESSIONS; i++) {
        open_session(i);
    }
}

static const struct {
    uint32_t weight;
    void (*run)(int session);
} kinds[] = {
    {50, op_create}, {90, op_fork},  {50, op_truncate}, {50, op_free},  {40, op_keep},
    {40, op_attach}, {260, op_open}, {300, op_commit},  {30, op_abort}, {60, op_reply},
    {20, op_expire}, {8, op_quota},  {2, op_close},
};

static void run_one(void) {
    int session = (int)below(NAIVE_SESSIONS);
    uint32_t what = below(1000), kind = 0; // the weights' sum
    now_ms += below(20);
    if (!n.sessions[session].live) {
        open_session(session);
    }
    while (what >= kinds[kind].weight) {
        what -= kinds[kind++].weight;
    }
    kinds[kind].run(session);
}

static uint64_t from_env(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 0) : otherwise;
}

START_TEST(kv_cache_agrees_with_the_naive_model) {
    uint32_t changes = (uint32_t)from_env("ATTND_TEST_CHANGES", DEFAULT_CHANGES);
    seed = from_env("ATTND_TEST_SEED", 20240229);
    rng = seed * UINT64_C(0x9e3779b97f4a7c15) | 1;
    printf("kv_random seed=%" PRIu64 " changes=%u\n", seed, changes);
    fflush(stdout);
    start();
    for (op = 0; done < changes; op++) { // operations that changed something count
        run_one();
        compare_counts();
        uint32_t seq = below(NAIVE_SEQS);
        if (n.seqs[seq].live && chance(40)) {
            compare_seq(seq);
        }
        if (op % RECOUNTED_EVERY == 0) {
            CHECK(kv_check_full(kv, &info));
        }
        if (op % ALL_CHECKED_EVERY == 0) {
            compare_all();
        }
    }
    for (int i = 0; i < NAIVE_SESSIONS; i++) {
        if (n.sessions[i].live) {
            op_close(i);
        }
    }
    now_ms += 1000000;
    op_expire(-1);
    compare_all();
    CHECK(kv_check_full(kv, &info));
    kv_info all;
    kv_get_info(kv, &all);
    printf("kv_random changes=%u of=%u refused=%u may_wait=%u copies=%u moves=%u sessions=%u "
           "found blocks=%u rows=%u evicted=%" PRIu64 "\n",
           done, op, refused, waits, copied, moved, closed, found_blocks, found_rows,
           all.evictions);
    CHECK(changes < 10000 || (refused && waits && waits < refused && copied && moved && closed &&
                              found_blocks && found_rows && all.evictions));
    kv_free(kv);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_random");
    TCase *t = tcase_create("run");
    tcase_set_timeout(t, 110);
    tcase_add_test(t, kv_cache_agrees_with_the_naive_model);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
