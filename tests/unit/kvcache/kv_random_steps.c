// The random run: steps, and the bytes of rows.
#include "tests/unit/kvcache/kv_random.h"

// value_of makes the value of a token from that of the one before it and its id.
static uint32_t value_of(uint32_t before, uint32_t id) {
    uint64_t h = ((uint64_t)before << 32 | id) + UINT64_C(0x9e3779b97f4a7c15);
    h = (h ^ h >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    h = (h ^ h >> 27) * UINT64_C(0x94d049bb133111eb);
    return (uint32_t)(h ^ h >> 31);
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
        uint32_t first = naive_found(&n, &st->seqs[i], g) * spec->groups[g].block_tokens;
        for (uint32_t t = first > s->len ? first - s->len : 0; t < st->seqs[i].cached; t++) {
            CHECK(rows_right(spec, g, memory, table, s->len + t, st->seqs[i].tokens[t]));
        }
    }
}

// check_rows checks the committed tokens of sequence i of a step.
void check_rows(const naive_step *st, uint32_t i) {
    const naive_seq *s = &n.seqs[st->seqs[i].seq];
    const kv_model_spec *spec = kv_model_get(kv, n.models[s->model].index);
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        uint32_t entries;
        const uint32_t *table = kv_step_table(kv, st->handle, i, g, &entries);
        for (uint32_t b = 0; b < s->first[g]; b++) {
            CHECK(table[b] == KV_NONE);
        }
        for (uint32_t t = s->first[g] * spec->groups[g].block_tokens; t < s->len; t++) {
            CHECK(rows_right(spec, g, memory, table, t, s->tokens[t]));
        }
    }
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

// most_behind returns how many blocks of those that a step needs lie behind windows, at most, if
// all that can be found is.
static uint32_t most_behind(const naive_step *st) {
    uint32_t most = 0;
    for (uint32_t i = 0; i < st->num_seqs; i++) {
        const naive_seq *s = &n.seqs[st->seqs[i].seq];
        const naive_model *m = &n.models[s->model];
        for (uint32_t g = 0; st->seqs[i].with_ids && g < m->num_groups; g++) {
            uint32_t have = naive_blocks(s->len, m->block_tokens[g]);
            uint32_t first = naive_first(m, g, s->len + st->seqs[i].new_len);
            most += first > have ? first - have : 0;
        }
    }
    return most;
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
    uint32_t behind = most_behind(st);
    bool never = (quota > 0 && all_held + total > quota + behind) || least > SLABS + behind;
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
    if (n.models[s->model].window[0] >= 0) {
        return 0; // what others gave back may be gone
    }
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
        for (uint32_t b = have; b < naive_found(&n, in, g); b++) {
            CHECK(table[b] == KV_NONE);
            came.behind++;
        }
        for (uint32_t b = naive_found(&n, in, g); b < have + num; b++) {
            in->blocks[g][b] = number_of(m, g, table[b]);
            came.found_blocks++;
        }
        for (uint32_t c = 0; c < num_copies && in->cached % m->block_tokens[g]; c++) {
            if (copies[c].group == g && copies[c].dst == table[have + num]) {
                in->copied[g] = number_of(m, g, copies[c].src) + 1;
                came.found_rows += copies[c].num_tokens;
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
            for (uint32_t b = s->first[g]; b < entries; b++) {
                if (table[b] != KV_NONE) {
                    n.entry[in->blocks[g][b]] = table[b];
                }
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
            in->new_len = read ? 0 : below((room < 16 ? room : 16) + 1);
            make_tokens(in, read);
            in->q_len = read && chance(50) ? below(2 * NAIVE_MAX_LEN) : 0;
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

void op_open(int session) {
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
                                .q_len = in->q_len,
                                .tokens = in->with_ids ? in->ids : NULL};
    }
    kv_request rq = request(session);
    bool may_wait = false;
    const kv_copy *copies;
    uint32_t num_copies;
    attnd_err want = expect_room(st, n.sessions[session].tenant, false, ATTND_OK);
    for (uint32_t i = 0; i < st->num_seqs; i++) {
        const naive_step_seq *in = &st->seqs[i];
        if (in->q_len && !naive_sees(&n, in->seq, (int64_t)n.seqs[in->seq].len - in->q_len)) {
            want = ATTND_ENOTSUP;
        }
    }
    attnd_err err = kv_step_open(kv, rq, n.models[model].index, seqs, st->num_seqs, &st->handle,
                                 &copies, &num_copies, &may_wait, &info);
    CHECK(err == want || (want == ATTND_ENOSPC && err == ATTND_OK)); // some made way, or were found
    if (err == ATTND_ENOTSUP) {
        came.unseen++;
    } else if (err == ATTND_OK) {
        ATTND_CK_OK(kv_copy_run(kv, copies, num_copies, NULL));
        came.copied += num_copies;
        opened(st, slot, session, rq, seqs, copies, num_copies);
    } else {
        expect_room(st, n.sessions[session].tenant, may_wait, err);
        came.refused++;
        came.waits += may_wait;
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
    came.moved += num;
    return num_path;
}

void op_commit(int session) {
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

void abort_step(int slot, kv_request rq) {
    naive_step *st = &n.steps[slot];
    CHECK_ERR(kv_step_abort(kv, rq, st->handle), ATTND_OK);
    naive_end(&n, slot, NULL, NULL);
    CHECK_ERR(kv_step_abort(kv, (kv_request){0}, st->handle), ATTND_ESTALE);
}

void op_abort(int session) {
    int slot = pick_step(session);
    naive_step *st = &n.steps[slot];
    if (st->live && st->session == session) {
        kv_request rq = request(session);
        abort_step(slot, rq);
        answered(session, rq, KV_OP_ABORT, st->handle, NULL, 0);
    }
}
