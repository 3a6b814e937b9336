// Recovery: the ledger of a process that is gone becomes a cache again.
//
//     the newest redo record again -> every unit's checksum (kv_repair.c) -> derived memory to zero
//     -> tenants, sessions, models, sequences, prefix tree: each checked, then taken over or
//     dropped
//     -> free lists
//
// What it changes of the authoritative part goes through redo records, one a thing, so it may be
// killed at any store, too, and done again from the start.  Derived memory is made from zero each
// time: whatever the last process left there is not looked at.
//
// A sequence is taken over when its tables have the checksums that its last commit left and each
// entry is a block of the class of its group, in a slab cut for that class, that no other model's
// sequence has.  So nobody ever reads a block that was not his.
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvcache/kv_ledger.h"
#include "kvcache/kv_model.h"
#include "kvcache/kv_pool.h"
#include "kvcache/kv_redo.h"
#include "kvcache/kv_regrow.h"
#include "kvcache/kv_repair.h"
#include "kvcache/kv_seq.h"
#include "kvcache/kv_session.h"
#include "kvcache/kv_slab.h"
#include "kvcache/kv_sum.h"

enum { PAGE_BYTES = 4096 };

// ---- whether it can be

static bool read_head(int fd, off_t at, kv_led_head *head) {
    return pread(fd, head, sizeof(*head), at) == (ssize_t)sizeof(*head);
}

// find_head reads the head that is whole.
static attnd_err find_head(int fd, kv_led_head *head, attnd_errinfo *info) {
    kv_led_head first = {0}, copy = {0};
    bool first_read = read_head(fd, 0, &first), copy_read = read_head(fd, PAGE_BYTES, &copy);
    bool first_whole = first_read && first.check == kv_head_check(&first);
    bool copy_whole = copy_read && copy.check == kv_head_check(&copy);
    *head = first_whole || !copy_whole ? first : copy;
    if (!first_read || head->magic != KV_LEDGER_MAGIC) {
        return attnd_fail(info, ATTND_EINVAL, "ledger", "the descriptor holds no ledger");
    }
    if (head->version != KV_LEDGER_VERSION) {
        return attnd_fail(info, ATTND_EVERSION, "ledger", "it has version %u, this is %d",
                          head->version, KV_LEDGER_VERSION);
    }
    if (!first_whole && !copy_whole) {
        return attnd_fail(info, ATTND_EINVAL, "ledger", "both its heads are damaged");
    }
    return ATTND_OK;
}

uint64_t kv_recover_arena_bytes(int fd) {
    kv_led_head head;
    return find_head(fd, &head, NULL) ? 0 : head.arena_bytes;
}

static attnd_err check_head(int fd, const kv_arena *arena, const kv_opts *o, attnd_errinfo *info) {
    kv_led_head head;
    attnd_err err = find_head(fd, &head, info);
    if (err) {
        return err;
    }
    const struct {
        const char *field;
        uint64_t was, is;
    } fields[] = {
        {"arena", head.arena_bytes, arena->bytes},
        {"slab_bytes", head.opts.slab_bytes, o->slab_bytes},
        {"max_blocks", head.opts.max_blocks, o->max_blocks},
        {"max_seqs", head.opts.max_seqs, o->max_seqs},
        {"max_seq_blocks", head.opts.max_seq_blocks, o->max_seq_blocks},
        {"max_models", head.opts.max_models, o->max_models},
        {"max_tenants", head.opts.max_tenants, o->max_tenants},
        {"max_sessions", head.opts.max_sessions, o->max_sessions},
        {"max_steps", head.opts.max_steps, o->max_steps},
        {"max_step_seqs", head.opts.max_step_seqs, o->max_step_seqs},
        {"prefix_blocks", head.opts.prefix_blocks, o->prefix_blocks},
        {"prefix_block_tokens", head.opts.prefix_block_tokens, o->prefix_block_tokens},
    };
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        if (fields[i].was != fields[i].is) {
            return attnd_fail(info, ATTND_EINVAL, fields[i].field,
                              "it was made with %s %llu, which is now %llu", fields[i].field,
                              (unsigned long long)fields[i].was, (unsigned long long)fields[i].is);
        }
    }
    return ATTND_OK;
}

// ---- taking over

typedef struct taking {
    kv_cache *kv;
    kv_recovered *found;
    uint32_t *owners; // [num_slabs, slab_blocks], model + 1 of whom a block is
    uint64_t now_ms;
} taking;

static bool tenant_good(const kv_cache *kv, uint32_t tenant) {
    return tenant < kv->lists->tenants.used && kv->tenants[tenant].name[0];
}

static void take_sessions(taking *t) {
    kv_cache *kv = t->kv;
    for (uint32_t i = 0; i < kv->lists->sessions.used; i++) {
        kv_led_session *s = &kv->sessions[i];
        if (s->state == KV_LIVE && !tenant_good(kv, s->tenant)) {
            t->found->lost_sessions++;
            kv_redo_begin(kv);
            kv_drop_session(kv, i);
            kv_redo_commit(kv);
        }
        t->found->sessions += s->state == KV_LIVE;
    }
}

// forget_opening forgets the reply in a slot when it is to the opening of a step that is open.
static void forget_opening(kv_cache *kv, kv_led_reply *reply) {
    uint32_t step = (uint32_t)reply->id;
    if (reply->op == KV_OP_STEP && step < kv->lists->steps.used &&
        kv->steps[step].state == KV_LIVE && kv->steps[step].generation == reply->id >> 32) {
        kv_redo_begin(kv);
        kv_redo_put64(kv, &reply->request, 0);
        kv_redo_commit(kv);
    }
}

// abort_steps: their blocks are in no record, so nothing is to be given back.
static void abort_steps(taking *t) {
    kv_cache *kv = t->kv;
    bool any = false;
    for (uint32_t i = 0; i < kv->lists->steps.used; i++) {
        any |= kv->steps[i].state == KV_LIVE;
    }
    for (uint32_t i = 0; any && i < kv->lists->sessions.used; i++) {
        for (uint32_t r = 0; kv->sessions[i].state == KV_LIVE && r < KV_REPLIES; r++) {
            forget_opening(kv, &kv->replies[(uint64_t)i * KV_REPLIES + r]);
        }
    }
    for (uint32_t i = 0; any && i < kv->lists->steps.used; i++) {
        if (kv->steps[i].state == KV_LIVE) {
            t->found->aborted_steps++;
            kv_redo_begin(kv);
            kv_redo_put(kv, &kv->steps[i].state, KV_FREE);
            kv_redo_commit(kv);
        }
    }
}

static void take_models(taking *t) {
    kv_cache *kv = t->kv;
    for (uint32_t i = 0; i < kv->lists->models.used; i++) {
        kv_led_model *m = &kv->models[i];
        if (m->state != KV_LIVE) {
            continue;
        }
        bool good = tenant_good(kv, m->spec.tenant) && kv_model_revive(kv, i);
        kv_redo_begin(kv);
        kv_redo_put(kv, &m->users, good);
        if (!good) {
            kv_redo_put(kv, &m->state, KV_FREE);
        }
        kv_redo_commit(kv);
        t->found->models += good;
        t->found->lost_models += !good;
    }
}

// committed_entry returns entry b of n of a table as it was committed: a step may have put a copy
// in the place of the last one.
static uint32_t committed_entry(const kv_cache *kv, uint32_t idx, uint32_t g, uint32_t b,
                                uint32_t n) {
    uint32_t old = kv->seqs[idx].old_last[g];
    return b == n - 1 && old != KV_NONE ? old : kv_table(kv, idx, g)[b];
}

// claim_entry takes one reference of the sequence; false when the entry cannot be.
static bool claim_entry(taking *t, uint32_t idx, uint32_t class_idx, uint32_t entry) {
    kv_cache *kv = t->kv;
    const kv_led_seq *s = &kv->seqs[idx];
    const kv_class *class = &kv->classes[class_idx];
    uint32_t slab = entry / kv->slab_units, unit = entry % kv->slab_units;
    if (slab >= kv->num_slabs || unit % class->units != 0 ||
        unit / class->units >= class->slab_blocks) {
        return false;
    }
    if (kv->slab_aux[slab].units == 0) {
        kv_slab_claim(kv, slab, class_idx);
        kv->lists->slabs.live++;
    }
    uint32_t *owner = &t->owners[(uint64_t)slab * kv->slab_blocks + unit / class->units];
    if (kv->slab_aux[slab].class_idx != class_idx || (*owner && *owner != s->model + 1)) {
        return false;
    }
    *owner = s->model + 1;
    kv->tenant_aux[s->tenant].blocks += kv_pool_claim(kv, entry);
    return true;
}

// give_up gives back the first num references of a sequence that turned out damaged.
static void give_up(taking *t, uint32_t idx, uint32_t num) {
    kv_cache *kv = t->kv;
    const kv_led_seq *s = &kv->seqs[idx];
    const kv_model_spec *spec = &kv->models[s->model].spec;
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        uint32_t n = kv_blocks_of(s->committed, spec->groups[g].block_tokens);
        for (uint32_t b = s->first[g]; b < n && num > 0; b++, num--) {
            kv_seq_give_block(kv, s->tenant, committed_entry(kv, idx, g, b, n));
        }
    }
}

// tables_good says whether the tables are those that the last commit left.
static bool tables_good(const kv_cache *kv, uint32_t idx) {
    const kv_led_seq *s = &kv->seqs[idx];
    const kv_model_spec *spec = &kv->models[s->model].spec;
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        uint32_t n = kv_blocks_of(s->committed, spec->groups[g].block_tokens);
        uint64_t sum = 0;
        for (uint32_t b = s->first[g]; n <= kv->opts.max_seq_blocks && b < n; b++) {
            sum += kv_sum_entry(b, committed_entry(kv, idx, g, b, n));
        }
        if (n > kv->opts.max_seq_blocks || s->first[g] > n || sum != s->table_sums[g] ||
            (s->first[g] > 0 && spec->groups[g].window_left < 0)) {
            return false;
        }
    }
    return true;
}

// claim takes all blocks of a sequence, or none and says false.
static bool claim(taking *t, uint32_t idx) {
    kv_cache *kv = t->kv;
    const kv_led_seq *s = &kv->seqs[idx];
    const kv_model_spec *spec = &kv->models[s->model].spec;
    uint32_t claimed = 0;
    if (!tables_good(kv, idx)) {
        return false;
    }
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        uint32_t n = kv_blocks_of(s->committed, spec->groups[g].block_tokens);
        uint32_t class_idx = kv->model_aux[s->model].classes[g];
        for (uint32_t b = s->first[g]; b < n; b++, claimed++) {
            if (!claim_entry(t, idx, class_idx, committed_entry(kv, idx, g, b, n))) {
                give_up(t, idx, claimed);
                return false;
            }
        }
    }
    return true;
}

static void drop_seq(taking *t, uint32_t idx) {
    t->found->lost_seqs++;
    kv_redo_begin(t->kv);
    kv_redo_put(t->kv, &t->kv->seqs[idx].state, KV_FREE);
    kv_redo_commit(t->kv);
}

// clear_behind stores that there are no blocks behind windows, if the process was killed before it
// did.
static void clear_behind(kv_cache *kv, uint32_t idx) {
    const kv_led_seq *s = &kv->seqs[idx];
    for (uint32_t g = 0; g < kv->models[s->model].spec.num_groups; g++) {
        uint32_t *table = kv_table(kv, idx, g);
        for (uint32_t b = s->first[g]; b-- > 0;) {
            if (table[b] != KV_NONE) {
                kv_store(&table[b], KV_NONE);
            }
        }
    }
}

// put_back puts the committed entries back into the tables, then says so.
static void put_back(kv_cache *kv, uint32_t idx) {
    const kv_led_seq *s = &kv->seqs[idx];
    const kv_model_spec *spec = &kv->models[s->model].spec;
    bool any = false;
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        uint32_t n = kv_blocks_of(s->committed, spec->groups[g].block_tokens);
        if (n > 0 && s->old_last[g] != KV_NONE) {
            kv_store(&kv_table(kv, idx, g)[n - 1], s->old_last[g]);
        }
        any |= s->old_last[g] != KV_NONE;
    }
    if (any) {
        kv_redo_begin(kv);
        for (uint32_t g = 0; g < KV_MAX_GROUPS; g++) {
            kv_redo_put(kv, &kv->seqs[idx].old_last[g], KV_NONE);
        }
        kv_redo_commit(kv);
    }
}

// take_seq takes over a sequence; false when it is to be dropped.
static bool take_seq(taking *t, uint32_t idx) {
    kv_cache *kv = t->kv;
    kv_led_seq *s = &kv->seqs[idx];
    uint32_t session = kv_session_find(kv, s->session);
    bool held = s->session != 0 && session != KV_NONE && kv->sessions[session].tenant == s->tenant;
    const kv_model_spec *spec = kv_model_get(kv, s->model);
    if (!spec || spec->tenant != s->tenant || (!held && !s->name[0]) || !claim(t, idx)) {
        return false;
    }
    clear_behind(kv, idx);
    put_back(kv, idx);
    if (!held && s->session != 0) {
        uint64_t ends =
            s->ttl_ms && s->ttl_ms < KV_NEVER - t->now_ms ? t->now_ms + s->ttl_ms : KV_NEVER;
        kv_redo_begin(kv);
        kv_redo_put64(kv, &s->session, 0);
        kv_redo_put64(kv, &s->expire_ms, ends);
        kv_redo_commit(kv);
    }
    kv->seq_aux[idx] = (kv_seq_aux){0};
    kv->model_aux[s->model].seqs++;
    if (held) {
        kv_seq_link(kv, idx);
    }
    if (s->name[0]) {
        kv_seq_link_name(kv, idx);
    }
    return true;
}

static void take_seqs(taking *t) {
    for (uint32_t i = 0; i < t->kv->lists->seqs.used; i++) {
        if (t->kv->seqs[i].state == KV_LIVE) {
            if (take_seq(t, i)) {
                t->found->seqs++;
            } else {
                drop_seq(t, i);
            }
        }
    }
}

// record_slabs makes the slabs' sizes what the sequences need: those of the others are unassigned.
static void record_slabs(kv_cache *kv) {
    for (uint32_t i = 0; i < kv->num_slabs; i++) {
        if (kv->slabs[i].units != kv->slab_aux[i].units) {
            kv_redo_begin(kv);
            kv_redo_put(kv, &kv->slabs[i].units, kv->slab_aux[i].units);
            kv_redo_commit(kv);
        }
    }
}

// ---- free lists

// free_slot puts a slot that is not live into the list of free ones, unless its generation is used
// up.
static void free_slot(kv_slots *slots, uint32_t *next, uint32_t i, uint32_t generation) {
    slots->live++;
    kv_slots_give_handle(slots, next, i, generation);
}

// The lowest index is handed out first, as by a cache that is new.
static void make_free_lists(kv_cache *kv) {
    kv_led_lists *l = kv->lists;
#define FREE_SLOTS(list, next, is_live, generation)       \
    for (uint32_t i = l->list.used; i-- > 0;) {           \
        if (is_live) {                                    \
            l->list.live++;                               \
        } else {                                          \
            free_slot(&l->list, kv->next, i, generation); \
        }                                                 \
    }
    l->slabs.live = l->slabs.freed = 0;
    FREE_SLOTS(models, model_next, kv->models[i].state == KV_LIVE, 0)
    FREE_SLOTS(slabs, slab_next, kv->slab_aux[i].units, 0)
    FREE_SLOTS(sessions, session_next, kv->sessions[i].state == KV_LIVE, kv->sessions[i].generation)
    FREE_SLOTS(steps, step_next, false, kv->steps[i].generation)
    FREE_SLOTS(seqs, seq_next, kv->seqs[i].state == KV_LIVE, kv->seqs[i].generation)
    FREE_SLOTS(nodes, node_next, kv->nodes[i].owner, kv->nodes[i].generation)
#undef FREE_SLOTS
}

// reset_derived makes the derived part zero and sets what of the arrays may hold something.
static attnd_err reset_derived(kv_cache *kv, attnd_errinfo *info) {
    off_t from = (off_t)((char *)kv->lists - (char *)kv->base);
    off_t bytes = (off_t)((char *)kv->node_ids - (char *)kv->lists);
    if (fallocate(kv->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, from, bytes) != 0) {
        return attnd_fail(info, ATTND_EIO, "ledger", "its lists cannot be emptied: %s",
                          strerror(errno));
    }
    kv_led_lists *l = kv->lists;
    kv_lists_init(kv);
#define USED(list, array) l->list.used = kv_used(kv, kv->array, l->list.cap, sizeof(*kv->array))
    USED(tenants, tenants);
    USED(models, models);
    USED(sessions, sessions);
    USED(steps, steps);
    USED(seqs, seqs);
    USED(nodes, nodes);
#undef USED
    while (l->tenants.used > 0 && !kv->tenants[l->tenants.used - 1].name[0]) {
        l->tenants.used--;
    }
    l->slabs.used = kv->num_slabs;
    return ATTND_OK;
}

static attnd_err take_over(kv_cache *kv, uint32_t *owners, uint64_t now_ms, kv_recovered *found,
                           attnd_errinfo *info) {
    taking t = {.kv = kv, .found = found, .owners = owners, .now_ms = now_ms};
    found->bad_record = !kv_redo_again(kv);
    attnd_err err = kv_repair(kv, found, info);
    if (!err) {
        err = reset_derived(kv, info);
    }
    if (err) {
        return err;
    }
    take_sessions(&t);
    abort_steps(&t);
    take_models(&t);
    take_seqs(&t);
    err = kv_regrow(kv, owners, found, info);
    if (err) {
        return err;
    }
    record_slabs(kv);
    make_free_lists(kv);
    for (uint32_t c = 0; c < kv->lists->classes.used; c++) {
        found->blocks += kv->classes[c].in_use;
    }
    return ATTND_OK;
}

attnd_err kv_recover(kv_cache **out, const kv_arena *arena, const kv_opts *opts, int fd,
                     uint64_t now_ms, kv_recovered *found, attnd_errinfo *info) {
    *found = (kv_recovered){0};
    attnd_err err = kv_opts_check(arena, opts, info);
    if (!err) {
        err = check_head(fd, arena, opts, info);
    }
    if (err) {
        return err;
    }
    kv_cache *kv = calloc(1, sizeof(*kv));
    if (!kv) {
        return attnd_fail(info, ATTND_ENOMEM, NULL, "no memory for a cache");
    }
    kv->arena = arena;
    kv->opts = *opts;
    uint32_t *owners = calloc(opts->max_blocks, sizeof(*owners));
    err = owners ? kv_ledger_open(kv, fd, info)
                 : attnd_fail(info, ATTND_ENOMEM, NULL, "no memory to recover a ledger");
    if (!err && (err = take_over(kv, owners, now_ms, found, info))) {
        kv->fd = -1; // stays the caller's
        kv_ledger_close(kv);
    }
    free(owners);
    if (err) {
        free(kv);
        return err;
    }
    *out = kv;
    return ATTND_OK;
}
