// srv_asked checks the packet by which a client asks for a ring (proto_ring.h, proto_region.h).
#ifndef ATTND_SERVER_SRV_ASKED_H
#define ATTND_SERVER_SRV_ASKED_H

#include <stddef.h>

#include "proto/proto_region.h"

// srv_asked is that packet; region is there when attach.flags says so.
typedef struct srv_asked {
    proto_attach attach;
    proto_region_ask region;
} srv_asked;

// srv_asked_check checks a packet of bytes, of which no more than sizeof(*in) are there.  EPROTO,
// EVERSION, EINVAL with the field.
attnd_err srv_asked_check(const srv_asked *in, size_t bytes, attnd_errinfo *info);

#endif
