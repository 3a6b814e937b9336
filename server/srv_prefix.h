// srv_prefix says for which tokens of a step the prefix cache is asked, and which it is told.
//
// A cached row must be what any sequence with the same tokens before it would have computed: at the
// default position, by a query that sees all that is before it and nothing else.  So token ids
// count only with default positions, and those of a tree only along a path that is a sequence: each
// row at the position that it lands on, seeing exactly the rows before it.  Loop thread only.
#ifndef ATTND_SERVER_SRV_PREFIX_H
#define ATTND_SERVER_SRV_PREFIX_H

#include "server/srv_core.h"

// srv_prefix_can says whether token ids of the model may come; ATTND_ENOTSUP.  Where there is no
// prefix cache they may come and are of no use.
attnd_err srv_prefix_can(const srv_core *core, const srv_model *model, attnd_errinfo *info);

// srv_prefix_look_up sets the tokens of kv_seqs that are to be looked up when the step opens.
void srv_prefix_look_up(const srv_core *core, srv_step *step);

// srv_prefix_ids fills in accepted_ids for the commit of accepted.  Those of a tree's path are
// moved together, as its rows are.
void srv_prefix_ids(srv_step *step);

#endif
