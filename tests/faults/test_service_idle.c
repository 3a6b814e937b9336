// 64 clients whose attend_alls never become ready, and one that works: it keeps its rate, and they
// cost the daemon next to nothing.  With a device of host memory: ATTND_E2E_BINARY names
// attnd_fake.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/clock.h"
#include "tests/e2e/service_client.h"

enum { IDLE = 64, WINDOWS = 7, WINDOW_MS = 200, TRIES = 8, MIB = 1 << 20 };

static const char *const flags[] = {"--set", "cache.memory=64MiB", "--set", "cache.slab=1MiB",
                                    NULL};
static e2e_daemon d;
static char path[128];

// runtime is a client with one sequence and a step that it attends again and again: an attend may
// be repeated until commit.
typedef struct runtime {
    service_client s;
    play_model m;
    play_step step;
    proto_attend_all all;
} runtime;

static void start(runtime *r) {
    static const char json[] =
        "{\"name\": \"m\", \"digest\": "
        "\"0000000000000000000000000000000000000000000000000000000000000000\", \"dtype\": "
        "\"f32\", \"layers\": 2, \"q_heads\": 4, \"kv_heads\": 2, \"head_dim\": 32}";
    const void *reply;
    struct {
        proto_step step;
        proto_step_seq seq;
    } body = {.step = {.num_seqs = 1}, .seq = {.new_len = 1}};
    memset(r, 0, sizeof(*r));
    service_open(&r->s, path, MIB / 16, 2);
    ring_client *ring = &r->s.ring;
    ATTND_CK_OK(ring_client_call(ring, PROTO_MODEL_OPEN, ++r->s.id, json, strlen(json), &reply));
    body.step.model = (uint32_t)e2e_number(reply, "model");
    proto_model create = {.model = body.step.model};
    ATTND_CK_OK(
        ring_client_call(ring, PROTO_SEQ_CREATE, ++r->s.id, &create, sizeof(create), &reply));
    memcpy(&body.seq.seq, reply, 8);
    ATTND_CK_OK(ring_client_call(ring, PROTO_STEP, ++r->s.id, &body, sizeof(body), &reply));
    r->m = play_tiny();
    r->step = (play_step){.model = &r->m, .rows = 1, .new_rows = 1};
    memcpy(&r->step.handle, reply, 8);
    r->all = service_layout(&r->step, 0, 0);
}

// work attends all layers as often as it can for a window, and returns how often.
static uint32_t work(runtime *r) {
    uint32_t num = 0;
    for (uint64_t until = e2e_now_ms() + WINDOW_MS; e2e_now_ms() < until; num++) {
        service_send(&r->s, &r->all, sizeof(r->all));
        for (uint32_t i = 0; i < r->m.layers; i++) {
            service_raise(&r->s, i);
            ck_assert(service_lower(&r->s, i, SERVICE_WAIT_MS));
        }
        ATTND_CK_OK(service_recv(&r->s, NULL));
    }
    return num;
}

static int by_size(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static uint32_t median_rate(runtime *r) {
    uint32_t rates[WINDOWS];
    for (int i = 0; i < WINDOWS; i++) {
        rates[i] = work(r);
    }
    qsort(rates, WINDOWS, sizeof(rates[0]), by_size);
    return rates[WINDOWS / 2];
}

// busy_ms is the processor time that the daemon has taken.
static double busy_ms(void) {
    char name[64], line[1024];
    unsigned long user, system;
    snprintf(name, sizeof(name), "/proc/%d/stat", (int)d.pid);
    FILE *f = fopen(name, "r");
    ck_assert(f && fgets(line, sizeof(line), f));
    fclose(f);
    ck_assert_int_eq(sscanf(strrchr(line, ')'),
                            ") %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user,
                            &system),
                     2);
    return (double)(user + system) * 1000 / (double)sysconf(_SC_CLK_TCK);
}

// waits_cost_nothing asserts that 64 calls that wait take the daemon no time.
static void waits_cost_nothing(void) {
    e2e_sleep_ms(300); // cold by now
    double before = busy_ms();
    e2e_sleep_ms(1000);
    double busy = busy_ms() - before;
    ck_assert_msg(busy <= 100, "64 calls that wait take %g ms a second", busy);
}

// The rate alone is taken before and after, and the lower one counts: others use this machine, too.
START_TEST(sessions_that_never_become_ready_cost_nothing) {
    static runtime worker, idle[IDLE];
    e2e_start(&d, flags);
    snprintf(path, sizeof(path), "%s.attach", d.path);
    start(&worker);
    uint32_t alone = median_rate(&worker), beside = 0;
    bool good = false;
    for (int try = 0; try < TRIES && !good; try++) {
        uint32_t before = try == 0 ? median_rate(&worker) : alone;
        for (int i = 0; i < IDLE; i++) {
            start(&idle[i]);
            service_send(&idle[i].s, &idle[i].all, sizeof(idle[i].all));
        }
        beside = median_rate(&worker);
        if (try == 0) {
            waits_cost_nothing();
        }
        for (int i = 0; i < IDLE; i++) {
            service_close(&idle[i].s);
        }
        alone = median_rate(&worker);
        good = beside >= 0.95 * (before < alone ? before : alone);
    }
    printf("%u calls in %d ms alone, %u beside %d that wait\n", alone, WINDOW_MS, beside, IDLE);
    ck_assert_msg(good, "%u calls beside %d that wait, %u alone", beside, IDLE, alone);
    service_close(&worker.s);
    e2e_stop(&d);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("service_idle");
    TCase *tc = tcase_create("idle");
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, sessions_that_never_become_ready_cost_nothing);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
