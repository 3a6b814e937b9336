// Calls that wait for flags.
//
// Which list a call is in says who looks at its flag:
//
//     hot    srv_armed_poll and ticks   something came within spin_us
//     cold   ticks                      every TICK_US while younger than IDLE_US, then IDLE_TICK_US
//     none   nobody                     its layer is in the scheduler
//
// A call that is alone (no other is hot, or runs) has its next layer prepared while it waits, and
// the backend may begin that by itself when the flag comes, or shortly before (if it then does not
// come, the layer is `missed`, and waited for as before): what the loop, the scheduler and their
// ways to the submit thread take would otherwise lie between the client's kernels and ours.  The
// loop hears of it later, at the next look or when it has ended; where it matters, it asks.  With
// several calls at work, layers go to the scheduler, which batches them.
//
// A failure answers the layer that was taken from the client's stream, unless its done flag is on
// its way from the device already, and turns the call into a drain, which is the same loop over
// flags with nothing between ready and done.
#include "server/srv_armed.h"

#include <stdlib.h>

#include "proto/clock.h"
#include "server/srv_attend.h"
#include "server/srv_block_mask.h"
#include "server/srv_core.h"

enum {
    TICK_US = 50,
    IDLE_US = 100 * 1000,
    IDLE_TICK_US = 1000,
};

attnd_err srv_armed_init(srv_armed_set *set, uint32_t max) {
    set->max = max;
    set->pool = calloc(max, sizeof(*set->pool));
    if (!set->pool) {
        return ATTND_ENOMEM;
    }
    list_init(&set->free);
    list_init(&set->hot);
    list_init(&set->cold);
    for (uint32_t i = 0; i < max; i++) {
        list_append(&set->free, &set->pool[i].node);
    }
    return ATTND_OK;
}

void srv_armed_fini(srv_armed_set *set) {
    free(set->pool);
    *set = (srv_armed_set){.max = 0};
}

static srv_armed *call_of(list_node *node) {
    return LIST_ENTRY(node, srv_armed, node);
}

static srv_armed *in_region(list_node *node) {
    return LIST_ENTRY(node, srv_armed, region_node);
}

static uint32_t pair_of(const srv_armed *a) {
    return a->first_flag + a->at;
}

// await has the call's next flag looked at from now on.
static void await(srv_core *core, srv_armed *a) {
    a->event_us = attnd_clock_us();
    list_append(&core->armed.hot, &a->node);
    core->hooks->stir(core->hooks->ctx);
}

// set_layer makes the current layer the request's.
static void set_layer(srv_armed *a) {
    srv_attend_state *state = &a->rq->attend;
    state->layer = a->first_layer + a->at;
    bool appends = srv_attend_appends(state->step, state->layer);
    state->tensors.k = appends ? a->k : NULL;
    state->tensors.v = appends ? a->v : NULL;
    state->signal = srv_region_signal(a->region, pair_of(a), a->at_flags);
}

static void leave_list(srv_armed *a) {
    if (list_linked(&a->node)) {
        list_remove(&a->node);
    }
}

// drop gives the call back.
static void drop(srv_core *core, srv_armed *a) {
    leave_list(a);
    list_remove(&a->region_node);
    a->region->num_calls--;
    list_append(&core->armed.free, &a->node);
}

// drop_drain ends a drain.
static void drop_drain(srv_core *core, srv_armed *a) {
    core->armed.info.draining--;
    drop(core, a);
}

// ---- ends

// answer sets the done flag of the current layer, whose ready flag is taken, and goes on to the
// next.
static void answer(srv_armed *a) {
    srv_region_answer(a->region, pair_of(a));
    a->at++;
}

// take_rq takes the request off the call, which is to be answered.
static srv_request *take_rq(srv_core *core, srv_armed *a) {
    srv_request *rq = a->rq;
    bool is_late = srv_attend_forget(core, rq);
    ATTND_ASSERT(!is_late);
    core->armed.ahead = core->armed.ahead == a ? NULL : core->armed.ahead;
    rq->cancel = NULL;
    srv_block_mask_drop(rq);
    rq->attend.step->armed--;
    rq->attend.armed = NULL;
    a->rq = NULL;
    core->armed.info.waiting--;
    return rq;
}

// name_error is what the reply says: the first layer whose outputs are not there.
static attnd_errinfo name_error(const srv_armed *a, attnd_err err, const attnd_errinfo *info) {
    attnd_errinfo named = {.code = ATTND_OK};
    if (info) {
        named = *info;
    }
    if (named.code != err) {
        attnd_fail(&named, err, "", "%s", attnd_strerror(err));
    }
    if (!named.detail) { // that of ECUDA is CUDA's
        uint32_t last = a->num_layers - 1;
        named.detail = (int32_t)(a->first_layer + (a->at < last ? a->at : last));
    }
    return named;
}

// fail answers the request, and drains.
static void fail(srv_core *core, srv_armed *a, attnd_err err, const attnd_errinfo *info) {
    bool came = a->runs || a->taken, computed = a->runs && a->rq->sched.signaled;
    a->at += computed;
    attnd_errinfo named = name_error(a, err, info);
    core->armed.info.failed++;
    core->armed.info.draining++;
    srv_region_tell(a->region, err, a->step);
    if (came && !computed) {
        answer(a);
    }
    a->runs = a->taken = false;
    srv_request *rq = take_rq(core, a);
    leave_list(a);
    if (a->at == a->num_layers || a->region->abandoned) {
        drop_drain(core, a);
    } else {
        await(core, a);
    }
    srv_reply_error(rq, err, &named);
}

static void succeed(srv_core *core, srv_armed *a) {
    srv_request *rq = take_rq(core, a);
    rq->attend.reply->queue_us = srv_attend_cut_us(a->queue_us);
    rq->attend.reply->run_us = srv_attend_cut_us(a->run_us);
    drop(core, a);
    srv_reply_end(rq);
}

static void ran(srv_request *rq, attnd_err err, proto_attend_reply *reply,
                const attnd_errinfo *info);

static attnd_err why_canceled(const srv_core *core, const srv_step *step) {
    if (step->deadline_ms && step->deadline_ms <= attnd_clock_ms()) {
        return ATTND_ETIMEDOUT;
    }
    return core->draining ? ATTND_ESHUTDOWN : ATTND_ECANCELED;
}

// begin takes the call off its list: its layer runs.
static void begin(srv_core *core, srv_armed *a) {
    list_remove(&a->node);
    a->runs = true;
    a->taken = false;
    core->armed.running++;
    core->armed.begun_us = attnd_clock_us();
    a->rq->cancel = NULL;
    a->rq->attend.done = ran;
}

static void cancel_begun(srv_request *rq) {
    rq->attend.armed->canceled = true;
}

// begin_ahead is begin for a layer that the backend has begun by itself.
static void begin_ahead(srv_core *core, srv_armed *a) {
    begin(core, a);
    srv_attend_began(a->rq);
    a->rq->cancel = cancel_begun;
}

// notice finds out whether the backend has begun a layer by itself.
static void notice(srv_core *core) {
    srv_armed *a = core->armed.ahead;
    const srv_backend *b = core->backend;
    if (a && !a->runs && b->ops->begun && b->ops->begun(b, a->rq->attend.ticket)) {
        begin_ahead(core, a);
    }
}

// is_late is true for a call that can only be ended when its layer has: the backend runs it.
static bool is_late(srv_core *core, const srv_armed *a) {
    bool late = core->armed.ahead == a && srv_attend_forget(core, a->rq);
    if (late) {
        notice(core);
    }
    return late;
}

static void cancel_waiting(srv_request *rq) {
    srv_core *core = rq->session->core;
    srv_armed *a = rq->attend.armed;
    a->canceled = is_late(core, a);
    if (!a->canceled) {
        fail(core, a, why_canceled(core, rq->attend.step), NULL);
    }
}

// ---- layers

// prepare has the layer of a call that is alone prepared, in the place of another's that is cold.
// It does not notice that the backend runs that one: somebody may be walking the cold list.
static void prepare(srv_core *core, srv_armed *a) {
    srv_armed_set *set = &core->armed;
    if (set->ahead && srv_attend_forget(core, set->ahead->rq)) {
        return;
    }
    set->ahead = a;
    srv_ahead ahead = {.flag = srv_region_ready(a->region, pair_of(a)),
                       .signal = a->rq->attend.signal,
                       .follows = a->at > 0,
                       .has_pair = a->region->pairs_off && !a->at_flags && !a->region->distrusted};
    srv_attend_prepare(core, a->rq, ++set->tickets, &ahead);
}

// await_layer has a call that lives go on to its current layer.
static void await_layer(srv_core *core, srv_armed *a) {
    const srv_armed_set *set = &core->armed;
    set_layer(a);
    await(core, a);
    if (set->running == 0 && set->hot.next == set->hot.prev) {
        prepare(core, a);
    }
}

// missed has a call go on that waits for its flag, though the backend had begun its layer; or fail,
// and drain from that flag on.  A pair without its flag has held up the submit thread, and so
// everybody's work: its client does it once.
static void missed(srv_core *core, srv_armed *a, const sched_launch *launch) {
    srv_step *step = a->rq->attend.step;
    a->rq->attend.ticket = 0;
    if (a->runs) {
        core->armed.running--;
        a->runs = false;
        srv_attend_missed(a->rq);
    } else {
        leave_list(a);
    }
    if (launch->err) {
        a->region->distrusted |= launch->err == ATTND_EPROTO;
        fail(core, a, launch->err, &launch->info);
    } else if (a->canceled || step->state != SRV_STEP_OPEN) {
        fail(core, a, why_canceled(core, step), NULL);
    } else {
        a->rq->cancel = cancel_waiting;
        await_layer(core, a);
    }
    srv_step_settle(core, step);
}

// ran is told that the layer has left the scheduler.
static void ran(srv_request *rq, attnd_err err, proto_attend_reply *reply,
                const attnd_errinfo *info) {
    (void)reply;
    srv_core *core = rq->session->core;
    srv_armed *a = rq->attend.armed;
    core->armed.running--;
    core->armed.info.layers++;
    srv_attend_forget(core, rq); // if the launch never began
    a->queue_us += rq->sched.queue_us;
    a->run_us += rq->sched.run_us;
    if (!err && (a->canceled || rq->attend.step->state != SRV_STEP_OPEN)) {
        err = why_canceled(core, rq->attend.step);
    }
    if (err) {
        fail(core, a, err, info);
        return;
    }
    a->runs = false;
    if (rq->sched.signaled) {
        a->at++;
    } else { // it had no rows
        answer(a);
    }
    if (a->at == a->num_layers) {
        succeed(core, a);
    } else {
        rq->cancel = cancel_waiting;
        await_layer(core, a);
    }
}

// run_layer hands the current layer to the scheduler.
static void run_layer(srv_core *core, srv_armed *a) {
    begin(core, a);
    srv_attend_layer(core, a->rq);
}

// drain answers every flag that is raised.
static void drain(srv_core *core, srv_armed *a) {
    do {
        answer(a);
    } while (a->at < a->num_layers && srv_region_take(a->region, pair_of(a)));
    if (a->at == a->num_layers) {
        drop_drain(core, a);
    } else {
        list_remove(&a->node);
        await(core, a);
    }
}

// is_watched is true while the backend looks at the call's flag, which is then left to it.
static bool is_watched(const srv_core *core, const srv_armed *a) {
    const srv_backend *b = core->backend;
    return core->armed.ahead == a && b->ops->watches && b->ops->watches(b, a->rq->attend.ticket);
}

// withdraw has the backend begin no layer of the step by itself any more; false when it has begun
// one, of which the loop has not heard.
static bool withdraw(srv_core *core, const srv_step *step) {
    const srv_armed *a = core->armed.ahead;
    const srv_backend *b = core->backend;
    if (!a || a->runs || a->rq->attend.step != step) {
        return true;
    }
    if (b->ops->unwatch && b->ops->unwatch(core->backend, a->rq->attend.ticket)) {
        return false;
    }
    core->armed.ahead = NULL;
    return true;
}

void srv_armed_withdraw(srv_core *core, const srv_step *step) {
    if (!withdraw(core, step)) {
        notice(core);
    }
}

// look is true when the call's flag had come.  The device sets a done flag before the loop hears of
// the launch's end, so a layer that reads another's K and V may be raised too early for us.  For
// the same reason no flag is taken that the backend may have taken before: if it has, the layer may
// have ended already, and what is raised then is the next call's.  Nor does a layer run beside one
// of its step that the loop has not heard of.
static bool look(srv_core *core, srv_armed *a) {
    if (!a->taken && (is_watched(core, a) || !srv_region_raised(a->region, pair_of(a)))) {
        return false;
    }
    if (a->rq && !withdraw(core, a->rq->attend.step)) {
        return true; // notice is next
    }
    if (!a->taken && !srv_region_take(a->region, pair_of(a))) {
        return false;
    }
    if (!a->rq) {
        drain(core, a);
        return true;
    }
    a->taken = srv_attend_must_wait(a->rq->attend.step, a->first_layer + a->at);
    if (!a->taken) {
        run_layer(core, a);
    }
    return true;
}

// Every call of the list is looked at once: what comes of a look may take that one out or append
// it, and answer requests, never touch another call.
static bool look_at_all(srv_core *core, list_node *list) {
    bool any = false;
    notice(core);
    const list_node *last = list->prev;
    for (list_node *node = list->next, *next; node != list; node = next) {
        bool is_last = node == last;
        next = node->next;
        any = look(core, call_of(node)) || any;
        if (is_last) {
            break;
        }
    }
    return any;
}

// ---- polling

bool srv_armed_poll(srv_core *core, uint64_t now_us) {
    srv_armed_set *set = &core->armed;
    if (list_empty(&set->hot)) {
        return false;
    }
    bool any = look_at_all(core, &set->hot);
    LIST_FOREACH (&set->hot, node) {
        srv_armed *a = call_of(node);
        if (now_us > a->event_us && now_us - a->event_us > core->conf.flag_spin_us) {
            list_remove(node);
            list_append(&set->cold, node);
        }
    }
    return any;
}

// A loop that sleeps hears of a layer's end late: waking a processor that was idle for a while
// takes tens of microseconds, and the client waits for the next layer.
bool srv_armed_hot(const srv_core *core) {
    const srv_armed_set *set = &core->armed;
    return !list_empty(&set->hot) ||
           (set->running > 0 && attnd_clock_us() - set->begun_us < core->conf.flag_spin_us);
}

bool srv_armed_tick(srv_core *core, uint64_t now_us) {
    bool any = srv_armed_poll(core, now_us);
    return look_at_all(core, &core->armed.cold) || any;
}

uint64_t srv_armed_tick_us(const srv_core *core, uint64_t now_us, bool polled) {
    const srv_armed_set *set = &core->armed;
    if (!polled && !list_empty(&set->hot)) {
        return TICK_US;
    }
    if (list_empty(&set->cold)) {
        return 0;
    }
    // A call becomes cold behind those that have been so for longer.
    const srv_armed *last = call_of(set->cold.prev);
    return now_us - last->event_us < IDLE_US ? TICK_US : IDLE_TICK_US;
}

// ---- begin and end

// check_pairs: no pair of the call is another's.
static attnd_err check_pairs(const srv_region *region, const proto_attend_all *body,
                             attnd_errinfo *info) {
    uint64_t end = (uint64_t)body->first_flag + body->num_layers;
    if (end > region->num_flags) {
        return attnd_fail(info, ATTND_EINVAL, "first_flag", "%u flags from %u on, of %u",
                          body->num_layers, body->first_flag, region->num_flags);
    }
    LIST_FOREACH (&region->calls, node) {
        const srv_armed *a = in_region(node);
        if (body->first_flag < a->first_flag + a->num_layers && a->first_flag < end) {
            return attnd_fail(info, ATTND_EBUSY, "first_flag",
                              "the flags are those of a call that %s", a->rq ? "runs" : "drains");
        }
    }
    return ATTND_OK;
}

// make takes a call from the pool.
static attnd_err make(srv_core *core, srv_region *region, const proto_attend_all *body,
                      srv_armed **out, attnd_errinfo *info) {
    attnd_err err = check_pairs(region, body, info);
    list_node *node = list_first(&core->armed.free);
    if (!err && (region->num_calls == PROTO_REGION_MAX_CALLS || !node)) {
        err = attnd_fail(info, ATTND_EBUSY, "", "%u attend_alls of the region are under way",
                         region->num_calls);
    }
    if (err) {
        return err;
    }
    list_remove(node);
    srv_armed *a = call_of(node);
    *a = (srv_armed){.region = region,
                     .step = body->step,
                     .first_layer = body->first_layer,
                     .num_layers = body->num_layers,
                     .first_flag = body->first_flag,
                     .at_flags = (body->flags & PROTO_ATTEND_AT_FLAGS) != 0};
    list_append(&region->calls, &a->region_node);
    region->num_calls++;
    *out = a;
    return ATTND_OK;
}

attnd_err srv_armed_start(srv_core *core, srv_request *rq, srv_region *region,
                          const proto_attend_all *body, attnd_errinfo *info) {
    srv_armed *a;
    attnd_err err = make(core, region, body, &a, info);
    if (err) {
        return err;
    }
    a->rq = rq;
    a->k = rq->attend.tensors.k;
    a->v = rq->attend.tensors.v;
    core->armed.info.calls++;
    core->armed.info.waiting++;
    rq->attend.armed = a;
    rq->attend.step->armed++;
    rq->cancel = cancel_waiting;
    await_layer(core, a);
    return ATTND_OK;
}

void srv_armed_refuse(srv_core *core, srv_region *region, const proto_attend_all *body,
                      attnd_err err) {
    srv_armed *a;
    attnd_errinfo info;
    if (body->num_layers > 0 && !make(core, region, body, &a, &info)) {
        core->armed.info.draining++;
        srv_region_tell(region, err, body->step);
        await(core, a);
    }
}

bool srv_armed_forget(srv_core *core, srv_region *region, uint64_t step) {
    bool any = false;
    LIST_FOREACH (&region->calls, node) {
        srv_armed *a = in_region(node);
        if (a->rq || a->step != step) {
            continue;
        }
        any = true;
        for (; a->at < a->num_layers; a->at++) {
            srv_region_reset(region, pair_of(a));
        }
        drop_drain(core, a);
    }
    return any;
}

void srv_armed_abandon(srv_core *core, srv_region *region) {
    srv_region_abandon(region);
    LIST_FOREACH (&region->calls, node) {
        srv_armed *a = in_region(node);
        if (!a->rq) {
            drop_drain(core, a);
        }
    }
}

void srv_armed_ran(srv_core *core, uint64_t ticket, const sched_launch *launch) {
    srv_armed *a = core->armed.ahead;
    ATTND_ASSERT(a && a->rq->attend.ticket == ticket);
    if (launch->missed) {
        core->armed.ahead = NULL;
        missed(core, a, launch);
        return;
    }
    if (!a->runs) {
        begin_ahead(core, a);
    }
    core->armed.ahead = NULL;
    srv_attend_ended(core, a->rq, launch);
}

void srv_armed_fail(srv_core *core, attnd_err err, const attnd_errinfo *info) {
    for (uint32_t i = 0; i < core->armed.max; i++) {
        srv_armed *a = &core->armed.pool[i];
        if (a->rq && !a->runs && !is_late(core, a)) {
            fail(core, a, err, info);
        }
    }
}
