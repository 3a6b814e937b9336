// kill -9 of a client with a region at every stage of an attend_all.  Within a second nothing of it
// is left in the daemon: session, step, blocks, ring, region, flags, descriptors; and the client
// beside it goes on.  With a device of host memory: ATTND_E2E_BINARY names attnd_fake.  (The
// daemon's death is a matter of clients: see their tests.)
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/e2e/service_client.h"

typedef enum stage {
    ASKED,    // the answer is not read, nor its descriptors
    MAPPED,   // region and flags
    ARMED,    // the call waits for its first flag
    RAISED,   // the flag is raised, and the call was never sent
    BETWEEN,  // the first layer is done, and the second not raised
    RUNNING,  // a long prefill reads and writes the region
    UNREAD,   // the reply is there
    DRAINING, // the call was canceled, and its flags never come
    NUM_STAGES,
} stage;

enum { LAYERS = 4, LONG = 1500, REGION_BYTES = 16 << 20, FLAGS = 64 };

static const char *const flags[] = {"--set", "cache.memory=64MiB", "--set", "cache.slab=1MiB",
                                    NULL};
static char path[128];

// victim_step opens a model, a sequence and a step of so many tokens.
static uint64_t victim_step(service_client *s, uint32_t tokens) {
    static const char json[] =
        "{\"name\": \"victim\", \"digest\": "
        "\"0000000000000000000000000000000000000000000000000000000000000000\", \"dtype\": "
        "\"f32\", \"layers\": 4, \"q_heads\": 4, \"kv_heads\": 2, \"head_dim\": 32}";
    const void *reply;
    struct {
        proto_step step;
        proto_step_seq seq;
    } body = {.step = {.num_seqs = 1}, .seq = {.new_len = tokens}};
    ring_client *r = &s->ring;
    ATTND_CK_OK(ring_client_call(r, PROTO_MODEL_OPEN, ++s->id, json, strlen(json), &reply));
    body.step.model = (uint32_t)e2e_number(reply, "model");
    proto_model create = {.model = body.step.model};
    ATTND_CK_OK(ring_client_call(r, PROTO_SEQ_CREATE, ++s->id, &create, sizeof(create), &reply));
    memcpy(&body.seq.seq, reply, 8);
    ATTND_CK_OK(ring_client_call(r, PROTO_STEP, ++s->id, &body, sizeof(body), &reply));
    uint64_t step;
    memcpy(&step, reply, 8);
    return step;
}

static void live(stage until) {
    service_client s;
    if (until == ASKED) {
        const struct {
            proto_attach attach;
            proto_region_ask region;
        } packet = {{.magic = PROTO_RING_MAGIC,
                     .version = PROTO_VERSION,
                     .flags = PROTO_ATTACH_REGION,
                     .entries = 16,
                     .data_bytes = 4096},
                    {.bytes = REGION_BYTES, .num_flags = FLAGS}};
        ck_assert(ring_client_connect(&s.ring, path));
        ck_assert_int_eq(write(s.ring.fd, &packet, sizeof(packet)), sizeof(packet));
        return;
    }
    service_open(&s, path, REGION_BYTES, FLAGS);
    if (until == MAPPED) {
        return;
    }
    uint32_t tokens = until == RUNNING ? LONG : 1;
    play_model shape = {
        .layers = LAYERS, .q_heads = 4, .kv_heads = 2, .head_dim = 32, .v_head_dim = 32};
    play_step step = {.model = &shape, .rows = tokens, .new_rows = tokens};
    step.handle = victim_step(&s, tokens);
    proto_attend_all all = service_layout(&step, 0, 0);
    proto_cancel cancel = {.step = step.handle};
    if (until != ARMED) {
        service_raise(&s, 0);
    }
    if (until != RAISED) {
        service_send(&s, &all, sizeof(all));
    }
    switch (until) {
    case BETWEEN:
        ck_assert(service_lower(&s, 0, SERVICE_WAIT_MS));
        break;
    case UNREAD:
        for (uint32_t i = 0; i < LAYERS; i++) {
            service_raise(&s, i);
            ck_assert(service_lower(&s, i, SERVICE_WAIT_MS));
        }
        while (proto_ring_load(&s.ring.head->cq_tail) == s.ring.cq_head) {
            e2e_sleep_ms(1);
        }
        break;
    case DRAINING:
        ck_assert(service_lower(&s, 0, SERVICE_WAIT_MS));
        proto_write_header(ring_client_data(&s.ring, 0), PROTO_CANCEL, ++s.id, ATTND_OK,
                           PROTO_BODY + sizeof(cancel));
        memcpy(ring_client_data(&s.ring, PROTO_BODY), &cancel, sizeof(cancel));
        ring_client_submit(&s.ring, 0, PROTO_BODY + sizeof(cancel), SERVICE_RING_BYTES / 2, 1024,
                           s.id);
        ring_client_bell(&s.ring);
        while (__atomic_load_n(&s.head->error_epoch, __ATOMIC_ACQUIRE) == 0) {
            e2e_sleep_ms(1);
        }
        break;
    default:
        break;
    }
}

// fork_victim starts a process that lives up to a stage, says so, and waits to be killed.
static pid_t fork_victim(stage until, int *ready) {
    int fds[2];
    ck_assert_int_eq(pipe(fds), 0);
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(fds[0]);
        live(until);
        if (write(fds[1], "x", 1) == 1) {
            pause();
        }
        _exit(0);
    }
    close(fds[1]);
    *ready = fds[0];
    return pid;
}

static uint32_t count_maps(pid_t pid, const char *what) {
    char name[64], line[512];
    uint32_t num = 0;
    snprintf(name, sizeof(name), "/proc/%d/maps", (int)pid);
    FILE *f = fopen(name, "r");
    ck_assert(f);
    while (fgets(line, sizeof(line), f)) {
        num += strstr(line, what) != NULL;
    }
    fclose(f);
    return num;
}

static void token(e2e_client *c, service_client *s, play_seq *seq) {
    play_step step;
    play_part part = {.seq = seq, .new_len = 2};
    ATTND_CK_OK(play_step_open(c, seq->model, &part, 1, 0, &step, NULL));
    proto_attend_all all = service_layout(&step, 0, 0);
    service_send(s, &all, sizeof(all));
    service_layers(s, &step, &all, 0, seq->model->layers);
    ATTND_CK_OK(service_recv(s, NULL));
    ATTND_CK_OK(play_commit(c, &step, NULL, NULL));
}

START_TEST(a_client_killed_at_any_stage_of_a_call_leaves_nothing) {
    e2e_daemon d = {.dir = ""};
    e2e_client c;
    service_client s;
    int ready;
    char byte;
    e2e_start(&d, flags);
    snprintf(path, sizeof(path), "%s.attach", d.path);
    pid_t victim = fork_victim((stage)_i, &ready);
    ck_assert_int_eq(read(ready, &byte, 1), 1);
    e2e_connect(&c, d.url);
    char *hello = e2e_json(&c, PROTO_HELLO, "{}");
    c.id = 100;
    service_join(&s, path, hello, 1 << 20, 2);
    play_model m = play_tiny();
    play_seq seq;
    play_open(&c, &m);
    play_create(&c, &m, &seq);
    ck_assert_double_eq(e2e_stat(&c, "service.regions"), 2);
    ck_assert_double_eq(e2e_stat(&c, "service.waiting"),
                        _i == ARMED || _i == BETWEEN || _i == RUNNING);
    ck_assert_double_eq(e2e_stat(&c, "service.draining"), _i == DRAINING);
    ck_assert_uint_eq(count_maps(d.pid, "fake-region"), 2);
    int fds = ring_client_count_fds(d.pid);
    kill(victim, SIGKILL);
    ck_assert_int_eq(waitpid(victim, NULL, 0), victim);
    token(&c, &s, &seq);
    e2e_await_stat(&c, "sessions", 1, 1000);
    e2e_await_stat(&c, "service.regions", 1, 1000);
    ck_assert_double_eq(e2e_stat(&c, "service.region_bytes"), (double)s.given.bytes);
    ck_assert_double_eq(e2e_stat(&c, "service.waiting"), 0);
    ck_assert_double_eq(e2e_stat(&c, "service.draining"), 0);
    ck_assert_double_eq(e2e_stat(&c, "steps"), 0);
    ck_assert_double_eq(e2e_stat(&c, "sequences"), 1);
    ck_assert_double_eq(e2e_stat(&c, "accounting_mismatches"), 0);
    ck_assert_double_eq(e2e_stat(&c, "transport.rings.rings"), 1);
    ck_assert_uint_eq(count_maps(d.pid, "fake-region"), 1);
    ck_assert_uint_eq(count_maps(d.pid, "attnd-flags"), 1);
    ck_assert_int_eq(ring_client_count_regions(d.pid), 1);
    ck_assert_int_eq(ring_client_count_fds(d.pid), fds - 3); // its socket, region, process
    token(&c, &s, &seq);
    play_free(&c, &seq);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 0);
    service_close(&s);
    e2e_close(&c);
    free(hello);
    close(ready);
    e2e_stop(&d);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("service_kill");
    TCase *tc = tcase_create("kill");
    tcase_set_timeout(tc, 120);
    tcase_add_loop_test(tc, a_client_killed_at_any_stage_of_a_call_leaves_nothing, 0, NUM_STAGES);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
