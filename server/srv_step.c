// The life of a step: its place in the pool, waiting for blocks, and its end.
//
// A step ends under whatever still runs: nothing new is let in (its state is ENDING), what is
// queued is canceled, and when the last of its launches has ended the cache gets the blocks back.
// So no kernel ever reads or writes a block that is somebody else's already.
#include "server/srv_step.h"

#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"
#include "proto/log.h"
#include "server/srv_core.h"
#include "server/srv_prefix.h"

attnd_err srv_steps_init(srv_steps *t, uint32_t max, uint32_t max_seqs, size_t memory_bytes) {
    t->max = max;
    t->memory_bytes = (memory_bytes + 7) / 8 * 8;
    list_init(&t->free);
    size_t num_seqs = (size_t)max * max_seqs;
    t->pool = calloc(max, sizeof(*t->pool));
    t->by_index = calloc(max, sizeof(*t->by_index));
    t->kv_seqs = calloc(num_seqs, sizeof(*t->kv_seqs));
    t->seqs = calloc(num_seqs, sizeof(*t->seqs));
    t->active = calloc(num_seqs, sizeof(*t->active));
    t->ids = calloc(num_seqs, sizeof(*t->ids));
    t->accepted_ids = calloc(num_seqs, sizeof(*t->accepted_ids));
    t->memory = calloc(max, t->memory_bytes);
    if (!t->pool || !t->by_index || !t->kv_seqs || !t->seqs || !t->active || !t->ids ||
        !t->accepted_ids || !t->memory) {
        return ATTND_ENOMEM;
    }
    for (uint32_t i = 0; i < max; i++) {
        srv_step *step = &t->pool[i];
        step->kv_seqs = t->kv_seqs + (size_t)i * max_seqs;
        step->seqs = t->seqs + (size_t)i * max_seqs;
        step->active = t->active + (size_t)i * max_seqs;
        step->ids = t->ids + (size_t)i * max_seqs;
        step->accepted_ids = t->accepted_ids + (size_t)i * max_seqs;
        step->memory = t->memory + i * t->memory_bytes;
        list_append(&t->free, &step->node);
    }
    return ATTND_OK;
}

void srv_steps_fini(srv_steps *t) {
    free(t->pool);
    free(t->by_index);
    free(t->kv_seqs);
    free(t->seqs);
    free(t->active);
    free(t->ids);
    free(t->accepted_ids);
    free(t->memory);
}

attnd_err srv_step_take(srv_core *core, srv_session *session, uint32_t num_seqs, srv_step **out,
                        attnd_errinfo *info) {
    if (session->num_steps >= core->conf.session_steps) {
        return attnd_fail(info, ATTND_EBUSY, "", "the client has %u steps open or waiting",
                          session->num_steps);
    }
    list_node *node = list_first(&core->steps.free);
    if (!node) {
        return attnd_fail(info, ATTND_EBUSY, "", "all steps are taken");
    }
    list_remove(node);
    srv_step *step = LIST_ENTRY(node, srv_step, node);
    srv_step fresh = {
        .state = SRV_STEP_OPENING,
        .session = session,
        .num_seqs = num_seqs,
        .kv_seqs = step->kv_seqs,
        .seqs = step->seqs,
        .active = step->active,
        .ids = step->ids,
        .accepted_ids = step->accepted_ids,
        .memory = step->memory,
    };
    *step = fresh;
    memset(step->kv_seqs, 0, num_seqs * sizeof(*step->kv_seqs));
    memset(step->seqs, 0, num_seqs * sizeof(*step->seqs));
    memset(step->ids, 0, num_seqs * sizeof(*step->ids));
    list_init(&step->cancels);
    list_append(&session->steps, &step->node);
    core->steps.num_open++;
    session->num_steps++;
    *out = step;
    return ATTND_OK;
}

void *srv_step_alloc(srv_core *core, srv_step *step, size_t bytes) {
    size_t room = core->steps.memory_bytes - step->memory_used;
    if (bytes > room || (bytes + 7) / 8 * 8 > room) {
        return NULL;
    }
    void *p = step->memory + step->memory_used;
    step->memory_used += (bytes + 7) / 8 * 8;
    return p;
}

void srv_step_release(srv_core *core, srv_step *step) {
    srv_session *session = step->session;
    ATTND_ASSERT(step->running == 0);
    if (step->handle) {
        core->steps.by_index[(uint32_t)step->handle] = NULL;
    }
    step->state = SRV_STEP_FREE;
    step->handle = 0;
    list_remove(&step->node);
    list_append(&core->steps.free, &step->node);
    core->steps.num_open--;
    session->num_steps--;
    if (list_empty(&step->cancels)) {
        srv_session_settle(session);
    }
    for (list_node *node; (node = list_first(&step->cancels));) { // the last reply settles it
        list_remove(node);
        srv_reply_empty(LIST_ENTRY(node, srv_request, wait_node));
    }
}

// ---- opening

// lay_out says which rows of the tensors are whose, once the cached lengths are known.
static void lay_out(srv_step *step) {
    for (uint32_t i = 0; i < step->num_seqs; i++) {
        const kv_step_seq *kv = &step->kv_seqs[i];
        attn_seq *s = &step->seqs[i];
        attn_seq_place(s, kv->committed, kv->new_len, kv->cached, &step->rows, &step->new_rows);
        if (s->rows) {
            step->active[step->num_active++] = i;
        }
    }
}

// waits_for_tiers says whether the step would wait for blocks that are copied from or to a tier;
// when that is over it is tried again without.
static bool waits_for_tiers(srv_step *step) {
    srv_core *core = step->session->core;
    uint64_t now = attnd_clock_ms(), until = now + core->conf.tier_wait_ms;
    if (!step->deadline_ms) {
        return false;
    }
    if (!step->tiers_ms) {
        step->tiers_ms = until < step->deadline_ms ? until : step->deadline_ms;
    }
    return now < step->tiers_ms;
}

// place tries to take the step's blocks.
static attnd_err place(sched_waiter *w, sched_lack *lack, attnd_errinfo *info) {
    srv_step *step = w->user;
    srv_core *core = step->session->core;
    bool for_tiers = waits_for_tiers(step), may_wait = for_tiers;
    int32_t pid = 0;
    if (srv_processes_before(core->processes, &pid)) {
        *lack = SCHED_LACK_POOL;
        return attnd_fail(info, ATTND_ENOSPC, "",
                          "process %d may still write to blocks of before the restart", (int)pid);
    }
    srv_prefix_look_up(core, step);
    attnd_err err = kv_step_open(core->kv, (kv_request){step->session->id, step->kept_id},
                                 step->model_idx, step->kv_seqs, step->num_seqs, &step->handle,
                                 &step->copies, &step->num_copies, &may_wait, info);
    if (err == ATTND_ENOSPC && may_wait) {
        if (for_tiers) {
            core->hooks->rearm(core->hooks->ctx, step->tiers_ms);
        }
        *lack = strcmp(info->field, "tenant") == 0 ? SCHED_LACK_QUOTA : SCHED_LACK_POOL;
    }
    return err;
}

static void placed(srv_core *core, srv_step *step, attnd_err err, const attnd_errinfo *info) {
    step->request->cancel = NULL;
    if (err) {
        step->handle = 0;
        step->opened(step, err, info);
        srv_step_release(core, step);
        return;
    }
    uint32_t idx = (uint32_t)step->handle;
    ATTND_ASSERT(idx < core->steps.max && !core->steps.by_index[idx]);
    core->steps.by_index[idx] = step;
    lay_out(step);
    step->opened(step, ATTND_OK, info);
}

static void waited(sched_waiter *w, attnd_err err, const attnd_errinfo *info) {
    srv_step *step = w->user;
    srv_core *core = step->session->core;
    if (err == ATTND_ECANCELED && core->draining) {
        err = ATTND_ESHUTDOWN;
    }
    placed(core, step, err, info);
}

static void cancel_waiting(srv_request *rq) {
    sched_wait_cancel(rq->session->core->wait, &rq->attend.step->waiter);
}

void srv_step_open(srv_core *core, srv_step *step) {
    step->request->attend.step = step;
    step->waiter = (sched_waiter){
        .tenant = step->session->tenant,
        .deadline_ms = step->deadline_ms,
        .place = place,
        .done = waited,
        .user = step,
    };
    bool waits = false;
    attnd_errinfo info = {.code = ATTND_OK};
    attnd_err err = sched_wait_enter(core->wait, &step->waiter, &waits, &info);
    if (waits) {
        step->request->cancel = cancel_waiting;
        core->hooks->rearm(core->hooks->ctx, step->deadline_ms);
    } else {
        placed(core, step, err, &info);
    }
}

srv_step *srv_step_find_late(const srv_core *core, const srv_session *session, uint64_t handle) {
    uint32_t idx = (uint32_t)handle;
    srv_step *step = idx < core->steps.max ? core->steps.by_index[idx] : NULL;
    bool found = step && step->handle == handle && step->session == session && !step->once &&
                 (step->state == SRV_STEP_OPEN || step->state == SRV_STEP_COMMITTING ||
                  step->state == SRV_STEP_LATE);
    return found ? step : NULL;
}

srv_step *srv_step_find(const srv_core *core, const srv_session *session, uint64_t handle) {
    srv_step *step = srv_step_find_late(core, session, handle);
    return step && step->state != SRV_STEP_LATE ? step : NULL;
}

// ---- ending

void srv_step_settle(srv_core *core, srv_step *step) {
    if (step->state != SRV_STEP_ENDING || step->running) {
        return;
    }
    attnd_err err = kv_step_abort(core->kv, (kv_request){step->session->id, 0}, step->handle);
    ATTND_ASSERT(!err);
    srv_step_release(core, step);
    srv_core_freed(core);
}

void srv_step_done(srv_core *core, srv_step *step) {
    ATTND_ASSERT(step->running > 0);
    step->running--;
    srv_step_settle(core, step);
}

// cancel_attend takes one attend of the step out of the scheduler; false when there is none left.
static bool cancel_attend(srv_step *step) {
    LIST_FOREACH (&step->session->requests, node) {
        srv_request *rq = LIST_ENTRY(node, srv_request, node);
        if (rq->attend.step == step && rq->cancel) {
            void (*cancel)(srv_request *) = rq->cancel;
            rq->cancel = NULL;
            cancel(rq);
            return true;
        }
    }
    return false;
}

void srv_step_end(srv_core *core, srv_step *step) {
    if (step->state == SRV_STEP_ENDING) {
        return;
    }
    step->state = SRV_STEP_ENDING;
    if (!step->handle) { // it waits for blocks, or for the commit that it carries
        cancel_attend(step);
        return;
    }
    step->running++; // so that it outlives the loop
    while (cancel_attend(step)) {
    }
    srv_step_done(core, step);
}

// expire ends a step; one that is attended in another process cannot be ended under it.
static void expire(srv_core *core, srv_step *step) {
    bool is_late = step->in_process;
    attnd_log_some(&core->steps.late, ATTND_LOG_INFO, "step",
                   "%llx of session %llx is past its deadline: %s",
                   (unsigned long long)step->handle, (unsigned long long)step->session->name,
                   is_late ? "its blocks are held until its client is done with them" : "aborted");
    if (is_late) {
        step->state = SRV_STEP_LATE;
    } else {
        srv_step_end(core, step);
    }
}

// A decode or prefill ends with its attend, whose deadline the scheduler knows.
uint64_t srv_steps_expire(srv_core *core, uint64_t now_ms) {
    uint64_t next = UINT64_MAX;
    for (uint32_t i = 0; i < core->steps.max; i++) {
        srv_step *step = &core->steps.pool[i];
        if (step->state != SRV_STEP_OPEN || !step->deadline_ms || step->once) {
            continue;
        }
        if (step->deadline_ms <= now_ms) {
            expire(core, step);
        } else if (step->deadline_ms < next) {
            next = step->deadline_ms;
        }
    }
    return next;
}
