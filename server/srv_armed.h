// srv_armed is attend_alls: calls that run the layers of a step one after another, each when the
// client's stream raises its flag (proto_region.h).
//
//     start -> WAITING --flag--> in the scheduler -> WAITING ... -> last layer: reply, gone
//                 '--------failure---------'-> reply, DRAINING -> gone
//
// Whoever drives the loop looks at the flags: srv_armed_poll while it spins, as long as
// srv_armed_hot says so; srv_armed_tick every srv_armed_tick_us.  A call whose flag has not come
// for spin_us is cold: only the ticks look at it, and ever more rarely, so that calls that never
// become ready cost next to nothing.  The daemon waits on the device for a client for no longer
// than a gate does (attn_device.h), and only when it foresees the flag.
//
// A call that drains has no request, and its step may be gone.  Pool sized at start; loop thread
// only.
#ifndef ATTND_SERVER_SRV_ARMED_H
#define ATTND_SERVER_SRV_ARMED_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/proto_wire.h"
#include "server/srv_region.h"
#include "server/srv_request.h"

typedef struct srv_core srv_core; // srv_core.h

struct srv_armed {
    list_node node;        // in the set's free, hot or cold; not linked while its layer runs
    list_node region_node; // in region->calls
    srv_region *region;
    srv_request *rq; // NULL = drains
    uint64_t step;   // handle
    uint32_t first_layer, num_layers, first_flag;
    uint32_t at;   // layer that is waited for, or runs, counted from first_layer
    bool taken;    // its flag has come, but a layer that it reads has not ended yet
    bool at_flags; // the client waits there, though the region may have device pairs
    bool runs;
    bool canceled;             // the layer that runs is the last one
    const void *k, *v;         // of layers that append
    uint64_t event_us;         // when a flag came last, or the call began
    uint64_t queue_us, run_us; // of all layers
};

typedef struct srv_armed_info {
    uint32_t waiting, draining;     // now
    uint64_t calls, layers, failed; // since the start: begun, ended, failed
} srv_armed_info;

typedef struct srv_armed_set {
    srv_armed *pool; // [max]
    uint32_t max;
    list_node free, hot, cold;
    uint32_t running;  // calls whose layer is in the scheduler, or was begun ahead
    uint64_t begun_us; // when one was begun last
    uint64_t tickets;  // given out
    srv_armed *ahead;  // the call whose layer the backend may begin by itself, or has; NULL = none
    srv_armed_info info;
} srv_armed_set;

// ATTND_ENOMEM.  fini accepts one that is all zero.
attnd_err srv_armed_init(srv_armed_set *set, uint32_t max);
void srv_armed_fini(srv_armed_set *set);

// srv_armed_start begins a call whose request is read: rq->attend is filled in but for layer,
// signal and done, and has the reply.  ATTND_EBUSY: a pair belongs to another call, or too many
// run.
attnd_err srv_armed_start(srv_core *core, srv_request *rq, srv_region *region,
                          const proto_attend_all *body, attnd_errinfo *info);

// srv_armed_refuse has a call that was refused drain, if its pairs are there and free.
void srv_armed_refuse(srv_core *core, srv_region *region, const proto_attend_all *body,
                      attnd_err err);

// srv_armed_withdraw has no layer of the step begun but by the loop from now on, for an attend that
// comes beside its calls: what of it runs is marked as being attended.
void srv_armed_withdraw(srv_core *core, const srv_step *step);

// srv_armed_poll looks at the flags of hot calls; true when one had come.
bool srv_armed_poll(srv_core *core, uint64_t now_us);
// srv_armed_hot is true while the loop should go on looking without a pause: for the flags of hot
// calls, or for the end of a layer that was begun within spin_us.
bool srv_armed_hot(const srv_core *core);
// srv_armed_tick looks at all; true when a flag had come.  srv_armed_tick_us returns when it wants
// to be called next, 0 = never; polled: the loop looks at hot ones anyway.
bool srv_armed_tick(srv_core *core, uint64_t now_us);
uint64_t srv_armed_tick_us(const srv_core *core, uint64_t now_us, bool polled);

// srv_armed_forget ends the drains of a step, whose client will not touch the pairs any more; false
// when there is none.
bool srv_armed_forget(srv_core *core, srv_region *region, uint64_t step);

// srv_armed_abandon ends the drains of a region whose client is gone, and lets what still waits
// there end.
void srv_armed_abandon(srv_core *core, srv_region *region);

// srv_armed_ran is told that a layer has ended which the backend has begun by itself.
void srv_armed_ran(srv_core *core, uint64_t ticket, const sched_launch *launch);

// srv_armed_fail fails every call that waits, for a device that is lost.
void srv_armed_fail(srv_core *core, attnd_err err, const attnd_errinfo *info);

#endif
