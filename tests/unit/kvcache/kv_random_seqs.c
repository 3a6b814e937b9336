// The random run: requests, sequences, sessions and tenants.
#include "tests/unit/kvcache/kv_random.h"

// ---- requests

kv_request request(int session) {
    naive_session *s = &n.sessions[session];
    uint64_t id = s->highest + 1 + below(3);
    if (chance(20) && s->highest > 64) { // one that was skipped, if there is one
        uint64_t old = s->highest - below(65);
        id = s->replies[old % NAIVE_REQUESTS].request == old ? id : old;
    }
    return (kv_request){.session = s->handle, .request = chance(5) ? 0 : id};
}

void answered(int session, kv_request rq, kv_op kind, uint64_t id, const uint32_t *values,
              uint32_t num_values) {
    naive_session *s = &n.sessions[session];
    came.done++;
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

void op_reply(int session) {
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
attnd_err rights(int session, int seq, bool needs_idle) {
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

const char *name_text(int name) {
    static char text[NAIVE_NAMES][16];
    if (name < 0) {
        return "";
    }
    snprintf(text[name], sizeof(text[name]), "n%d", name);
    return text[name];
}

// ---- sequences

void op_create(int session) {
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

void op_fork(int session) {
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

void op_truncate(int session) {
    int seq = pick_seq(session);
    if (seq < 0) {
        return;
    }
    kv_request rq = request(session);
    uint32_t len = below(n.seqs[seq].len + 2);
    attnd_err want = rights(session, seq, true);
    want = want ? want : len > n.seqs[seq].len ? ATTND_EINVAL : ATTND_OK;
    if (!want && len > 0 && len < n.seqs[seq].len && !naive_sees(&n, (uint32_t)seq, len)) {
        want = ATTND_ENOTSUP;
        came.unseen++;
    }
    CHECK_ERR(kv_seq_truncate(kv, rq, n.seqs[seq].handle, len, &info), want);
    if (want == ATTND_OK) {
        naive_truncate(&n, (uint32_t)seq, len);
        answered(session, rq, KV_OP_TRUNCATE, n.seqs[seq].handle, NULL, 0);
    }
}

void op_free(int session) {
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

void op_keep(int session) {
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

void op_attach(int session) {
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

void op_expire(int session) {
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

// ---- sessions and tenants

void open_session(int slot) {
    naive_session *s = &n.sessions[slot];
    uint32_t tenant = below(NAIVE_TENANTS);
    const uint8_t secret[KV_SECRET_BYTES] = {0};
    memset(s, 0, sizeof(*s));
    *s = (naive_session){.live = true, .tenant = tenant};
    CHECK_ERR(kv_session_open(kv, tenants[tenant], secret, &s->handle), ATTND_OK);
}

void op_close(int session) {
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
    came.closed++;
}

void op_quota(int session) {
    (void)session;
    static const char *const names[NAIVE_TENANTS] = {"t0", "t1"};
    uint32_t t = below(NAIVE_TENANTS);
    n.quota[t] = chance(50) ? 0 : 20 + below(80);
    uint32_t again;
    CHECK_ERR(kv_tenant_set(kv, names[t], n.quota[t], &again), ATTND_OK);
    CHECK(again == tenants[t]);
    CHECK_ERR(kv_tenant_cache(kv, t, below(3) * 10, below(4)), ATTND_OK);
}
