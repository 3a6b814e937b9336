// service_client is the smallest client of a region (proto_region.h), for tests, over a daemon
// whose device is host memory (tests/device): it maps the region, and plays the client's stream
// with loads and stores of the host's.  One thread.
//
// With ATTND_FAKE_MPS in the environment it is one that shares the device through MPS, and has
// pairs there.
#ifndef ATTND_TESTS_E2E_SERVICE_CLIENT_H
#define ATTND_TESTS_E2E_SERVICE_CLIENT_H

#include "proto/proto_region.h"
#include "tests/e2e/play.h"
#include "tests/e2e/ring_client.h"

enum { SERVICE_RING_BYTES = 1 << 18, SERVICE_WAIT_MS = 20000 };

typedef struct service_client {
    ring_client ring;
    proto_region given;
    uint8_t *region; // [given.bytes]
    proto_flags *head;
    proto_flag *pairs; // [given.num_flags], in the flags
    proto_flag *there; // the same on the device; NULL = none
    uint64_t id;       // of the last request over the ring
} service_client;

// service_ask connects and asks for a ring and a region; attach and region may hold anything.
// The status, or ATTND_ECONN.
attnd_err service_ask(service_client *c, const char *path, const proto_attach *attach,
                      const proto_region_ask *region);

// service_open is the same for good values, with a session of its own, which has said hello; or,
// with a client that has a session over NNG, in that.
void service_open(service_client *c, const char *path, uint64_t bytes, uint32_t num_flags);
void service_join(service_client *c, const char *path, const char *hello_reply, uint64_t bytes,
                  uint32_t num_flags);
void service_close(service_client *c);

// service_send submits an attend_all, or bytes of anything, without waiting for the reply.
uint64_t service_send(service_client *c, const void *body, size_t bytes);
// service_recv waits for a reply; *reply (may be NULL) points at its body.  ATTND_ECONN.
attnd_err service_recv(service_client *c, const void **reply);

// The stream: raise stores ready = 1; lower waits for done, wherever it comes, and stores 0, false
// when it does not come within ms; ready tells whether the daemon has not taken it yet.
void service_raise(service_client *c, uint32_t pair);
bool service_lower(service_client *c, uint32_t pair, int ms);
bool service_ready(const service_client *c, uint32_t pair);

// service_layout places the tensors of a step behind each other from off on, and returns the
// attend_all of all its layers, whose pairs begin at first_flag.
proto_attend_all service_layout(const play_step *s, uint64_t off, uint32_t first_flag);
// service_write copies tensors there; service_check compares out and lse with the reference.
void service_write(service_client *c, const play_step *s, const proto_attend_all *all,
                   const play_tensors *t);
void service_check(service_client *c, const play_step *s, const proto_attend_all *all,
                   uint32_t layer, const play_tensors *t);
// service_layers plays the stream of a call that was sent, for layers [from, to), and checks.
void service_layers(service_client *c, const play_step *s, const proto_attend_all *all,
                    uint32_t from, uint32_t to);

#endif
