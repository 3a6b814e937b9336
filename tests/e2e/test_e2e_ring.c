// Rings as a well-behaved client sees them: attaching, sessions, sleeping and waking, limits, and
// what is refused.  (Room for replies: test_e2e_ring_reply.c.  That all of the protocol works over
// them is shown by the other stories, which run over rings too.)
#include <cjson/cJSON.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/e2e/play.h"
#include "tests/e2e/ring_fixture.h"

enum { DATA_BYTES = 1 << 20 };

static e2e_daemon d;
static char attach_path[128];

static void start(const char *const *more) {
    const char *flags[32] = {"--set", "cache.memory=64MiB", "--set", "cache.slab=1MiB"};
    for (int i = 0; more && more[i]; i++) {
        flags[4 + i] = more[i];
    }
    memset(&d, 0, sizeof(d));
    e2e_start(&d, flags);
    snprintf(attach_path, sizeof(attach_path), "%s.attach", d.path);
}

static void setup(void) {
    start(NULL);
}

static void teardown(void) {
    e2e_stop(&d);
}

static void open_ring(ring_client *r) {
    ATTND_CK_OK(ring_client_open(r, attach_path, 16, DATA_BYTES));
    ATTND_CK_OK(call(r, PROTO_HELLO, 1, "{}", 2));
}

// ---- attaching

START_TEST(hello_names_the_attach_socket) {
    e2e_client c;
    e2e_connect(&c, d.url);
    char *json = e2e_json(&c, PROTO_HELLO, "{}");
    cJSON *doc = cJSON_Parse(json);
    const cJSON *path = cJSON_GetObjectItemCaseSensitive(doc, "attach_socket");
    ck_assert_str_eq(cJSON_GetStringValue(path), attach_path);
    cJSON_Delete(doc);
    free(json);
    struct stat st;
    ck_assert_int_eq(stat(attach_path, &st), 0);
    ck_assert_uint_eq(st.st_mode & 0777, 0660);
    e2e_close(&c);
}
END_TEST

START_TEST(the_answer_tells_where_things_lie) {
    ring_client r;
    ATTND_CK_OK(ring_client_open(&r, attach_path, 64, 100000));
    ck_assert_uint_eq(r.attached.magic, PROTO_RING_MAGIC);
    ck_assert_uint_eq(r.attached.data_off, 8192);       // 4096 + 64 * (32 + 16), rounded up
    ck_assert_uint_eq(r.attached.bytes, 8192 + 102400); // data rounded up to pages
    ck_assert_uint_eq(r.attached.spin_us, 50);
    ck_assert_uint_eq(r.attached.flags, 0);
    ck_assert_uint_eq(r.head->data_bytes, 102400);
    ring_client_close(&r);
}
END_TEST

START_TEST(a_bad_request_for_a_ring_says_why) {
    const proto_attach good = {
        .magic = PROTO_RING_MAGIC, .version = PROTO_VERSION, .entries = 16, .data_bytes = 4096};
    struct {
        proto_attach ask;
        attnd_err err;
    } bad[12];
    for (int i = 0; i < 12; i++) {
        bad[i].ask = good;
        bad[i].err = ATTND_EINVAL;
    }
    bad[0].ask.magic++, bad[0].err = ATTND_EPROTO;
    bad[1].ask.version++, bad[1].err = ATTND_EVERSION;
    bad[2].ask.flags = 4;
    bad[3].ask.reserved2 = 1;
    bad[4].ask.entries = 0;
    bad[5].ask.entries = 24;
    bad[6].ask.data_bytes = 0;
    bad[7].ask.secret[15] = 1; // without a session
    bad[8].ask.data_bytes = UINT64_MAX, bad[8].err = ATTND_EMSGSIZE;
    bad[9].ask.session = 0x1234, bad[9].err = ATTND_ESTALE;
    bad[10].ask.flags = PROTO_ATTACH_ARENA, bad[10].err = ATTND_EPERM; // nobody may have it here
    bad[11].ask.flags = PROTO_ATTACH_ARENA;
    bad[11].ask.session = 0x1234; // a ring that joins gets none
    for (int i = 0; i < 12; i++) {
        ring_client r;
        ck_assert(ring_client_connect(&r, attach_path));
        ATTND_CK_ERR(ring_client_ask(&r, &bad[i].ask), bad[i].err);
        ck_assert_uint_eq(r.attached.flags, 0);
        ck_assert(ring_client_closed(&r, 5000));
        ring_client_close(&r);
    }
}
END_TEST

START_TEST(a_packet_of_another_size_is_no_request) {
    static const size_t sizes[] = {1, 47, 49, 4096};
    static const uint8_t zeros[4096];
    for (int i = 0; i < 4; i++) {
        ring_client r;
        ck_assert(ring_client_connect(&r, attach_path));
        ck_assert_int_eq(send(r.fd, zeros, sizes[i], MSG_NOSIGNAL), (ssize_t)sizes[i]);
        ck_assert_int_eq(recv(r.fd, &r.attached, sizeof(r.attached), 0), sizeof(r.attached));
        ck_assert_int_eq(r.attached.status, ATTND_EPROTO);
        ck_assert(ring_client_closed(&r, 5000));
        ring_client_close(&r);
    }
}
END_TEST

// ---- sessions

START_TEST(hello_comes_first) {
    ring_client r;
    ATTND_CK_OK(ring_client_open(&r, attach_path, 16, DATA_BYTES));
    ATTND_CK_ERR(call(&r, PROTO_STATS, 1, NULL, 0), ATTND_ESTALE);
    ATTND_CK_OK(call(&r, PROTO_HELLO, 2, "{}", 2));
    ATTND_CK_ERR(call(&r, PROTO_HELLO, 3, "{}", 2), ATTND_EEXIST);
    ATTND_CK_OK(call(&r, PROTO_STATS, 4, NULL, 0));
    ATTND_CK_ERR(call(&r, PROTO_DRAIN, 5, "{}", 2), ATTND_EPERM); // no administration here
    ring_client_close(&r);
}
END_TEST

// joined asks for a ring of the session that c has.
static attnd_err join(ring_client *r, const char *hello, int flip) {
    cJSON *doc = cJSON_Parse(hello);
    const char *id = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(doc, "session"));
    const char *hex = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(doc, "secret"));
    proto_attach ask = {.magic = PROTO_RING_MAGIC,
                        .version = PROTO_VERSION,
                        .session = strtoull(id, NULL, 16),
                        .entries = 16,
                        .data_bytes = DATA_BYTES};
    for (int i = 0; i < 16; i++) {
        unsigned byte;
        ck_assert_int_eq(sscanf(hex + i * 2, "%2x", &byte), 1);
        ask.secret[i] = (uint8_t)byte;
    }
    ask.secret[15] ^= (uint8_t)flip;
    cJSON_Delete(doc);
    ck_assert(ring_client_connect(r, attach_path));
    return ring_client_ask(r, &ask);
}

START_TEST(a_ring_joins_a_session) {
    e2e_client c;
    ring_client r, second;
    e2e_connect(&c, d.url);
    char *hello = e2e_json(&c, PROTO_HELLO, "{}");
    ATTND_CK_ERR(join(&r, hello, 1), ATTND_EPERM);
    ring_client_close(&r);
    ATTND_CK_OK(join(&r, hello, 0));
    ATTND_CK_ERR(join(&second, hello, 0), ATTND_EEXIST);
    ring_client_close(&second);
    ATTND_CK_ERR(call(&r, PROTO_HELLO, 2, "{}", 2), ATTND_EEXIST);
    uint32_t model;
    uint64_t seq = open_seq(&r, &model);
    step_body body = one_token(model, seq); // what the ring made, NNG may use
    ATTND_CK_OK(e2e_call_id(&c, PROTO_STEP, 12, &body, sizeof(body), NULL));
    ATTND_CK_OK(e2e_call_id(&c, PROTO_SEQ_CREATE, 11, &(proto_model){.model = model}, 8, NULL));
    ck_assert_double_eq(e2e_stat(&c, "sequences"), 1); // the id 11 was used over the ring
    free(hello);
    ring_client_close(&r);
    e2e_close(&c);
}
END_TEST

static void await_no_session(void) {
    e2e_client watch;
    e2e_connect(&watch, d.url);
    free(e2e_json(&watch, PROTO_HELLO, "{}"));
    e2e_await_stat(&watch, "sessions", 1, 1000);
    ck_assert_double_eq(e2e_stat(&watch, "sequences"), 0);
    ck_assert_double_eq(e2e_stat(&watch, "transport.rings.bytes"), 0);
    e2e_close(&watch);
}

START_TEST(the_loss_of_the_ring_ends_the_session) {
    e2e_client c;
    ring_client r;
    uint32_t model;
    e2e_connect(&c, d.url);
    char *hello = e2e_json(&c, PROTO_HELLO, "{}");
    ATTND_CK_OK(join(&r, hello, 0));
    open_seq(&r, &model);
    ring_client_close(&r);
    await_no_session();
    free(hello);
    e2e_close(&c);
}
END_TEST

START_TEST(the_loss_of_the_nng_connection_closes_the_ring) {
    e2e_client c;
    ring_client r;
    uint32_t model;
    e2e_connect(&c, d.url);
    char *hello = e2e_json(&c, PROTO_HELLO, "{}");
    ATTND_CK_OK(join(&r, hello, 0));
    open_seq(&r, &model);
    e2e_close(&c);
    ck_assert(ring_client_closed(&r, 5000));
    ring_client_close(&r);
    await_no_session();
    free(hello);
}
END_TEST

// ---- sleeping and waking

static void await_sleep(const ring_client *r) {
    for (int i = 0; i < 5000 && !proto_ring_load(&r->head->daemon_sleeps); i++) {
        e2e_sleep_ms(1);
    }
    ck_assert_uint_eq(proto_ring_load(&r->head->daemon_sleeps), 1);
}

START_TEST(the_daemon_sleeps_and_a_doorbell_wakes_it) {
    ring_client r;
    open_ring(&r);
    for (int i = 0; i < 20; i++) {
        await_sleep(&r);
        uint64_t rung = r.doorbells;
        ATTND_CK_ERR(call(&r, PROTO_CANCEL, 100, &(proto_cancel){.request = 1}, 16), ATTND_ENOENT);
        ck_assert_uint_eq(r.doorbells, rung + 1);
    }
    ring_client_close(&r);
}
END_TEST

START_TEST(a_daemon_that_sleeps_uses_no_processor) {
    ring_client r;
    open_ring(&r);
    await_sleep(&r);
    const void *reply;
    ATTND_CK_OK(ring_client_call(&r, PROTO_STATS, 100, NULL, 0, &reply));
    double before = e2e_number(reply, "transport.rings.sleeps");
    e2e_sleep_ms(200);
    ATTND_CK_OK(ring_client_call(&r, PROTO_STATS, 101, NULL, 0, &reply));
    ck_assert_double_eq(e2e_number(reply, "transport.rings.sleeps"), before + 1);
    ring_client_close(&r);
}
END_TEST

START_TEST(a_client_that_waits_is_woken_by_its_completion) {
    ring_client r;
    open_ring(&r);
    r.spin_us = 0; // it sleeps 50 ms at most: 200 calls that were not woken would take 10 s
    uint64_t begin = e2e_now_ms();
    for (int i = 0; i < 200; i++) {
        ATTND_CK_ERR(call(&r, PROTO_CANCEL, 100, &(proto_cancel){.request = 1}, 16), ATTND_ENOENT);
    }
    ck_assert_uint_lt(e2e_now_ms() - begin, 4000);
    ring_client_close(&r);
}
END_TEST

START_TEST(doorbells_that_nobody_needs_do_no_harm) {
    ring_client r;
    open_ring(&r);
    for (int i = 0; i < 5000; i++) {
        send(r.fd, "0123456789", 1 + (size_t)i % 10, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    ATTND_CK_OK(call(&r, PROTO_STATS, 100, NULL, 0));
    ring_client_close(&r);
}
END_TEST

START_TEST(a_daemon_may_never_spin) {
    static const char *const flags[] = {"--set", "server.spin_us=0", NULL};
    ring_client r;
    start(flags);
    open_ring(&r);
    ck_assert_uint_eq(r.attached.spin_us, 0);
    for (int i = 0; i < 500; i++) {
        ATTND_CK_ERR(call(&r, PROTO_CANCEL, 100, &(proto_cancel){.request = 1}, 16), ATTND_ENOENT);
    }
    ring_client_close(&r);
    teardown();
}
END_TEST

// ---- limits

enum { IN_FLIGHT = 4, ALL_TOKENS = 32768 }; // of 2 MiB: 64 bytes of K and V a token

// wait_for_blocks submits a step that wants as much as another has.
static void wait_for_blocks(ring_client *r, uint32_t model, uint32_t i) {
    const void *reply;
    proto_model create = {.model = model};
    ATTND_CK_OK(ring_client_call(r, PROTO_SEQ_CREATE, 30 + i, &create, 8, &reply));
    uint64_t seq, at = 131072 + i * 4096;
    memcpy(&seq, reply, 8);
    step_body body = one_token(model, seq);
    body.step.deadline_ms = 60000;
    body.seq.reserve = ALL_TOKENS - 1;
    proto_write_header(ring_client_data(r, at), PROTO_STEP, 40 + i, ATTND_OK,
                       PROTO_BODY + sizeof(body));
    memcpy(ring_client_data(r, at + PROTO_BODY), &body, sizeof(body));
    ring_client_submit(r, at, PROTO_BODY + sizeof(body), at + 2048, 2048, 40 + i);
    ring_client_bell(r);
}

START_TEST(requests_past_the_limit_in_flight_are_busy) {
    static const char *const flags[] = {"--set", "limits.in_flight=4", "--set", "cache.memory=1MiB",
                                        NULL};
    ring_client r;
    uint32_t model;
    proto_ring_complete done;
    start(flags);
    open_ring(&r);
    step_body body = one_token(0, open_seq(&r, &model));
    body.step.model = model;
    body.seq.reserve = ALL_TOKENS - 1;
    ATTND_CK_OK(call(&r, PROTO_STEP, 20, &body, sizeof(body)));
    for (uint32_t i = 0; i < IN_FLIGHT; i++) {
        wait_for_blocks(&r, model, i);
    }
    ck_assert(!ring_client_wait(&r, &done, 50));
    for (uint32_t i = 0; i < 3; i++) {
        ATTND_CK_ERR(call(&r, PROTO_STATS, 60 + i, NULL, 0), ATTND_EBUSY);
    }
    ring_client_close(&r);
    await_no_session();
    teardown();
}
END_TEST

START_TEST(rings_and_their_memory_have_limits) {
    static const char *const flags[] = {"--set", "limits.rings=3",
                                        "--set", "limits.ring_memory=256KiB",
                                        "--set", "limits.all_rings_memory=512KiB",
                                        NULL};
    ring_client r[4];
    start(flags);
    ATTND_CK_ERR(ring_client_open(&r[0], attach_path, 16, 262144), ATTND_EMSGSIZE);
    uint64_t most = r[0].attached.bytes;
    ck_assert_uint_eq(most, 262144 - 53248); // beside the largest queues: 4096 + 1024 * 48
    ring_client_close(&r[0]);
    ATTND_CK_OK(ring_client_open(&r[0], attach_path, 1024, most));
    ATTND_CK_OK(ring_client_open(&r[1], attach_path, 1024, most));
    ATTND_CK_ERR(ring_client_open(&r[2], attach_path, 2, 4096), ATTND_EBUSY);
    ring_client_close(&r[2]);
    ring_client_close(&r[0]);
    attnd_err err = ATTND_EBUSY;
    for (int i = 0; i < 1000 && err == ATTND_EBUSY; i++) { // until the close has been seen
        err = ring_client_open(&r[0], attach_path, 2, 4096);
        if (err) {
            ring_client_close(&r[0]);
            e2e_sleep_ms(1);
        }
    }
    ATTND_CK_OK(err);
    ATTND_CK_OK(ring_client_open(&r[2], attach_path, 2, 4096));
    ATTND_CK_ERR(ring_client_open(&r[3], attach_path, 2, 4096), ATTND_ECONN); // three are all
    for (int i = 0; i < 4; i++) {
        ring_client_close(&r[i]);
    }
    teardown();
}
END_TEST

START_TEST(a_connection_without_hello_is_closed) {
    static const char *const flags[] = {"--set", "limits.hello_timeout=100ms", NULL};
    ring_client silent, ring, good;
    start(flags);
    ck_assert(ring_client_connect(&silent, attach_path));
    ATTND_CK_OK(ring_client_open(&ring, attach_path, 16, DATA_BYTES));
    open_ring(&good);
    ck_assert(ring_client_closed(&silent, 5000));
    ck_assert(ring_client_closed(&ring, 5000));
    ATTND_CK_OK(call(&good, PROTO_STATS, 100, NULL, 0));
    ring_client_close(&silent);
    ring_client_close(&ring);
    ring_client_close(&good);
    teardown();
}
END_TEST

START_TEST(a_message_above_the_limit_is_refused) {
    static const char *const flags[] = {"--set", "limits.message=64KiB", NULL};
    ring_client r;
    start(flags);
    open_ring(&r);
    proto_write_header(ring_client_data(&r, 0), PROTO_STATS, 100, ATTND_OK, 65537);
    ring_client_submit(&r, 0, 65537, 131072, 65536, 100);
    ring_client_bell(&r);
    proto_ring_complete done;
    ck_assert(ring_client_wait(&r, &done, 5000));
    ATTND_CK_ERR((attnd_err)done.status, ATTND_EMSGSIZE);
    ring_client_close(&r);
    teardown();
}
END_TEST

// ---- users

START_TEST(another_user_is_refused_unless_allowed) {
    bool allowed = _i == 1;
    const char *uids = allowed ? "tenant default.uids=0 65534" : "tenant default.uids=0";
    const char *const flags[] = {"--set", "server.socket_mode=0777", "--set", uids, NULL};
    if (getuid() != 0) {
        fprintf(stderr, "another_user_is_refused_unless_allowed: skipped, needs root\n");
        return;
    }
    start(flags);
    chmod(d.dir, 0755);
    pid_t pid = fork();
    if (pid == 0) {
        ring_client r;
        bool other = setuid(65534) == 0;
        if (allowed) {
            bool in = other && !ring_client_open(&r, attach_path, 16, 1 << 18) &&
                      !ring_client_call(&r, PROTO_HELLO, 1, "{}", 2, NULL);
            _exit(in ? 0 : 1);
        }
        bool refused =
            other && ring_client_connect(&r, attach_path) && ring_client_closed(&r, 5000);
        _exit(refused ? 0 : 1);
    }
    int status;
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    ck_assert_int_eq(status, 0);
    ring_client mine;
    open_ring(&mine);
    ring_client_close(&mine);
    teardown();
}
END_TEST

START_TEST(a_user_whom_the_socket_does_not_let_in_cannot_connect) {
    if (getuid() != 0) {
        fprintf(stderr, "a_user_whom_the_socket_does_not_let_in: skipped, needs root\n");
        return;
    }
    chmod(d.dir, 0755);
    pid_t pid = fork();
    if (pid == 0) {
        ring_client r;
        bool other = setgroups(0, NULL) == 0 && setgid(65534) == 0 && setuid(65534) == 0;
        _exit(other && !ring_client_connect(&r, attach_path) ? 0 : 1);
    }
    int status;
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    ck_assert_int_eq(status, 0);
}
END_TEST

// ---- starting and stopping

START_TEST(rings_may_be_off) {
    static const char *const flags[] = {"--set", "server.attach_socket=none", NULL};
    ring_client r;
    e2e_client c;
    start(flags);
    ck_assert(!ring_client_connect(&r, attach_path));
    e2e_connect(&c, d.url);
    char *hello = e2e_json(&c, PROTO_HELLO, "{}");
    ck_assert_ptr_nonnull(strstr(hello, "\"attach_socket\":null"));
    free(hello);
    e2e_close(&c);
    teardown();
}
END_TEST

START_TEST(the_attach_socket_may_be_elsewhere) {
    char flag[160];
    e2e_daemon probe;
    e2e_dir(&probe);
    snprintf(flag, sizeof(flag), "server.attach_socket=%s/rings", probe.dir);
    const char *const flags[] = {"--set", flag, NULL};
    ring_client r;
    start(flags);
    ck_assert(!ring_client_connect(&r, attach_path));
    snprintf(attach_path, sizeof(attach_path), "%s/rings", probe.dir);
    open_ring(&r);
    ring_client_close(&r);
    teardown();
    ck_assert_int_ne(access(attach_path, F_OK), 0);
    probe.out = -1;
    e2e_remove(&probe);
}
END_TEST

START_TEST(a_path_that_is_taken_ends_the_start) {
    e2e_daemon second = d;
    char flag[160];
    snprintf(flag, sizeof(flag), "server.attach_socket=%s", attach_path);
    snprintf(second.url, sizeof(second.url), "ipc://%s/other", d.dir);
    e2e_try_start(&second, (const char *const[]){"--set", flag, NULL});
    ck_assert_int_eq(e2e_wait(&second, 10000), 1);
    close(second.out);
    ring_client r;
    open_ring(&r);
    ring_client_close(&r);
}
END_TEST

// exec_with_socket runs a daemon as systemd would, with a socket named attach.
static _Noreturn void exec_with_socket(int fd, const char *url) {
    char pid[16];
    snprintf(pid, sizeof(pid), "%d", (int)getpid());
    setenv("LISTEN_PID", pid, 1);
    setenv("LISTEN_FDS", "1", 1);
    setenv("LISTEN_FDNAMES", "attach", 1);
    dup2(fd, 3);
    execl(ATTND_BINARY, "attnd", "--no-keeper", "--listen", url, "--set", "cache.memory=64MiB",
          "--set", "server.log_level=error", NULL);
    _exit(127);
}

START_TEST(a_socket_may_be_handed_over) {
    e2e_daemon a;
    e2e_dir(&a);
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    snprintf(addr.sun_path, sizeof(addr.sun_path), "%s/given", a.dir);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
    ck_assert_int_eq(listen(fd, 8), 0);
    a.pid = fork();
    if (a.pid == 0) {
        exec_with_socket(fd, a.url);
    }
    ring_client r; // it waits in the socket's queue until the daemon is there
    snprintf(attach_path, sizeof(attach_path), "%s", addr.sun_path);
    open_ring(&r);
    ring_client_close(&r);
    kill(a.pid, SIGTERM);
    ck_assert_int_eq(e2e_wait(&a, 10000), 0);
    ck_assert_int_eq(access(addr.sun_path, F_OK), 0); // not the daemon's to remove
    close(fd);
    a.out = -1;
    e2e_remove(&a);
}
END_TEST

START_TEST(a_daemon_that_drains_gives_no_rings_and_ends) {
    ring_client r, late;
    uint32_t model;
    start(NULL);
    open_ring(&r);
    step_body body = one_token(0, open_seq(&r, &model));
    body.step.model = model;
    const void *reply;
    ATTND_CK_OK(ring_client_call(&r, PROTO_STEP, 20, &body, sizeof(body), &reply));
    proto_cancel cancel = {.step = 0};
    memcpy(&cancel.step, reply, 8);
    kill(d.pid, SIGTERM); // an open step holds it
    while (!e2e_log_has(&d, "draining")) {
        e2e_sleep_ms(1);
    }
    ATTND_CK_ERR(ring_client_open(&late, attach_path, 16, DATA_BYTES), ATTND_ESHUTDOWN);
    ring_client_close(&late);
    ATTND_CK_ERR(call(&r, PROTO_STEP, 21, &body, sizeof(body)), ATTND_ESHUTDOWN);
    ATTND_CK_OK(call(&r, PROTO_CANCEL, 22, &cancel, sizeof(cancel)));
    ck_assert(ring_client_closed(&r, 5000));
    ck_assert_int_eq(e2e_wait(&d, 5000), 0);
    ck_assert_int_ne(access(attach_path, F_OK), 0);
    ring_client_close(&r);
    e2e_remove(&d);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_ring");
    TCase *tc = tcase_create("ring");
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, hello_names_the_attach_socket);
    tcase_add_test(tc, the_answer_tells_where_things_lie);
    tcase_add_test(tc, a_bad_request_for_a_ring_says_why);
    tcase_add_test(tc, a_packet_of_another_size_is_no_request);
    tcase_add_test(tc, hello_comes_first);
    tcase_add_test(tc, a_ring_joins_a_session);
    tcase_add_test(tc, the_loss_of_the_ring_ends_the_session);
    tcase_add_test(tc, the_loss_of_the_nng_connection_closes_the_ring);
    tcase_add_test(tc, the_daemon_sleeps_and_a_doorbell_wakes_it);
    tcase_add_test(tc, a_daemon_that_sleeps_uses_no_processor);
    tcase_add_test(tc, a_client_that_waits_is_woken_by_its_completion);
    tcase_add_test(tc, doorbells_that_nobody_needs_do_no_harm);
    tcase_add_test(tc, a_user_whom_the_socket_does_not_let_in_cannot_connect);
    tcase_add_test(tc, a_path_that_is_taken_ends_the_start);
    suite_add_tcase(s, tc);
    TCase *own = tcase_create("daemons of their own");
    tcase_set_timeout(own, 60);
    tcase_add_test(own, a_daemon_may_never_spin);
    tcase_add_test(own, requests_past_the_limit_in_flight_are_busy);
    tcase_add_test(own, rings_and_their_memory_have_limits);
    tcase_add_test(own, a_connection_without_hello_is_closed);
    tcase_add_test(own, a_message_above_the_limit_is_refused);
    tcase_add_loop_test(own, another_user_is_refused_unless_allowed, 0, 2);
    tcase_add_test(own, rings_may_be_off);
    tcase_add_test(own, the_attach_socket_may_be_elsewhere);
    tcase_add_test(own, a_socket_may_be_handed_over);
    tcase_add_test(own, a_daemon_that_drains_gives_no_rings_and_ends);
    suite_add_tcase(s, own);
    return s;
}

CHECK_MAIN(suite)
