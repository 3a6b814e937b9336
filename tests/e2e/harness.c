// The end-to-end harness: processes, folders, raw messages.
#include "tests/e2e/harness.h"

#include <cjson/cJSON.h>
#include <dirent.h>
#include <fcntl.h>
#include <nng/protocol/reqrep0/req.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/e2e/harness_ring.h"

enum { READY_MS = 60000, STOP_MS = 40000, CALL_MS = 120000, MAX_FLAGS = 64 };

uint64_t e2e_now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

void e2e_sleep_ms(int ms) {
    struct timespec t = {ms / 1000, (long)(ms % 1000) * 1000000};
    nanosleep(&t, NULL);
}

// ---- daemon

void e2e_dir(e2e_daemon *d) {
    memset(d, 0, sizeof(*d));
    d->out = -1;
    strcpy(d->dir, "/tmp/attnd_e2e_XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(d->dir));
    snprintf(d->path, sizeof(d->path), "%s/s", d->dir);
    snprintf(d->url, sizeof(d->url), "ipc://%s", d->path);
    snprintf(d->admin_url, sizeof(d->admin_url), "%s.admin", d->url);
}

// set_or returns a variable of the environment, or what stands for it.
static const char *set_or(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && value[0] ? value : otherwise;
}

static _Noreturn void exec_daemon(const e2e_daemon *d, const char *const *flags, int out) {
    const char *argv[MAX_FLAGS + 9] = {set_or("ATTND_E2E_BINARY", ATTND_BINARY), "--listen", d->url,
                                       "--device", set_or("ATTND_E2E_DEVICE", "cpu")};
    int num = 5;
    for (int i = 0; flags && flags[i] && i < MAX_FLAGS; i++) {
        argv[num++] = flags[i];
    }
    const char *more = getenv("ATTND_E2E_SET"); // "section.key=value"
    if (more && more[0]) {
        argv[num++] = "--set";
        argv[num++] = more;
    }
    argv[num] = d->keeper ? NULL : "--no-keeper";
    char log[96];
    snprintf(log, sizeof(log), "%s/log", d->dir);
    int fd = open(log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(out, STDOUT_FILENO);
    dup2(fd, STDERR_FILENO);
    execv(argv[0], (char **)argv);
    _exit(127);
}

void e2e_try_start(e2e_daemon *d, const char *const *flags) {
    int fds[2];
    ck_assert_int_eq(pipe2(fds, O_CLOEXEC), 0);
    d->pid = fork();
    ck_assert_int_ge(d->pid, 0);
    if (d->pid == 0) {
        exec_daemon(d, flags, fds[1]);
    }
    close(fds[1]);
    d->out = fds[0];
}

void e2e_start(e2e_daemon *d, const char *const *flags) {
    if (!d->dir[0]) {
        e2e_dir(d);
    }
    e2e_try_start(d, flags);
    size_t len = 0;
    uint64_t until = e2e_now_ms() + READY_MS;
    while (len + 1 < sizeof(d->ready) && !memchr(d->ready, '\n', len)) {
        struct pollfd p = {.fd = d->out, .events = POLLIN};
        ck_assert_msg(poll(&p, 1, READY_MS) == 1 && e2e_now_ms() < until, "not ready in time");
        ssize_t n = read(d->out, d->ready + len, sizeof(d->ready) - 1 - len);
        ck_assert_msg(n > 0, "the daemon ended before it was ready");
        len += (size_t)n;
    }
    d->ready[len] = '\0';
}

// poke gives the daemon's loop an event, by its attach socket.  The thread sanitizer holds a signal
// back until the thread makes a call that it sees, and tests/tsan.supp hides those of libuv: a
// SIGTERM that meets the loop asleep would be noticed with the next event only.
static void poke(const e2e_daemon *d) {
#ifdef __SANITIZE_THREAD__
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    snprintf(addr.sun_path, sizeof(addr.sun_path), "%.99s.attach", d->path);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    (void)!connect(fd, (const struct sockaddr *)&addr, sizeof(addr));
    close(fd);
#else
    (void)d;
#endif
}

void e2e_kill_worker(const e2e_daemon *d) {
    char path[64];
    int worker = 0;
    snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)d->pid, (int)d->pid);
    FILE *f = fopen(path, "re");
    ck_assert_ptr_nonnull(f);
    ck_assert_int_eq(fscanf(f, "%d", &worker), 1);
    fclose(f);
    ck_assert_int_eq(kill(worker, SIGKILL), 0);
}

void e2e_await_ready(const e2e_daemon *d) {
    char got = 0;
    while (got != '\n') {
        ck_assert_int_eq(read(d->out, &got, 1), 1);
    }
}

int e2e_wait(e2e_daemon *d, int ms) {
    enum { POKE_TURNS = 200 };
    uint64_t until = e2e_now_ms() + (uint64_t)ms;
    int status;
    for (int turn = 1; turn == 1 || e2e_now_ms() < until; turn++) {
        pid_t pid = waitpid(d->pid, &status, WNOHANG);
        if (pid == d->pid) {
            d->pid = 0;
            return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        }
        e2e_sleep_ms(2);
        if (turn % POKE_TURNS == 0) {
            poke(d);
        }
    }
    return -1;
}

static char *read_log(const e2e_daemon *d) {
    char path[96];
    snprintf(path, sizeof(path), "%s/log", d->dir);
    FILE *f = fopen(path, "r");
    char *text = calloc(1, 1 << 20);
    ck_assert_ptr_nonnull(text);
    if (f) {
        size_t n = fread(text, 1, (1 << 20) - 1, f);
        text[n] = '\0';
        fclose(f);
    }
    return text;
}

bool e2e_log_has(const e2e_daemon *d, const char *needle) {
    char *text = read_log(d);
    bool has = strstr(text, needle) != NULL;
    free(text);
    return has;
}

void e2e_remove(e2e_daemon *d) {
    DIR *dir = opendir(d->dir);
    for (struct dirent *e; dir && (e = readdir(dir));) {
        unlinkat(dirfd(dir), e->d_name, 0);
    }
    if (dir) {
        closedir(dir);
    }
    rmdir(d->dir);
    close(d->out);
}

void e2e_stop(e2e_daemon *d) {
    kill(d->pid, SIGTERM);
    int status = e2e_wait(d, STOP_MS);
    char *log = read_log(d);
    ck_assert_msg(status == 0, "exit status %d, log:\n%s", status, log);
    ck_assert_msg(!strstr(log, "Sanitizer"), "log:\n%s", log);
    ck_assert_msg(!strstr(log, "accounting of blocks is wrong"), "log:\n%s", log);
    free(log);
    e2e_remove(d);
}

// ---- messages

static void append(e2e_buf *b, const void *data, size_t bytes) {
    b->data = realloc(b->data, b->bytes + bytes + 8);
    ck_assert_ptr_nonnull(b->data);
    if (bytes && data) {
        memcpy(b->data + b->bytes, data, bytes);
    } else if (bytes) {
        memset(b->data + b->bytes, 0, bytes);
    }
    b->bytes += bytes;
}

void e2e_buf_init(e2e_buf *b, uint32_t op, uint64_t id, const void *body, size_t bytes) {
    proto_header h = {.magic = PROTO_MAGIC,
                      .version = PROTO_VERSION,
                      .op = (uint16_t)op,
                      .request = id,
                      .body_bytes = (uint32_t)bytes};
    *b = (e2e_buf){NULL, 0};
    append(b, &h, sizeof(h));
    append(b, body, bytes);
}

uint32_t e2e_buf_add(e2e_buf *b, const void *data, size_t bytes) {
    append(b, NULL, (8 - b->bytes % 8) % 8);
    uint32_t off = (uint32_t)b->bytes;
    append(b, data, bytes);
    return off;
}

void e2e_buf_set(e2e_buf *b, size_t off, const void *data, size_t bytes) {
    memcpy(b->data + PROTO_BODY + off, data, bytes);
}

void e2e_buf_seal(e2e_buf *b) {
    uint32_t body_bytes = (uint32_t)(b->bytes - PROTO_BODY);
    memcpy(b->data + offsetof(proto_header, body_bytes), &body_bytes, sizeof(body_bytes));
}

void e2e_buf_fini(e2e_buf *b) {
    free(b->data);
}

void e2e_connect(e2e_client *c, const char *url) {
    memset(c, 0, sizeof(*c));
    c->ring = e2e_ring_open(url);
    if (c->ring) {
        return;
    }
    ck_assert_int_eq(nng_req0_open(&c->socket), 0);
    ck_assert_int_eq(nng_socket_set_ms(c->socket, NNG_OPT_REQ_RESENDTIME, NNG_DURATION_INFINITE),
                     0);
    ck_assert_int_eq(nng_dial(c->socket, url, NULL, 0), 0);
}

void e2e_close(e2e_client *c) {
    if (c->ring) {
        e2e_ring_close(c->ring);
        return;
    }
    nng_close(c->socket);
}

void e2e_reply_fini(e2e_reply *r) {
    free(r->msg);
    r->msg = NULL;
}

void e2e_send(e2e_client *c, e2e_flight *f, const void *bytes, size_t num) {
    nng_msg *msg;
    f->ring = c->ring;
    if (f->ring) {
        e2e_ring_send(f, bytes, num);
        return;
    }
    ck_assert_int_eq(nng_ctx_open(&f->ctx, c->socket), 0);
    ck_assert_int_eq(nng_aio_alloc(&f->aio, NULL, NULL), 0);
    ck_assert_int_eq(nng_msg_alloc(&msg, num), 0);
    if (num) {
        memcpy(nng_msg_body(msg), bytes, num);
    }
    nng_aio_set_timeout(f->aio, CALL_MS);
    nng_aio_set_msg(f->aio, msg);
    nng_ctx_send(f->ctx, f->aio);
    nng_aio_wait(f->aio);
    if (nng_aio_result(f->aio) != 0) {
        nng_msg_free(msg);
    }
    nng_aio_set_msg(f->aio, NULL);
    nng_ctx_recv(f->ctx, f->aio);
}

static bool busy(e2e_flight *f) {
    if (f->ring) {
        return !e2e_ring_arrived(f);
    }
    // 1.5.2 has no nng_aio_busy: the result of a running aio is that of the one before, but its
    // message is set only at the end.
    return nng_aio_get_msg(f->aio) == NULL;
}

bool e2e_arrived(e2e_flight *f, int ms) {
    uint64_t until = e2e_now_ms() + (uint64_t)ms;
    while (busy(f) && e2e_now_ms() < until) {
        e2e_sleep_ms(1);
    }
    return !busy(f);
}

// take_reply copies a reply and reads its header.
static void take_reply(e2e_reply *r, const void *msg, size_t bytes) {
    r->bytes = bytes;
    r->msg = malloc(bytes + 1);
    ck_assert_ptr_nonnull(r->msg);
    memcpy(r->msg, msg, bytes);
    r->msg[bytes] = '\0';
    ck_assert_uint_ge(bytes, sizeof(r->header));
    memcpy(&r->header, r->msg, sizeof(r->header));
    r->body = r->msg + sizeof(r->header);
    r->body_bytes = bytes - sizeof(r->header);
    ck_assert_uint_eq(r->header.magic, PROTO_MAGIC);
    ck_assert_uint_eq(r->header.body_bytes, r->body_bytes);
    r->status = (attnd_err)r->header.status;
    if (r->status) {
        ck_assert_uint_ge(r->body_bytes, sizeof(r->error));
        memcpy(&r->error, r->body, sizeof(r->error));
    }
}

static attnd_err recv_ring(e2e_flight *f, e2e_reply *r) {
    size_t bytes;
    const void *msg = e2e_ring_recv(f, CALL_MS, &r->status, &bytes);
    if (msg) {
        attnd_err status = r->status;
        take_reply(r, msg, bytes);
        ck_assert_int_eq(r->status, status);
    }
    e2e_ring_done(f);
    return r->status;
}

attnd_err e2e_recv(e2e_flight *f, e2e_reply *r) {
    memset(r, 0, sizeof(*r));
    if (f->ring) {
        return recv_ring(f, r);
    }
    nng_aio_wait(f->aio);
    nng_msg *msg = nng_aio_result(f->aio) == 0 ? nng_aio_get_msg(f->aio) : NULL;
    r->status = ATTND_ECONN;
    if (msg) {
        take_reply(r, nng_msg_body(msg), nng_msg_len(msg));
        nng_msg_free(msg);
    }
    nng_aio_free(f->aio);
    nng_ctx_close(f->ctx);
    return r->status;
}

attnd_err e2e_call_raw(e2e_client *c, const void *msg, size_t bytes, e2e_reply *r) {
    e2e_flight f;
    e2e_reply mine;
    e2e_send(c, &f, msg, bytes);
    attnd_err err = e2e_recv(&f, r ? r : &mine);
    if (!r) {
        e2e_reply_fini(&mine);
    }
    return err;
}

attnd_err e2e_call_id(e2e_client *c, uint32_t op, uint64_t id, const void *body, size_t bytes,
                      e2e_reply *r) {
    e2e_buf b;
    e2e_buf_init(&b, op, id, body, bytes);
    attnd_err err = e2e_call_raw(c, b.data, b.bytes, r);
    e2e_buf_fini(&b);
    return err;
}

attnd_err e2e_call(e2e_client *c, uint32_t op, const void *body, size_t bytes, e2e_reply *r) {
    return e2e_call_id(c, op, ++c->id, body, bytes, r);
}

char *e2e_json(e2e_client *c, uint32_t op, const char *json) {
    e2e_reply r;
    attnd_err err = e2e_call(c, op, json, strlen(json), &r);
    ck_assert_msg(err == ATTND_OK, "op %u: %s: %s: %s", op, attnd_errname(err), r.error.field,
                  r.error.text);
    char *text = strdup((char *)r.body);
    e2e_reply_fini(&r);
    return text;
}

// ---- stats

double e2e_number(const char *json, const char *path) {
    cJSON *doc = cJSON_Parse(json);
    ck_assert_ptr_nonnull(doc);
    char copy[128], *save = NULL;
    snprintf(copy, sizeof(copy), "%s", path);
    const cJSON *node = doc;
    for (char *key = strtok_r(copy, ".", &save); key; key = strtok_r(NULL, ".", &save)) {
        node = cJSON_GetObjectItemCaseSensitive(node, key);
        ck_assert_msg(node != NULL, "%s is not in %s", path, json);
    }
    ck_assert(cJSON_IsNumber(node));
    double value = node->valuedouble;
    cJSON_Delete(doc);
    return value;
}

double e2e_stat(e2e_client *c, const char *path) {
    char *json = e2e_json(c, PROTO_STATS, "");
    double value = e2e_number(json, path);
    free(json);
    return value;
}

void e2e_await_stat(e2e_client *c, const char *path, double value, int ms) {
    uint64_t until = e2e_now_ms() + (uint64_t)ms;
    double now;
    while ((now = e2e_stat(c, path)) != value && e2e_now_ms() < until) {
        e2e_sleep_ms(5);
    }
    ck_assert_msg(now == value, "%s is %g, not %g, after %d ms", path, now, value, ms);
}
