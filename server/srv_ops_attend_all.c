// attend_all: all layers of an open step, each when the client's stream raises its flag.
#include "server/srv_ops.h"

SRV_HANDLER(attend_all) {
    (void)core, (void)kept;
    attnd_errinfo info;
    attnd_fail(&info, ATTND_ENOTSUP, "op", "the connection has no region");
    srv_reply_error(rq, ATTND_ENOTSUP, &info);
}
