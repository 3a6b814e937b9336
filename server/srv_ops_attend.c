// attend: one layer of an open step.
#include "server/srv_attend.h"
#include "server/srv_ops.h"

static void done(srv_request *rq, attnd_err err, proto_attend_reply *reply,
                 const attnd_errinfo *info) {
    (void)reply;
    if (err) {
        srv_reply_error(rq, err, info);
    } else {
        srv_reply_end(rq);
    }
}

static attnd_err read_attend(srv_core *core, srv_request *rq, proto_attend *body, srv_step **step,
                             attnd_errinfo *info) {
    attnd_err err = proto_read(rq->msg, body, sizeof(*body), false, info);
    if (!err) {
        err = proto_check_zero(body->reserved, "reserved", info);
    }
    if (err) {
        return err;
    }
    *step = srv_step_find(core, rq->session, body->step);
    if (!*step) {
        return attnd_fail(info, ATTND_ESTALE, "step", "the step is not open");
    }
    if ((*step)->in_process) {
        return attnd_fail(info, ATTND_EINVAL, "step", "the step is attended in the client");
    }
    if ((*step)->state == SRV_STEP_COMMITTING) {
        return attnd_fail(info, ATTND_EBUSY, "step", "a commit of the step is under way");
    }
    return ATTND_OK;
}

SRV_HANDLER(attend) {
    (void)kept;
    proto_attend body;
    srv_step *step = NULL;
    attnd_errinfo info;
    attnd_err err = read_attend(core, rq, &body, &step, &info);
    if (err) {
        srv_reply_error(rq, err, &info);
        return;
    }
    srv_attend(core, rq, step,
               &(srv_attend_ask){.layer = body.layer,
                                 .flags = body.flags,
                                 .q = &body.q,
                                 .k = &body.k,
                                 .v = &body.v,
                                 .fixed = sizeof(body),
                                 .block_mask_off = body.block_mask_off,
                                 .done = done});
}
