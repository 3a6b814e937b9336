// Masks are stacked on the step's memory and leave it together, with the last one that is in use:
// layers of a step mostly follow each other, so that is the next attend's end.
#include "server/srv_block_mask.h"

#include "server/srv_step.h"

static attnd_err no_room(const srv_core *core, const srv_step *step, attnd_errinfo *info) {
    return attnd_fail(info, step->num_masks ? ATTND_EBUSY : ATTND_EMSGSIZE, "block_mask_off",
                      "a step has %llu bytes for masks and the like%s",
                      (unsigned long long)core->conf.step_bytes,
                      step->num_masks ? ", and attends under way have masks there" : "");
}

// copy_from copies bytes that lie behind `behind` bytes at off.
static attnd_err copy_from(srv_core *core, const srv_request *rq, uint32_t off, size_t fixed,
                           uint64_t behind, uint64_t bytes, uint32_t **out, attnd_errinfo *info) {
    const void *all;
    attnd_err err =
        proto_array(rq->msg, "block_mask_off", off, behind + bytes, 1, fixed, &all, info);
    if (err) {
        return err;
    }
    *out = srv_step_alloc(core, rq->attend.step, bytes);
    if (!*out) {
        return no_room(core, rq->attend.step, info);
    }
    proto_copy(*out, (const uint8_t *)all + behind, bytes);
    return ATTND_OK;
}

static attnd_err read_mask(srv_core *core, srv_request *rq, uint32_t off, size_t fixed,
                           attn_block_mask **masks, attnd_errinfo *info) {
    srv_step *step = rq->attend.step;
    const void *at;
    proto_block_mask head;
    uint32_t *start = NULL, *kv_blocks = NULL;
    attnd_err err = proto_array(rq->msg, "block_mask_off", off, 1, sizeof(head), fixed, &at, info);
    if (err) {
        return err;
    }
    proto_copy(&head, at, sizeof(head));
    if (head.num_query_blocks > step->rows) {
        return attnd_fail(info, ATTND_EINVAL, "block_mask_off", "%u query blocks for %u rows",
                          head.num_query_blocks, step->rows);
    }
    uint64_t behind = sizeof(head), bytes = (head.num_query_blocks + 1ull) * sizeof(*start);
    err = copy_from(core, rq, off, fixed, behind, bytes, &start, info);
    if (!err) {
        behind += bytes;
        bytes = (uint64_t)start[head.num_query_blocks] * sizeof(*kv_blocks);
        err = copy_from(core, rq, off, fixed, behind, bytes, &kv_blocks, info);
    }
    if (!err) {
        *masks = srv_step_alloc(core, step, step->num_seqs * sizeof(**masks));
        err = *masks ? attn_mask_cut(step->seqs, step->num_seqs, head.q_block,
                                     head.num_query_blocks, start, kv_blocks, *masks, info)
                     : no_room(core, step, info);
    }
    return err;
}

attnd_err srv_block_mask_read(srv_core *core, srv_request *rq, uint32_t off, size_t fixed,
                              attnd_errinfo *info) {
    srv_step *step = rq->attend.step;
    size_t mark = step->memory_used;
    attn_block_mask *masks = NULL;
    attnd_err err = read_mask(core, rq, off, fixed, &masks, info);
    if (err) {
        step->memory_used = mark;
        return err;
    }
    if (step->num_masks++ == 0) {
        step->masks_mark = mark;
    }
    rq->attend.masks = masks;
    return ATTND_OK;
}

void srv_block_mask_drop(srv_request *rq) {
    srv_step *step = rq->attend.step;
    if (rq->attend.masks) {
        rq->attend.masks = NULL;
        if (--step->num_masks == 0) {
            step->memory_used = step->masks_mark;
        }
    }
}
