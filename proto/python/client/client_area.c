// First fit over a list in order of offsets.  What is taken is as many places as requests are in
// flight, mostly a few, so that the walk is short.
#include "proto/client/client_area.h"

#include <stddef.h>

#include "proto/proto_ring.h"

void client_area_init(client_area *a, uint64_t bytes) {
    a->bytes = bytes;
    a->taken = a->idle = NULL;
    for (uint32_t i = 0; i < CLIENT_AREA_PLACES; i++) {
        a->places[i].next = a->idle;
        a->idle = &a->places[i];
    }
}

client_place *client_area_take(client_area *a, uint64_t bytes) {
    if (!a->idle || bytes > a->bytes) {
        return NULL;
    }
    uint64_t need = (bytes + PROTO_RING_ALIGN - 1) / PROTO_RING_ALIGN * PROTO_RING_ALIGN, off = 0;
    client_place **at = &a->taken;
    while (*at && (*at)->off - off < need) {
        off = (*at)->off + (*at)->bytes;
        at = &(*at)->next;
    }
    if (!*at && a->bytes - off < need) {
        return NULL;
    }
    client_place *place = a->idle;
    a->idle = place->next;
    *place = (client_place){off, need, 1, *at};
    *at = place;
    return place;
}

void client_area_hold(client_place *place) {
    place->refs++;
}

void client_area_give(client_area *a, client_place *place) {
    if (--place->refs > 0) {
        return;
    }
    client_place **at = &a->taken;
    while (*at != place) {
        at = &(*at)->next;
    }
    *at = place->next;
    place->next = a->idle;
    a->idle = place;
}
