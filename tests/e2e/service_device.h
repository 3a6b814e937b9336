// service_device is the client's device in tests of service mode: memory and streams of a GPU
// (service_device_cuda.c), or of the host, where a thread is a stream (service_device_host.c) and a
// region is shared memory.  So one test tells of both.  Checks inside are Check assertions.
//
// Not before fork in a process that forks: neither CUDA nor threads survive that.
#ifndef ATTND_TESTS_E2E_SERVICE_DEVICE_H
#define ATTND_TESTS_E2E_SERVICE_DEVICE_H

#include <stdbool.h>
#include <stddef.h>

#include "proto/client/attnd_engine.h"

const attnd_engine *service_engine(void);

// service_use makes a device current, of a GPU; the one whose number is in ATTND_E2E_CLIENT_DEVICE
// (0).
void service_use(void);

void *service_alloc(size_t bytes);
void service_free(void *p);

// A stream's work is done in order.  service_copy copies between any two places, host's included,
// which must stay until it has.  service_pause takes ms.  service_sync returns whether all has
// ended within ms.
typedef struct service_stream service_stream;
service_stream *service_stream_create(void);
void service_stream_free(service_stream *s); // idle
void service_copy(service_stream *s, void *to, const void *from, size_t bytes);
void service_pause(service_stream *s, int ms);
bool service_sync(service_stream *s, int ms);

// Between begin and end the stream's work is kept in a graph instead, which can be launched any
// number of times.
typedef struct service_graph service_graph;
void service_capture(service_stream *s);
service_graph *service_end(service_stream *s);
void service_launch(service_graph *g, service_stream *s);
void service_graph_free(service_graph *g);

#endif
