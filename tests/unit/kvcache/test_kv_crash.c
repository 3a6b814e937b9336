// Stops kvcache before every single store of a scripted run, as a kill -9 would, and recovers what
// is left: it must be what there was before the operation, or what there is after it, to the byte
// of every committed row; never anything between; and the books must balance.  A node of the prefix
// tree that is there must have the rows of its token ids; a commit makes nodes one by one.
//
// A child runs the script over memory that it shares with the parent and exits at the store; then
// two more children begin to recover and are stopped, too; the last recovery is the parent's.  This
// target compiles kvcache with KV_CRASH_POINTS.
//
// The same with SIGKILL at random instructions: ATTND_KILLS says how often.
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvcache/kv_redo.h"
#include "proto/clock.h"
#include "tests/unit/kvcache/kv_fixture.h"
#include "tests/unit/kvcache/kv_rows.h"

enum { SEQS = 12, ARENA_BYTES = FIX_BLOCKS * KV_BLOCK_UNIT, STOPPED = 77 };

// Every how many stores a process is stopped: at each of an operation, and, of some of these, at
// some of the recovery's.  Sanitizers make a child many times slower, and there a sample does.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { EVERY = 43, EVERY_RECOVERED = 463, EVERY_OF_RECOVERY = 47, KILLS = 20 };
#else
enum { EVERY = 1, EVERY_RECOVERED = 197, EVERY_OF_RECOVERY = 5, KILLS = 500 };
#endif

static kv_fixture f;
static uint64_t seqs[SEQS], other, step;
static uint32_t two;  // a model of two groups
static uint32_t tree; // another, whose prefixes are cached
static uint32_t win;  // another, with windows of 5 and 3 tokens; one more is kept
static uint32_t both; // another, whose prefixes are cached, with a window of 3 tokens
static uint32_t ids[16];
static uint32_t next_token;
static long stores, stop_at = -1;

void kv_crash_point(void) {
    if (stores++ == stop_at) {
        _exit(STOPPED);
    }
}

// ---- the script

// write_new writes rows for the step's new tokens of sequence i, all groups.
static void write_new(uint32_t i) {
    uint32_t num, model, entries;
    const kv_step_seq *in = &kv_step_get(f.kv, 0, step, &num, &model)[i];
    const kv_model_spec *spec = kv_model_get(f.kv, model);
    for (uint32_t t = 0; t < in->new_len; t++) {
        next_token++;
        for (uint32_t g = 0; g < spec->num_groups; g++) {
            const uint32_t *table = kv_step_table(f.kv, step, i, g, &entries);
            rows_write(spec, g, f.memory, table, in->committed + t, next_token);
        }
    }
}

static void open_step(uint32_t model, uint32_t a, uint32_t new_a, uint32_t b, uint32_t new_b) {
    kv_step_seq in[2] = {{.seq = seqs[a], .new_len = new_a}, {.seq = seqs[b], .new_len = new_b}};
    uint32_t num_copies, num = a == b ? 1 : 2;
    const kv_copy *copies;
    bool may_wait;
    ATTND_CK_OK(kv_step_open(f.kv, fix_rq(&f), model, in, num, &step, &copies, &num_copies,
                             &may_wait, &f.info));
    ATTND_CK_OK(kv_copy_run(f.kv, copies, num_copies, NULL));
    for (uint32_t i = 0; i < num; i++) {
        write_new(i);
    }
}

// move_rows gathers rows path [num] of sequence i of the step, as a tree's commit does before it.
static void move_rows(uint32_t i, const uint32_t *path, uint32_t num) {
    kv_copy moves[16];
    uint32_t listed;
    ATTND_CK_OK(kv_step_moves(f.kv, step, i, path, num, moves, 16, &listed, &f.info));
    ATTND_CK_OK(kv_copy_run(f.kv, moves, listed, &f.info));
}

static void commit(uint32_t a, uint32_t b) {
    uint32_t num, model, accepted[2] = {a, b};
    kv_step_get(f.kv, 0, step, &num, &model);
    ATTND_CK_OK(kv_step_commit(f.kv, fix_rq(&f), step, accepted, num, &f.info));
}

// open_ids opens a step of tokens first, first + 1 ... and writes the rows that are not found.
static void open_ids_of(uint32_t of, uint32_t a, uint32_t first, uint32_t num, uint32_t cached) {
    kv_step_seq in = {.seq = seqs[a], .new_len = num, .tokens = ids};
    const kv_model_spec *spec = kv_model_get(f.kv, of);
    const kv_copy *copies;
    uint32_t num_copies, entries;
    bool may_wait;
    for (uint32_t i = 0; i < 16; i++) {
        ids[i] = first + i;
    }
    ATTND_CK_OK(kv_step_open(f.kv, fix_rq(&f), of, &in, 1, &step, &copies, &num_copies, &may_wait,
                             &f.info));
    ck_assert_uint_eq(in.cached, cached);
    ATTND_CK_OK(kv_copy_run(f.kv, copies, num_copies, NULL));
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        const uint32_t *table = kv_step_table(f.kv, step, 0, g, &entries);
        for (uint32_t t = cached; t < num; t++) {
            rows_write(spec, g, f.memory, table, in.committed + t, ids[t]);
        }
    }
}

static void open_ids(uint32_t a, uint32_t first, uint32_t num, uint32_t cached) {
    open_ids_of(tree, a, first, num, cached);
}

static void commit_ids(uint32_t accepted) {
    const uint32_t *tokens = ids;
    ATTND_CK_OK(kv_step_commit_ids(f.kv, fix_rq(&f), step, &accepted, &tokens, 1, &f.info));
}

static void fork_of(uint32_t from, uint32_t to) {
    uint32_t committed;
    ATTND_CK_OK(kv_seq_fork(f.kv, fix_rq(&f), seqs[from], &seqs[to], &committed, &f.info));
}

// run_op runs operation k of the script; false behind the last.  One call that changes state each,
// except where several() says otherwise.
static bool run_op(uint32_t k) {
    const uint8_t secret[KV_SECRET_BYTES] = {9};
    uint32_t committed;
    switch (k) {
    case 0: // a sequence of two groups, blocks of 4 and 3 tokens
        ATTND_CK_OK(kv_seq_create(f.kv, fix_rq(&f), two, &seqs[0], &f.info));
        return true;
    case 1:
        return open_step(two, 0, 10, 0, 0), true;
    case 2:
        return commit(10, 0), true;
    case 3:
        return fork_of(0, 1), true;
    case 4: // both last blocks are copied; straight behind the fork
        return open_step(two, 1, 3, 1, 0), true;
    case 5: // of a sequence in a step
        return fork_of(1, 2), true;
    case 6:
        return commit(2, 0), true;
    case 7: // straight behind a commit that ended copies; two sequences, both copy
        return open_step(two, 0, 5, 2, 1), true;
    case 8: // one goes on with its copy, the other back
        return commit(0, 1), true;
    case 9:
        return fork_of(1, 3), true;
    case 10:
        return open_step(two, 3, 2, 3, 0), true;
    case 11:
        ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), step));
        return true;
    case 12: // straight behind the abort
        return open_step(two, 3, 4, 3, 0), true;
    case 13:
        return commit(4, 0), true;
    case 14:
        ATTND_CK_OK(kv_seq_truncate(f.kv, fix_rq(&f), seqs[3], 5, &f.info));
        return true;
    case 15: // copies what is left of a shared block
        return open_step(two, 3, 1, 3, 0), true;
    case 16:
        return commit(1, 0), true;
    case 17:
        ATTND_CK_OK(kv_seq_keep(f.kv, fix_rq(&f), seqs[1], "kept", 50, &f.info));
        return true;
    case 18:
        ATTND_CK_OK(kv_seq_keep(f.kv, fix_rq(&f), seqs[2], "too", 0, &f.info));
        return true;
    case 19:
        ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), seqs[0], &f.info));
        return true;
    case 20: // the slot of the freed one is used again
        return fork_of(1, 4), true;
    case 21:
        ATTND_CK_OK(kv_session_close(f.kv, f.session, 100));
        return true;
    case 22:
        ATTND_CK_OK(kv_session_open(f.kv, f.tenant, secret, &other));
        f.session = other;
        return true;
    case 23:
        ATTND_CK_OK(kv_seq_attach(f.kv, fix_rq(&f), two, "too", &seqs[2], &committed, &f.info));
        return true;
    case 24:
        return open_step(two, 2, 7, 2, 0), true;
    case 25:
        return commit(7, 0), true;
    case 26:
        return kv_expire(f.kv, 150), true;
    case 27:
        ATTND_CK_OK(kv_tenant_set(f.kv, "t", 100, &f.tenant));
        ATTND_CK_OK(kv_tenant_cache(f.kv, f.tenant, 0, 5));
        return true;
    case 28:
        return open_step(two, 2, 40, 2, 0), true; // a new slab
    case 29:
        ATTND_CK_OK(kv_step_abort(f.kv, (kv_request){0}, step));
        return true;
    case 30: // a tree of seven rows, of which a path is accepted
        return open_step(two, 2, 7, 2, 0), true;
    case 31:
        move_rows(0, (const uint32_t[]){0, 2, 5}, 3);
        return commit(3, 0), true;
    case 32:
        return fork_of(2, 5), true;
    case 33: // both last blocks are copied, then a path goes over the edge of a block
        return open_step(two, 5, 9, 2, 2), true;
    case 34:
        move_rows(0, (const uint32_t[]){1, 3, 4, 8}, 4);
        return commit(4, 2), true;
    case 35:
        ATTND_CK_OK(kv_seq_create_priority(f.kv, fix_rq(&f), tree, 2, &seqs[6], &f.info));
        return true;
    case 36:
        return open_ids(6, 1000, 14, 0), true;
    case 37: // three nodes
        return commit_ids(14), true;
    case 38: // of which the third block has two tokens
        ATTND_CK_OK(kv_seq_truncate(f.kv, fix_rq(&f), seqs[6], 10, &f.info));
        return true;
    case 39: // copies the block, since it is a node's
        return open_ids(6, 2000, 3, 0), true;
    case 40: // another node beside the third
        return commit_ids(3), true;
    case 41:
        ATTND_CK_OK(kv_seq_create(f.kv, fix_rq(&f), tree, &seqs[7], &f.info));
        return true;
    case 42: // finds two blocks, whose priority is raised, and three rows of one
        return open_ids(7, 1000, 12, 11), true;
    case 43:
        return commit_ids(12), true;
    case 44:
        return fork_of(7, 8), true;
    case 45:
        return open_ids(8, 3000, 5, 0), true;
    case 46:
        return commit_ids(5), true;
    case 47:
        ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), seqs[6], &f.info));
        return true;
    case 48: // its last node goes
        ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), seqs[8], &f.info));
        return true;
    case 49: { // so many blocks that some of those that nobody uses go
        kv_info info;
        kv_get_info(f.kv, &info);
        ATTND_CK_OK(kv_tenant_set(f.kv, "t", info.in_use + info.cached, &f.tenant));
        return true;
    }
    case 50:
        return open_ids(7, 4000, 5, 0), true;
    case 51:
        return commit_ids(4), true;
    case 52:
        ATTND_CK_OK(kv_tenant_set(f.kv, "t", 0, &f.tenant));
        return true;
    case 53:
        ATTND_CK_OK(kv_seq_create(f.kv, fix_rq(&f), win, &seqs[9], &f.info));
        return true;
    case 54:
        return open_step(win, 9, 14, 9, 0), true;
    case 55:
        return commit(14, 0), true;
    case 56:
        return open_step(win, 9, 9, 9, 0), true;
    case 57: // gives back 2 blocks of 4 tokens and 3 of 3
        return commit(7, 0), true;
    case 58:
        return fork_of(9, 10), true;
    case 59: // both copy what is left of a last block
        return open_step(win, 10, 5, 9, 4), true;
    case 60: // and give back blocks that both have
        return commit(5, 4), true;
    case 61:
        ATTND_CK_OK(kv_seq_truncate(f.kv, fix_rq(&f), seqs[10], 21, &f.info));
        return true;
    case 62: // begins anew
        ATTND_CK_OK(kv_seq_truncate(f.kv, fix_rq(&f), seqs[9], 0, &f.info));
        return true;
    case 63:
        return open_step(win, 9, 5, 10, 0), true;
    case 64:
        return commit(5, 0), true;
    case 65:
        ATTND_CK_OK(kv_seq_create(f.kv, fix_rq(&f), both, &seqs[11], &f.info));
        return true;
    case 66:
        return open_ids_of(both, 11, 5000, 12, 0), true;
    case 67:
        return commit_ids(12), true;
    case 68:
        return open_ids_of(both, 11, 5012, 8, 0), true;
    case 69: // two blocks are the tree's alone
        return commit_ids(8), true;
    case 70:
        ATTND_CK_OK(kv_seq_create(f.kv, fix_rq(&f), win, &seqs[6], &f.info));
        return true;
    case 71: { // so many blocks that all go that nobody uses, also those two
        kv_info info;
        kv_get_info(f.kv, &info);
        uint32_t stay = info.cached - 2; // of nodes in use whose sequences have blocks of their own
        for (uint32_t m = 0; m < 4; m++) {
            stay -= f.kv->model_aux[m].evictable[0] + f.kv->model_aux[m].evictable[1];
        }
        ATTND_CK_OK(kv_tenant_set(f.kv, "t", info.in_use + 3 + stay, &f.tenant));
        return true;
    }
    case 72:
        return open_step(win, 6, 4, 6, 0), true;
    case 73:
        return commit(4, 0), true;
    case 74:
        ATTND_CK_OK(kv_tenant_set(f.kv, "t", 0, &f.tenant));
        return true;
    case 75:
        ATTND_CK_OK(kv_seq_create(f.kv, fix_rq(&f), both, &seqs[8], &f.info));
        return true;
    case 76: // the first block's rows would see what its node lacks
        return open_ids_of(both, 8, 5000, 9, 0), true;
    case 77: // which gets it
        return commit_ids(9), true;
    default:
        return false;
    }
}

// several says whether operation k frees sequences one by one.
static bool several(uint32_t k) {
    return k == 21;
}

static kv_opts options(void) {
    kv_opts opts = fix_opts();
    opts.prefix_blocks = 32;
    opts.prefix_block_tokens = FIX_BLOCK_TOKENS;
    opts.window_margin = 1;
    return opts;
}

static void start(void) {
    const kv_opts opts = options();
    kv_model_spec spec = fix_spec("two", 0);
    f = (kv_fixture){.next_request = 1, .memory = f.memory};
    next_token = 0;
    memset(f.memory, 0, ARENA_BYTES);
    f.arena =
        (kv_arena){.base = f.memory, .bytes = ARENA_BYTES, .fd = -1, .ops = &kv_arena_host_ops};
    ATTND_CK_OK(kv_create(&f.kv, &f.arena, &opts, &f.info));
    ATTND_CK_OK(kv_tenant_set(f.kv, "t", 0, &f.tenant));
    spec.num_groups = 2;
    spec.groups[1] = (kv_group_spec){2, 1, 32, 16, 3, -1}; // 288 bytes: two units
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &two, &f.info));
    spec.name[0] = 'T';
    spec.groups[1].block_tokens = FIX_BLOCK_TOKENS; // 384 bytes: two units, too
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &tree, &f.info));
    spec.name[0] = 'w';
    spec.groups[0].window_left = 5;
    spec.groups[1] = (kv_group_spec){2, 1, 32, 16, 3, 3};
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &win, &f.info));
    spec.name[0] = 'b';
    spec.groups[0].window_left = -1;
    spec.groups[1].block_tokens = FIX_BLOCK_TOKENS;
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &both, &f.info));
    ATTND_CK_OK(kv_session_open(f.kv, f.tenant, (const uint8_t[KV_SECRET_BYTES]){1}, &f.session));
}

// ---- what a restart would see

typedef struct view {
    kv_led_seq seqs[SEQS]; // all zero when not live; old_last and place in the tree left out
    uint64_t rows[SEQS];   // a hash of the committed rows
    kv_led_session sessions[2];
    uint32_t quota;
} view;

static uint64_t mix(uint64_t h, const char *bytes, uint64_t num) {
    for (uint64_t i = 0; i < num; i++) {
        h = (h ^ (uint8_t)bytes[i]) * UINT64_C(0x100000001b3);
    }
    return h;
}

static uint64_t hash_group(uint64_t h, uint32_t idx, uint32_t g) {
    const kv_led_seq *s = &f.kv->seqs[idx];
    const kv_group_spec *group = &f.kv->models[s->model].spec.groups[g];
    uint32_t units = (uint32_t)((kv_block_bytes(group) + KV_BLOCK_UNIT - 1) / KV_BLOCK_UNIT);
    uint32_t num = kv_blocks_of(s->committed, group->block_tokens);
    for (uint32_t b = 0; b < s->first[g]; b++) {
        ck_assert_uint_eq(kv_table(f.kv, idx, g)[b], KV_NONE);
    }
    for (uint32_t t = s->first[g] * group->block_tokens; t < s->committed; t++) {
        uint32_t b = t / group->block_tokens, slot = t % group->block_tokens;
        uint32_t entry =
            b == num - 1 && s->old_last[g] != KV_NONE ? s->old_last[g] : kv_table(f.kv, idx, g)[b];
        ck_assert_uint_lt(entry, FIX_BLOCKS);
        ck_assert_uint_eq(f.kv->slabs[entry / FIX_SLAB_BLOCKS].units, units);
        const char *block = f.memory + (size_t)entry * KV_BLOCK_UNIT;
        for (uint32_t layer = 0; layer < group->layers; layer++) {
            uint64_t k, v;
            kv_layer_offset(group, layer, &k, &v);
            h = mix(h, block + k + (size_t)slot * group->k_row_bytes, group->k_row_bytes);
            h = mix(h, block + v + (size_t)slot * group->v_row_bytes, group->v_row_bytes);
        }
    }
    return h;
}

static void look(view *out) {
    memset(out, 0, sizeof(*out));
    for (uint32_t i = 0; i < SEQS; i++) {
        const kv_led_seq *s = &f.kv->seqs[i];
        if (s->state == KV_LIVE) {
            out->seqs[i] = *s;
            memset(out->seqs[i].old_last, 0, sizeof(s->old_last));
            out->seqs[i].known = out->seqs[i].chain = out->seqs[i].chain_generation = 0;
            out->seqs[i].tail_half = 0;
            out->seqs[i].tail_sum = 0;
            out->rows[i] = hash_group(hash_group(1, i, 0), i, 1);
        }
    }
    memcpy(out->sessions, f.kv->sessions, sizeof(out->sessions));
    out->quota = f.kv->tenants[0].quota_blocks;
}

// check_nodes says whether each node has the rows of its ids.
static bool check_nodes(void) {
    for (uint32_t i = 0; i < 32; i++) {
        for (uint32_t at = 0; f.kv->nodes[i].owner && at < 2 * FIX_BLOCK_TOKENS; at++) {
            uint32_t g = at % 2, t = at / 2;
            const kv_model_spec *spec = kv_model_get(f.kv, kv_node_model(f.kv, i));
            bool lacks = *kv_node_entry(f.kv, i, g) == KV_NONE;
            ck_assert(!lacks || spec->groups[g].window_left >= 0);
            if (!lacks && !rows_right(spec, g, f.memory, kv_node_entry(f.kv, i, g), t,
                                      kv_node_ids(f.kv, i)[t])) {
                return false;
            }
        }
    }
    return true;
}

// recover goes on with what another process left.
static void recover(void) {
    const kv_opts opts = options();
    kv_recovered found;
    int fd = dup(f.kv->fd);
    kv_free(f.kv);
    ATTND_CK_OK(kv_recover(&f.kv, &f.arena, &opts, fd, 100, &found, &f.info));
    ck_assert_uint_eq(found.bad_units, 0);
    ck_assert(!found.bad_record);
    ck_assert_uint_eq(found.lost_models + found.lost_sessions + found.lost_seqs, 0);
    ck_assert_uint_eq(found.lost_prefix_blocks, 0);
    ck_assert(check_nodes());
}

// ended_at runs a child that is stopped at its store number at; true when it was.
static bool ended_at(void (*run)(uint32_t k), uint32_t k, long at) {
    pid_t child = fork();
    ck_assert_int_ge(child, 0);
    if (child == 0) {
        stores = 0;
        stop_at = at;
        run(k);
        _exit(0);
    }
    int status;
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert(WIFEXITED(status));
    ck_assert(WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == STOPPED);
    return WEXITSTATUS(status) == STOPPED;
}

static void run_recovery(uint32_t k) {
    (void)k;
    recover();
}

// seqs_between says whether every sequence is as it was before or as it is after.
static bool seqs_between(const view *got, const view *before, const view *after) {
    for (uint32_t i = 0; i < SEQS; i++) {
        bool as_before = memcmp(&got->seqs[i], &before->seqs[i], sizeof(got->seqs[i])) == 0 &&
                         got->rows[i] == before->rows[i];
        bool as_after = memcmp(&got->seqs[i], &after->seqs[i], sizeof(got->seqs[i])) == 0 &&
                        got->rows[i] == after->rows[i];
        if (!as_before && !as_after) {
            return false;
        }
    }
    return true;
}

static void run_one(uint32_t k) {
    run_op(k);
}

static void run_to(uint32_t k) {
    start();
    for (uint32_t i = 0; i < k; i++) {
        run_op(i);
    }
}

static view before, after, got;

// check_recovered recovers and compares; stopped: operation k was stopped at a store.
static bool check_recovered(uint32_t k, bool stopped, bool *made) {
    recover();
    look(&got);
    ck_assert_msg(kv_check_full(f.kv, &f.info), "operation %u: %s", k, f.info.text);
    bool is_before = memcmp(&got, &before, sizeof(got)) == 0;
    bool is_after = memcmp(&got, &after, sizeof(got)) == 0;
    *made = is_after && !is_before;
    return (stopped ? is_before || is_after : is_after) ||
           (several(k) && seqs_between(&got, &before, &after));
}

// look_at fills before and after for operation k; false behind the last.
static bool look_at(uint32_t k) {
    run_to(k);
    look(&before);
    bool more = run_op(k);
    look(&after);
    kv_free(f.kv);
    return more;
}

static void map_memory(void) {
    f.memory = mmap(NULL, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ck_assert_ptr_ne(f.memory, MAP_FAILED);
}

START_TEST(kv_recover_finds_all_after_a_stop_at_any_store) {
    long stops = 0, committed = 0, in_recovery = 0;
    map_memory();
    for (uint32_t k = 0; look_at(k); k++) {
        bool stopped = true;
        for (long at = k % EVERY; stopped; at += EVERY) {
            bool made;
            run_to(k);
            stopped = ended_at(run_one, k, at);
            in_recovery += ended_at(run_recovery, 0, at % 41);
            in_recovery += ended_at(run_recovery, 0, at % 29);
            bool good = check_recovered(k, stopped, &made);
            ck_assert_msg(good, "operation %u stopped at its store %ld", k, at);
            stops += stopped;
            committed += stopped && made;
            kv_free(f.kv);
        }
    }
    printf("kv_crash stops=%ld of which %ld had committed, %ld in recovery\n", stops, committed,
           in_recovery);
    ck_assert_int_gt(committed, 0);
    ck_assert_int_gt(stops, committed);
    munmap(f.memory, ARENA_BYTES);
}
END_TEST

// Stores of the recovery, and of the recovery after that one.
START_TEST(kv_recover_may_be_stopped_at_any_store) {
    long stops = 0;
    map_memory();
    for (uint32_t k = 0; look_at(k); k++) {
        long at = k % EVERY_RECOVERED;
        for (bool in_op = true; in_op; at += EVERY_RECOVERED) {
            bool stopped = true, made;
            for (long n = k % EVERY_OF_RECOVERY; stopped; n += EVERY_OF_RECOVERY) {
                run_to(k);
                in_op = ended_at(run_one, k, at);
                stopped = ended_at(run_recovery, 0, n);
                stops += stopped + ended_at(run_recovery, 0, n / 2);
                ck_assert_msg(check_recovered(k, in_op, &made),
                              "operation %u stopped at its store %ld, recovery at %ld", k, at, n);
                kv_free(f.kv);
            }
        }
    }
    printf("kv_crash stops in recovery=%ld\n", stops);
    ck_assert_int_gt(stops, 0);
    munmap(f.memory, ARENA_BYTES);
}
END_TEST

// ---- kills

enum { MAX_OPS = 96, RUNS = 8, FILES = 64 };

// shared is what a child tells of itself.
typedef struct shared {
    atomic_bool there, go; // the child is, and may begin
    atomic_uint at;        // operation that it is at
    atomic_uint took_us;   // all of it; 0 = it is not through
} shared;

static shared *told;
static view views[MAX_OPS + 1]; // before operation k
static uint64_t rng;

static void run_all(uint32_t num) {
    for (uint32_t k = 0; k < num; k++) {
        atomic_store(&told->at, k);
        run_op(k);
    }
}

// mute keeps a child from Check's file, which has a line of each assertion and would be spoilt by a
// kill in the middle of one.
static void mute(void) {
    int nothing = open("/dev/null", O_WRONLY);
    for (int fd = STDERR_FILENO + 1; fd < FILES; fd++) {
        if (fd != f.kv->fd) {
            dup2(nothing, fd);
        }
    }
}

// killed_within runs a child and kills it at a random moment of the us that it takes; us 0: behind
// its end, and it returns how long that took.
static uint32_t killed_within(void (*run)(uint32_t k), uint32_t k, uint32_t us) {
    *told = (shared){0};
    pid_t child = fork();
    ck_assert_int_ge(child, 0);
    if (child == 0) {
        mute();
        atomic_store(&told->there, true);
        while (!atomic_load(&told->go)) {
            sched_yield();
        }
        uint64_t from = attnd_clock_us();
        run(k);
        atomic_store(&told->took_us, (uint32_t)(attnd_clock_us() - from) + 1);
        pause();
    }
    while (!atomic_load(&told->there)) {
        sched_yield();
    }
    atomic_store(&told->go, true);
    rng = rng * UINT64_C(6364136223846793005) + 1442695040888963407;
    uint64_t until = attnd_clock_us() + (us ? (rng >> 33) % us : UINT32_MAX);
    while (attnd_clock_us() < until && !atomic_load(&told->took_us)) {
    }
    int status;
    kill(child, SIGKILL);
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert_msg(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "status %x", status);
    return atomic_load(&told->took_us);
}

static uint32_t least(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

static uint32_t look_at_all(void) {
    uint32_t num = 0;
    start();
    do {
        look(&views[num]);
        ck_assert_uint_lt(num, MAX_OPS);
    } while (run_op(num) && ++num);
    kv_free(f.kv);
    return num;
}

// check_killed recovers, after a child that was at operation `at` was killed.
static bool check_killed(uint32_t at) {
    recover();
    look(&got);
    ck_assert_msg(kv_check_full(f.kv, &f.info), "operation %u: %s", at, f.info.text);
    return memcmp(&got, &views[at], sizeof(got)) == 0 ||
           memcmp(&got, &views[at + 1], sizeof(got)) == 0 ||
           (several(at) && seqs_between(&got, &views[at], &views[at + 1]));
}

START_TEST(kv_recover_finds_all_after_a_kill_at_any_moment) {
    const char *wanted = getenv("ATTND_KILLS");
    long kills = wanted ? strtol(wanted, NULL, 10) : KILLS, ended = 0;
    map_memory();
    told = mmap(NULL, sizeof(*told), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ck_assert_ptr_ne(told, MAP_FAILED);
    rng = attnd_clock_us();
    uint32_t num = look_at_all();
    uint32_t script_us = UINT32_MAX, recovery_us = UINT32_MAX;
    for (int i = 0; i < RUNS; i++) {
        start();
        script_us = least(script_us, killed_within(run_all, num, 0));
        recovery_us = least(recovery_us, killed_within(run_recovery, 0, 0));
        kv_free(f.kv);
    }
    for (long i = 0; i < kills; i++) {
        start();
        killed_within(run_all, num, script_us + script_us / 8);
        uint32_t at = atomic_load(&told->at);
        ended += atomic_load(&told->took_us) > 0;
        killed_within(run_recovery, 0, recovery_us);
        killed_within(run_recovery, 0, recovery_us);
        ck_assert_msg(check_killed(at), "kill %ld at operation %u", i, at);
        kv_free(f.kv);
    }
    printf("kv_crash kills=%ld in scripts of %u us, %ld of them behind the end, and %ld in "
           "recoveries of %u us\n",
           kills, script_us, ended, 2 * kills, recovery_us);
    munmap(told, sizeof(*told));
    munmap(f.memory, ARENA_BYTES);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_crash");
    TCase *t = tcase_create("stops");
    tcase_set_timeout(t, 240);
    tcase_add_test(t, kv_recover_finds_all_after_a_stop_at_any_store);
    tcase_add_test(t, kv_recover_may_be_stopped_at_any_store);
    TCase *kills = tcase_create("kills");
    tcase_set_timeout(kills, 1000);
    tcase_add_test(kills, kv_recover_finds_all_after_a_kill_at_any_moment);
    suite_add_tcase(s, kills);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
