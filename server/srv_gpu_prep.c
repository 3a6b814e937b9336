// The flag is read under the lock, too, so that it may be unmapped once forget has returned.
// Whoever exchanges it for 0 runs the layer: the submit thread here, or the loop (srv_region_take).
#include "server/srv_gpu_prep.h"

#include <stdlib.h>
#include <string.h>

attnd_err srv_gpu_prep_init(srv_gpu_prep *p, uint32_t max_rows) {
    *p = (srv_gpu_prep){.max_rows = max_rows};
    pthread_mutex_init(&p->lock, NULL);
    p->rows = calloc(max_rows, sizeof(*p->rows));
    return p->rows ? ATTND_OK : ATTND_ENOMEM;
}

void srv_gpu_prep_fini(srv_gpu_prep *p) {
    pthread_mutex_destroy(&p->lock);
    free(p->rows);
}

// ---- loop thread

bool srv_gpu_prep_want(srv_gpu_prep *p, const attn_params *params, uint64_t ticket,
                       const srv_ahead *ahead) {
    pthread_mutex_lock(&p->lock);
    bool is_free = p->state != SRV_GPU_PREP_READY && p->state != SRV_GPU_PREP_BEGUN &&
                   params->num_rows <= p->max_rows;
    if (is_free) {
        memcpy(p->rows, params->rows, params->num_rows * sizeof(*p->rows));
        p->params = *params;
        p->params.rows = p->rows;
        p->ticket = ticket;
        p->ahead = ahead ? *ahead : (srv_ahead){.flag = NULL};
        p->state = SRV_GPU_PREP_WANTED;
        __atomic_store_n(&p->wanted, 1, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&p->lock);
    return is_free;
}

bool srv_gpu_prep_forget(srv_gpu_prep *p, uint64_t ticket) {
    pthread_mutex_lock(&p->lock);
    bool is_late = p->state == SRV_GPU_PREP_BEGUN && p->ticket == ticket;
    if (!is_late && p->ticket == ticket) {
        p->ticket = 0;
        p->ahead.flag = NULL;
        p->state = p->state == SRV_GPU_PREP_WANTED ? SRV_GPU_PREP_NONE : p->state;
    }
    pthread_mutex_unlock(&p->lock);
    return is_late;
}

bool srv_gpu_prep_unwatch(srv_gpu_prep *p, uint64_t ticket) {
    pthread_mutex_lock(&p->lock);
    bool is_late = p->state == SRV_GPU_PREP_BEGUN && p->ticket == ticket;
    if (!is_late && p->ticket == ticket) {
        p->ahead.flag = NULL;
    }
    pthread_mutex_unlock(&p->lock);
    return is_late;
}

bool srv_gpu_prep_is_wanted(const srv_gpu_prep *p) {
    return __atomic_load_n(&p->wanted, __ATOMIC_RELAXED);
}

bool srv_gpu_prep_begun(const srv_gpu_prep *p, uint64_t ticket) {
    return ticket && __atomic_load_n(&p->begun, __ATOMIC_ACQUIRE) == ticket;
}

bool srv_gpu_prep_any_begun(const srv_gpu_prep *p) {
    return __atomic_load_n(&p->begun, __ATOMIC_RELAXED) != 0;
}

bool srv_gpu_prep_watched(const srv_gpu_prep *p, uint64_t ticket) {
    return ticket && __atomic_load_n(&p->watched, __ATOMIC_RELAXED) == ticket;
}

bool srv_gpu_prep_is_own(const srv_gpu_prep *p, const sched_launch *launch) {
    return launch == &p->launch;
}

void srv_gpu_prep_settle(srv_gpu_prep *p) {
    pthread_mutex_lock(&p->lock);
    p->state = SRV_GPU_PREP_NONE;
    p->ticket = 0;
    __atomic_store_n(&p->begun, 0, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&p->lock);
}

// ---- submit thread

bool srv_gpu_prep_fill(srv_gpu_prep *p, srv_stage *stage, const attn_device_ops *ops,
                       attn_device *device, uint32_t buffer, bool *watches) {
    srv_stage_cursor at = {0};
    srv_stage_limits limits = {.rows = UINT32_MAX, .queries = INT32_MAX};
    attnd_errinfo info;
    pthread_mutex_lock(&p->lock);
    __atomic_store_n(&p->wanted, 0, __ATOMIC_RELAXED);
    bool good = p->state == SRV_GPU_PREP_WANTED;
    if (good) {
        good = srv_stage_fill(stage, &p->params, &at, &limits) && at.row == p->params.num_rows;
        attn_params filled = srv_stage_params(stage, &p->params);
        good = good && !ops->plan(device, buffer, &filled, &p->choice, &info);
        p->state = good ? SRV_GPU_PREP_READY : SRV_GPU_PREP_NONE;
    }
    *watches = good && p->ahead.flag;
    pthread_mutex_unlock(&p->lock);
    return good;
}

void srv_gpu_prep_spoil(srv_gpu_prep *p) {
    pthread_mutex_lock(&p->lock);
    p->ticket = 0;
    p->ahead.flag = NULL;
    pthread_mutex_unlock(&p->lock);
}

void srv_gpu_prep_watch(srv_gpu_prep *p, bool on) {
    pthread_mutex_lock(&p->lock);
    __atomic_store_n(&p->watched, on && p->ahead.flag ? p->ticket : 0, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&p->lock);
}

static bool is_raised(const srv_gpu_prep *p) {
    return p->state == SRV_GPU_PREP_READY && p->ahead.flag &&
           __atomic_load_n(p->ahead.flag, __ATOMIC_ACQUIRE) &&
           __atomic_exchange_n(p->ahead.flag, 0, __ATOMIC_ACQ_REL);
}

static sched_launch *begin(srv_gpu_prep *p, bool gated) {
    p->state = SRV_GPU_PREP_BEGUN;
    p->launch = (sched_launch){.params = p->params,
                               .ticket = p->ticket,
                               .signals = &p->ahead.signal,
                               .num_signals = 1,
                               .gated = gated,
                               .prepared = true,
                               .choice = p->choice};
    __atomic_store_n(&p->begun, p->ticket, __ATOMIC_RELEASE);
    return &p->launch;
}

sched_launch *srv_gpu_prep_take(srv_gpu_prep *p) {
    if (pthread_mutex_trylock(&p->lock) != 0) {
        return NULL;
    }
    sched_launch *launch = is_raised(p) ? begin(p, false) : NULL;
    pthread_mutex_unlock(&p->lock);
    return launch;
}

bool srv_gpu_prep_follows(const srv_gpu_prep *p) {
    return p->ahead.follows;
}

bool srv_gpu_prep_has_gate(const srv_gpu_prep *p) {
    return p->ahead.has_pair && p->ahead.follows;
}

sched_launch *srv_gpu_prep_gate(srv_gpu_prep *p) {
    if (pthread_mutex_trylock(&p->lock) != 0) {
        return NULL;
    }
    bool is_it = p->state == SRV_GPU_PREP_READY && p->ahead.flag;
    sched_launch *launch = is_it ? begin(p, true) : NULL;
    pthread_mutex_unlock(&p->lock);
    return launch;
}

bool srv_gpu_prep_raised(const srv_gpu_prep *p) {
    return __atomic_load_n(p->ahead.flag, __ATOMIC_ACQUIRE) != 0;
}

bool srv_gpu_prep_consume(srv_gpu_prep *p) {
    return srv_gpu_prep_raised(p) && __atomic_exchange_n(p->ahead.flag, 0, __ATOMIC_ACQ_REL);
}

bool srv_gpu_prep_claim(srv_gpu_prep *p, srv_stage *stage, sched_launch *launch, bool *spoils) {
    pthread_mutex_lock(&p->lock);
    bool was_ready = p->state == SRV_GPU_PREP_READY;
    bool is_it = was_ready && p->ticket != 0 && p->ticket == launch->ticket &&
                 p->params.num_rows == launch->params.num_rows;
    for (uint32_t i = 0; is_it && i < stage->num_rows; i++) {
        stage->hosts[i].row = &launch->params.rows[i]; // the same, but the launch's own
    }
    if (is_it) {
        launch->choice = p->choice;
    }
    if (p->state != SRV_GPU_PREP_BEGUN) {
        p->state = SRV_GPU_PREP_NONE;
        p->ticket = 0;
    }
    pthread_mutex_unlock(&p->lock);
    *spoils = was_ready && !is_it;
    return is_it;
}
