// srv_block_mask reads the block mask of an attend (proto_block_mask) into the step's memory, where
// it stays until the attend has ended.  Loop thread only.
#ifndef ATTND_SERVER_SRV_BLOCK_MASK_H
#define ATTND_SERVER_SRV_BLOCK_MASK_H

#include "server/srv_core.h"

// srv_block_mask_read copies the mask at off, behind fixed bytes of the body, and sets
// rq->attend.masks, of which srv_block_mask_drop takes care; rq->attend.step is set.  Which KV
// blocks it lists is attn_check's to look at.  ATTND_EPROTO: it is not all there; ATTND_EINVAL: its
// query blocks are not those of the step; ATTND_EMSGSIZE: the step's memory is too small,
// ATTND_EBUSY: masks of attends under way have taken it.
attnd_err srv_block_mask_read(srv_core *core, srv_request *rq, uint32_t off, size_t fixed,
                              attnd_errinfo *info);

// srv_block_mask_drop gives it back; an attend without one is left alone.
void srv_block_mask_drop(srv_request *rq);

#endif
