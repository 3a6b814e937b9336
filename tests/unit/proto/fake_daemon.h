// fake_daemon answers a client under test over a real socket with whatever bytes a test likes.  It
// answers hello and model_open well by itself, unless the test wants to.
#ifndef ATTND_TESTS_FAKE_DAEMON_H
#define ATTND_TESTS_FAKE_DAEMON_H

#include "proto/proto_msg.h"

typedef struct fake_daemon fake_daemon;

enum {
    FAKE_REPLY_BYTES = 4096,
    FAKE_THREADS = 8,
    FAKE_IN_FLIGHT = 64, // what its hello allows
    FAKE_MODEL = 3,      // what its model_open answers
};
// What a handler may return instead of a length.
#define FAKE_SILENT  ((size_t)-1) // never answer
#define FAKE_HANG_UP ((size_t)-2) // close the connection
#define FAKE_DEFAULT ((size_t)-3) // hello and model_open: as a good daemon

// fake_handler writes a reply (header included) to request, whose header is h, and returns its
// length.  Called by FAKE_THREADS threads at the same time.
typedef size_t fake_handler(proto_view request, const proto_header *h, uint8_t *reply);

// fake_daemon_start listens on a fresh path; all_ops: the handler gets hello and model_open too.
fake_daemon *fake_daemon_start(fake_handler *handler, int all_ops);
const char *fake_daemon_url(const fake_daemon *f);
void fake_daemon_stop(fake_daemon *f);

// fake_num_pipes returns how many connections there ever were.
int fake_num_pipes(fake_daemon *f);

// fake_json writes a reply with a JSON body; fake_body one with body [bytes]; fake_error an error.
size_t fake_json(uint8_t *reply, const proto_header *h, const char *json);
size_t fake_body(uint8_t *reply, const proto_header *h, const void *body, size_t bytes);
size_t fake_error(uint8_t *reply, const proto_header *h, attnd_err code, const char *field);

// fake_cut cuts a good reply of bytes to n of them: step 2 n leaves the header as it was, step
// 2 n + 1 makes its body_bytes fit.  Steps go from 0 to 2 * bytes - 1.
size_t fake_cut(uint8_t *reply, const proto_header *h, int step);

#endif
