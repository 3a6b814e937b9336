// client_area hands out places of a ring's data area: one for a message with the reply behind it,
// one for a caller's buffers.  The lowest that fits is taken, so that what is used again and again
// stays in the cache.  The caller locks.  No allocation.
#ifndef ATTND_PROTO_CLIENT_CLIENT_AREA_H
#define ATTND_PROTO_CLIENT_CLIENT_AREA_H

#include <stdint.h>

enum { CLIENT_AREA_PLACES = 256 }; // at a time

typedef struct client_place {
    uint64_t off, bytes;       // of the area; multiples of PROTO_RING_ALIGN
    uint32_t refs;             // 1 when taken; given back with the last one
    struct client_place *next; // the next higher one that is taken, or the next idle one
} client_place;

typedef struct client_area {
    uint64_t bytes;
    client_place *taken, *idle;
    client_place places[CLIENT_AREA_PLACES];
} client_area;

void client_area_init(client_area *a, uint64_t bytes);

// client_area_take returns a place of at least bytes, NULL when there is none.
client_place *client_area_take(client_area *a, uint64_t bytes);

// client_area_hold takes a reference more; client_area_give gives one back.
void client_area_hold(client_place *place);
void client_area_give(client_area *a, client_place *place);

#endif
