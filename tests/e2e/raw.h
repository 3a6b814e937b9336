// raw is a client without NNG: it speaks SP over a stream socket by hand, so that it can stop
// reading, break frames, and lie about lengths.
#ifndef ATTND_TESTS_E2E_RAW_H
#define ATTND_TESTS_E2E_RAW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct raw_client {
    int fd;
    uint32_t sp_id; // of the last request
} raw_client;

// raw_connect connects to a path; raw_open also exchanges SP's greeting as a REQ peer.
void raw_connect(raw_client *c, const char *path);
void raw_open(raw_client *c, const char *path);
void raw_close(raw_client *c);

// raw_write writes bytes as they are; false when the peer has closed.
bool raw_write(raw_client *c, const void *data, size_t bytes);

// raw_send sends a message as a request; false when the peer has closed, or, with wait_ms, took
// nothing for so long.
bool raw_send(raw_client *c, const void *msg, size_t bytes, int wait_ms);

// raw_send_part sends a request's frame and only the first `part` bytes of its message; raw_read
// reads what there is, at most bytes; 0 or less when the peer has closed.
void raw_send_part(raw_client *c, const void *msg, size_t bytes, size_t part);
ssize_t raw_read(raw_client *c, void *out, size_t bytes);

// raw_recv reads the next reply, whatever it answers: *msg [*bytes] without SP's part, which the
// caller frees.  False when the peer has closed.
bool raw_recv(raw_client *c, uint8_t **msg, size_t *bytes);

// raw_closed is true when the peer closes within ms; what it sends before is dropped.
bool raw_closed(raw_client *c, int ms);

#endif
