// harness starts a real daemon on a fresh folder under /tmp, and talks to it with raw messages over
// NNG, so that a test can also send what no client library would.  Checks inside helpers are Check
// assertions: a helper that returns has worked.
//
// With ATTND_E2E_TRANSPORT=ring in the environment the same calls go over a shared-memory ring,
// those to the administration socket excepted.
//
// ATTND_E2E_BINARY in the environment is another daemon to start, such as one of tests/device, and
// ATTND_E2E_DEVICE its --device.
//
// A daemon runs without a keeper unless asked, and dies with the test process that started it.  NNG
// does not survive fork: fork whatever is to be killed before the first e2e_connect of the process.
#ifndef ATTND_TESTS_E2E_HARNESS_H
#define ATTND_TESTS_E2E_HARNESS_H

#include <nng/nng.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "attention/attn.h"
#include "proto/proto_msg.h"
#include "tests/check_main.h"

// ---- daemon

typedef struct e2e_daemon {
    char dir[64];
    char path[96], url[112], admin_url[128]; // path is the socket's
    bool keeper; // set before e2e_start: with a keeper, which pid then is
    pid_t pid;
    int out;         // its standard output
    char ready[256]; // the line it printed there
} e2e_daemon;

// e2e_dir makes the folder; e2e_start starts attnd there with flags (NULL-terminated, may be NULL)
// behind --listen, and waits until it is ready.  e2e_try_start does not wait: *out is left open.
void e2e_dir(e2e_daemon *d);
void e2e_start(e2e_daemon *d, const char *const *flags);
void e2e_try_start(e2e_daemon *d, const char *const *flags);

// e2e_kill_worker kills the worker of a daemon with a keeper by SIGKILL; e2e_await_ready waits
// until the next one says that it is ready.
void e2e_kill_worker(const e2e_daemon *d);
void e2e_await_ready(const e2e_daemon *d);

// e2e_wait returns the exit status, 128 + the signal's number, or -1 when it still runs after ms.
int e2e_wait(e2e_daemon *d, int ms);

// e2e_stop sends SIGTERM and wants exit status 0 within 10 s and no report of a sanitizer, then
// removes the folder.
void e2e_stop(e2e_daemon *d);
void e2e_remove(e2e_daemon *d);

// e2e_log_has is true when the daemon's log contains text.
bool e2e_log_has(const e2e_daemon *d, const char *text);

// e2e_sleep_ms sleeps; e2e_now_ms is a monotonic clock.
void e2e_sleep_ms(int ms);
uint64_t e2e_now_ms(void);

// ---- messages

// e2e_buf is a message being written.
typedef struct e2e_buf {
    uint8_t *data;
    size_t bytes;
} e2e_buf;

// e2e_buf_init writes the header and a body; e2e_buf_add adds an array at the next multiple of 8
// and returns its offset; e2e_buf_seal sets body_bytes.  e2e_buf_fini frees.
void e2e_buf_init(e2e_buf *b, uint32_t op, uint64_t id, const void *body, size_t bytes);
uint32_t e2e_buf_add(e2e_buf *b, const void *data, size_t bytes);
void e2e_buf_set(e2e_buf *b, size_t off, const void *data, size_t bytes); // overwrites the body
void e2e_buf_seal(e2e_buf *b);
void e2e_buf_fini(e2e_buf *b);

// e2e_client is one connection.
typedef struct e2e_client {
    nng_socket socket;
    struct e2e_ring *ring; // NULL = NNG
    uint64_t id;           // the last request id used
} e2e_client;

enum { E2E_REPLY_BYTES = 1 << 22 };

// e2e_reply is an answer.  status ATTND_ECONN: the connection was closed, or nothing came in time.
typedef struct e2e_reply {
    attnd_err status;
    proto_error error;
    proto_header header;
    uint8_t *msg; // whole, [bytes]
    uint8_t *body;
    size_t bytes, body_bytes;
} e2e_reply;

void e2e_connect(e2e_client *c, const char *url);
void e2e_close(e2e_client *c);
void e2e_reply_fini(e2e_reply *r);

// e2e_call_raw sends bytes as they are and waits for the answer.
attnd_err e2e_call_raw(e2e_client *c, const void *msg, size_t bytes, e2e_reply *r);
// e2e_call sends a body under the next id.  r may be NULL.
attnd_err e2e_call(e2e_client *c, uint32_t op, const void *body, size_t bytes, e2e_reply *r);
// e2e_call_id is the same under a given id.
attnd_err e2e_call_id(e2e_client *c, uint32_t op, uint64_t id, const void *body, size_t bytes,
                      e2e_reply *r);
// e2e_json calls an op with JSON and returns the reply's text, NUL-terminated; the caller frees it.
char *e2e_json(e2e_client *c, uint32_t op, const char *json);

// e2e_flight is a request that has been sent and not been waited for.
typedef struct e2e_flight {
    nng_ctx ctx;
    nng_aio *aio;
    struct e2e_ring *ring; // NULL = NNG
    uint64_t user, reply_at;
} e2e_flight;
void e2e_send(e2e_client *c, e2e_flight *f, const void *msg, size_t bytes);
// e2e_arrived is true when the answer is there.
bool e2e_arrived(e2e_flight *f, int ms);
attnd_err e2e_recv(e2e_flight *f, e2e_reply *r);

// ---- stats

// e2e_number reads a number of the JSON under a path such as "blocks.in_use".
double e2e_number(const char *json, const char *path);
// e2e_stat asks the daemon for stats and reads one number; the client has said hello.
double e2e_stat(e2e_client *c, const char *path);
// e2e_await_stat waits up to ms until the number is value.
void e2e_await_stat(e2e_client *c, const char *path, double value, int ms);

#endif
