// The queue of requests with rows.
//
//     active tenants -> tenant -> lanes -> lane (one KV shape) -> decodes:  oldest, ..., newest
//                                                              -> prefills: oldest, ..., newest
//
// Only what holds requests is linked: a tenant while it has a lane, a lane while it has a request.
// So there are never more lanes than requests, they come from a pool of max_queued, and any number
// of shapes is served.  A decision looks at the active tenants and their lanes, not at requests.
//
// Fair share is start-time fair queueing (Goyal, Vin, Cheng 1996): a tenant's virtual time grows by
// cost / weight of what it was given, and the least virtual time is served first, of equal ones who
// was served longest ago.  The clock of the queue is the least virtual time of the active tenants;
// one that becomes active starts no earlier, so idle time is no credit.  Nor is spare capacity a
// debt without end: who joined the launches of others while there was room is at most MAX_LEAD of
// the largest charges ahead of the clock.
//
// Limits: a lead looks at all lanes; each follower costs a look at each active tenant's virtual
// time and at no more than SCHED_LOOK_AHEAD requests that do not fit.
#include "scheduler/sched_queue.h"

#include <stdlib.h>

typedef struct lane {
    list_node node; // in its tenant's lanes, else in free_lanes
    const attn_shape *shape;
    list_node reqs[SCHED_NUM_KINDS]; // oldest first
} lane;

typedef struct tenant {
    list_node node; // in active while it has lanes, who was served longest ago first
    list_node lanes;
    uint64_t vtime;     // sum of cost * COST_UNIT / weight
    uint64_t launch_no; // has nothing more for that launch
    uint32_t weight;
} tenant;

struct sched_queue {
    list_node active;
    list_node free_lanes;
    uint64_t clock;          // least vtime of the active tenants when one was served last
    uint64_t largest_charge; // of one request
    uint32_t waiting[SCHED_NUM_KINDS];
    uint32_t max_tenants;
    tenant *tenants;
    lane *lanes;
};

// A charge is at most MAX_COST * COST_UNIT = 2^46 and a launch makes at most SCHED_MAX_QUEUED =
// 2^16 of them.  The clock is set back when it passes 2^62, so no virtual time passes 2^62 + 2^62 +
// lead.
#define COST_UNIT ((uint64_t)SCHED_MAX_SHARE)
#define MAX_COST  (1ull << 32) // such as 4096 queries on a million keys
#define MAX_CLOCK (1ull << 62)
#define MAX_LEAD  8
#define NO_LAUNCH UINT64_MAX

attnd_err sched_queue_create(sched_queue **out, uint32_t max_tenants, uint32_t max_queued) {
    sched_queue *q = calloc(1, sizeof(*q));
    if (!q) {
        return ATTND_ENOMEM;
    }
    q->max_tenants = max_tenants;
    q->tenants = calloc(max_tenants, sizeof(*q->tenants));
    q->lanes = calloc(max_queued, sizeof(*q->lanes));
    if (!q->tenants || !q->lanes) {
        sched_queue_free(q);
        return ATTND_ENOMEM;
    }
    list_init(&q->active);
    list_init(&q->free_lanes);
    for (uint32_t i = 0; i < max_tenants; i++) {
        list_init(&q->tenants[i].lanes);
        q->tenants[i].weight = 1;
    }
    for (uint32_t i = 0; i < max_queued; i++) {
        list_append(&q->free_lanes, &q->lanes[i].node);
    }
    *out = q;
    return ATTND_OK;
}

void sched_queue_free(sched_queue *q) {
    if (!q) {
        return;
    }
    free(q->tenants);
    free(q->lanes);
    free(q);
}

void sched_queue_set_weight(sched_queue *q, uint32_t tenant_idx, uint32_t weight) {
    ATTND_ASSERT(tenant_idx < q->max_tenants && weight >= 1 && weight <= SCHED_MAX_SHARE);
    q->tenants[tenant_idx].weight = weight;
}

static lane *find_lane(const tenant *t, const attn_shape *shape) {
    LIST_FOREACH (&t->lanes, node) {
        lane *l = LIST_ENTRY(node, lane, node);
        if (l->shape == shape) {
            return l;
        }
    }
    return NULL;
}

static lane *take_lane(sched_queue *q, tenant *t, const attn_shape *shape) {
    list_node *node = list_first(&q->free_lanes);
    ATTND_ASSERT(node != NULL);
    lane *l = LIST_ENTRY(node, lane, node);
    list_remove(node);
    l->shape = shape;
    for (int kind = 0; kind < SCHED_NUM_KINDS; kind++) {
        list_init(&l->reqs[kind]);
    }
    if (list_empty(&t->lanes)) {
        t->vtime = t->vtime > q->clock ? t->vtime : q->clock;
        list_append(&q->active, &t->node);
    }
    list_append(&t->lanes, node);
    return l;
}

void sched_queue_push(sched_queue *q, sched_req *req) {
    ATTND_ASSERT(req->tenant < q->max_tenants);
    tenant *t = &q->tenants[req->tenant];
    lane *l = find_lane(t, req->shape);
    if (!l) {
        l = take_lane(q, t, req->shape);
    }
    list_append(&l->reqs[req->kind], &req->node);
    q->waiting[req->kind]++;
}

void sched_queue_remove(sched_queue *q, sched_req *req) {
    tenant *t = &q->tenants[req->tenant];
    lane *l = find_lane(t, req->shape);
    list_remove(&req->node);
    q->waiting[req->kind]--;
    if (!list_empty(&l->reqs[SCHED_DECODE]) || !list_empty(&l->reqs[SCHED_PREFILL])) {
        return;
    }
    list_remove(&l->node);
    list_append(&q->free_lanes, &l->node);
    if (list_empty(&t->lanes)) {
        list_remove(&t->node);
    }
}

uint32_t sched_queue_waiting(const sched_queue *q, sched_kind kind) {
    return q->waiting[kind];
}

// oldest returns a tenant's oldest request of a kind over all shapes, NULL when there is none.
static sched_req *oldest(const tenant *t, sched_kind kind) {
    sched_req *best = NULL;
    LIST_FOREACH (&t->lanes, node) {
        list_node *first = list_first(&LIST_ENTRY(node, lane, node)->reqs[kind]);
        sched_req *req = first ? LIST_ENTRY(first, sched_req, node) : NULL;
        if (req && (!best || req->seqno < best->seqno)) {
            best = req;
        }
    }
    return best;
}

static sched_req *oldest_prefill(const sched_queue *q) {
    sched_req *best = NULL;
    LIST_FOREACH (&q->active, node) {
        sched_req *req = oldest(LIST_ENTRY(node, tenant, node), SCHED_PREFILL);
        if (req && (!best || req->seqno < best->seqno)) {
            best = req;
        }
    }
    return best;
}

// set_clock moves the clock to the least virtual time of the active tenants, and who is too far
// ahead of it back to MAX_LEAD.
static void set_clock(sched_queue *q) {
    uint64_t least = UINT64_MAX;
    LIST_FOREACH (&q->active, node) {
        const tenant *t = LIST_ENTRY(node, tenant, node);
        least = t->vtime < least ? t->vtime : least;
    }
    uint64_t most = least + MAX_LEAD * q->largest_charge;
    LIST_FOREACH (&q->active, node) {
        tenant *t = LIST_ENTRY(node, tenant, node);
        t->vtime = t->vtime < most ? t->vtime : most;
    }
    q->clock = least;
}

// set_back takes the clock off every virtual time; what lags behind it (idle tenants) starts at 0.
static void set_back(sched_queue *q) {
    for (uint32_t i = 0; i < q->max_tenants; i++) {
        tenant *t = &q->tenants[i];
        t->vtime = t->vtime > q->clock ? t->vtime - q->clock : 0;
    }
    q->clock = 0;
}

// least_served returns the active tenant of the least virtual time that may have something for the
// launch, NULL when there is none.
static tenant *least_served(const sched_queue *q, uint64_t launch_no) {
    tenant *best = NULL;
    LIST_FOREACH (&q->active, node) {
        tenant *t = LIST_ENTRY(node, tenant, node);
        if (t->launch_no != launch_no && (!best || t->vtime < best->vtime)) {
            best = t;
        }
    }
    return best;
}

sched_req *sched_queue_lead(const sched_queue *q, bool prefill_first) {
    if (list_empty(&q->active)) {
        return NULL;
    }
    if (prefill_first && q->waiting[SCHED_PREFILL] > 0) {
        return oldest_prefill(q);
    }
    const tenant *t = least_served(q, NO_LAUNCH);
    sched_req *req = oldest(t, SCHED_DECODE);
    return req ? req : oldest(t, SCHED_PREFILL);
}

void sched_queue_advance(sched_queue *q) {
    set_clock(q);
    if (q->clock >= MAX_CLOCK) {
        set_back(q);
    }
}

// next_in_lane returns the lane's oldest request that fits, looking past at most SCHED_LOOK_AHEAD
// that do not, and past none that was passed SCHED_MAX_PASSES times.
static sched_req *next_in_lane(const lane *l, const sched_follow *f) {
    uint32_t looked = 0;
    LIST_FOREACH (&l->reqs[f->kind], node) {
        sched_req *req = LIST_ENTRY(node, sched_req, node);
        if (req->launch_no == f->launch_no) {
            continue;
        }
        if (f->fits(f->ctx, req)) {
            return req;
        }
        if (req->passed >= SCHED_MAX_PASSES || ++looked > SCHED_LOOK_AHEAD) {
            return NULL;
        }
    }
    return NULL;
}

// count_passes notes that the requests before req in its lane were passed.
static void count_passes(const lane *l, const sched_follow *f, const sched_req *req) {
    for (list_node *node = l->reqs[f->kind].next; node != &req->node; node = node->next) {
        sched_req *before = LIST_ENTRY(node, sched_req, node);
        before->passed += before->launch_no != f->launch_no;
    }
}

sched_req *sched_queue_follow(sched_queue *q, const sched_follow *f) {
    for (tenant *t = least_served(q, f->launch_no); t; t = least_served(q, f->launch_no)) {
        const lane *l = find_lane(t, f->shape);
        sched_req *req = l ? next_in_lane(l, f) : NULL;
        if (req) {
            count_passes(l, f, req);
            return req;
        }
        t->launch_no = f->launch_no; // room only shrinks: it will have nothing later either
    }
    return NULL;
}

void sched_queue_charge(sched_queue *q, uint32_t tenant_idx, uint64_t cost) {
    tenant *t = &q->tenants[tenant_idx];
    uint64_t charge = (cost < MAX_COST ? cost : MAX_COST) * COST_UNIT / t->weight;
    t->vtime += charge;
    q->largest_charge = charge > q->largest_charge ? charge : q->largest_charge;
    if (list_linked(&t->node)) {
        list_remove(&t->node);
        list_append(&q->active, &t->node);
    }
}

static void lane_each(lane *l, void (*fn)(void *ctx, sched_req *req), void *ctx) {
    for (int kind = 0; kind < SCHED_NUM_KINDS; kind++) {
        LIST_FOREACH (&l->reqs[kind], node) {
            fn(ctx, LIST_ENTRY(node, sched_req, node));
        }
    }
}

void sched_queue_each(sched_queue *q, void (*fn)(void *ctx, sched_req *req), void *ctx) {
    LIST_FOREACH (&q->active, t_node) {
        const tenant *t = LIST_ENTRY(t_node, tenant, node);
        LIST_FOREACH (&t->lanes, l_node) {
            lane_each(LIST_ENTRY(l_node, lane, node), fn, ctx);
        }
    }
}
