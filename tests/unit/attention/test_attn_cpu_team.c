// The team: work is shared, ends with the call, and neither waking late nor stopping loses
// anything.
#include "attention/cpu/attn_cpu_team.h"

#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "tests/check_main.h"

enum { PIECES = 64 };

typedef struct job {
    _Atomic uint32_t next, done;
    _Atomic uint32_t calls;
    uint32_t wanted; // workers that must have come before anyone takes a piece
    uint32_t pieces[PIECES];
} job;

static void work(void *arg, uint32_t worker) {
    job *j = arg;
    uint32_t turns = 0;
    atomic_fetch_add(&j->calls, 1);
    while (atomic_load(&j->calls) < j->wanted) { // for ever, when a helper does not wake
        attn_cpu_relax(&turns);
    }
    for (uint32_t i; (i = atomic_fetch_add(&j->next, 1)) < PIECES;) {
        j->pieces[i]++;
        atomic_fetch_add(&j->done, 1);
    }
    while (worker == 0 && atomic_load(&j->done) < PIECES) {
        attn_cpu_relax(&turns);
    }
}

static attn_cpu_team *create(uint32_t workers) {
    attn_cpu_team *team = NULL;
    ATTND_CK_OK(attn_cpu_team_create(&team, workers));
    return team;
}

static void check_done(const job *j) {
    for (int i = 0; i < PIECES; i++) {
        ck_assert_uint_eq(j->pieces[i], 1);
    }
}

START_TEST(a_team_of_one_is_the_caller) {
    attn_cpu_team *team = create(1);
    job j = {0};
    attn_cpu_team_run(team, work, &j);
    check_done(&j);
    ck_assert_uint_eq(j.calls, 1);
    attn_cpu_team_free(team);
}
END_TEST

START_TEST(all_helpers_come) {
    attn_cpu_team *team = create(4);
    for (int n = 0; n < 100; n++) {
        job j = {.wanted = 4};
        attn_cpu_team_run(team, work, &j);
        check_done(&j);
        ck_assert_uint_eq(j.calls, 4);
    }
    attn_cpu_team_free(team);
}
END_TEST

// A job on the stack is gone when run returns: a helper that is late must not touch it.
START_TEST(no_helper_is_inside_after_the_call) {
    attn_cpu_team *team = create(4);
    for (int n = 0; n < 20000; n++) {
        job j = {0};
        attn_cpu_team_run(team, work, &j);
        check_done(&j);
        memset(&j, 0xff, sizeof(j));
    }
    attn_cpu_team_free(team);
}
END_TEST

START_TEST(sleeping_helpers_wake) {
    attn_cpu_team *team = create(3);
    for (int n = 0; n < 5; n++) {
        usleep(2000); // they have gone to sleep
        job j = {.wanted = 3};
        attn_cpu_team_run(team, work, &j);
        check_done(&j);
        ck_assert_uint_eq(j.calls, 3);
    }
    attn_cpu_team_free(team);
}
END_TEST

START_TEST(a_team_stops_at_any_time) {
    for (int n = 0; n < 200; n++) {
        attn_cpu_team *team = create(3);
        job j = {0};
        if (n % 2) {
            attn_cpu_team_run(team, work, &j);
        }
        usleep((useconds_t)(n % 5 * 30));
        attn_cpu_team_free(team);
    }
    attn_cpu_team_free(NULL);
}
END_TEST

// places is where the workers of a job were while all were inside.
typedef struct places {
    _Atomic uint32_t inside, taken;
    uint32_t workers;
    cpu_set_t seen;
} places;

static void note_place(void *arg, uint32_t worker) {
    places *p = arg;
    uint32_t turns = 0;
    atomic_fetch_add(&p->inside, 1);
    while (atomic_load(&p->inside) < p->workers || atomic_load(&p->taken) < worker) {
        attn_cpu_relax(&turns);
    }
    CPU_SET((size_t)sched_getcpu(), &p->seen); // one after the other
    atomic_fetch_add(&p->taken, 1);
    while (atomic_load(&p->taken) < p->workers) {
        attn_cpu_relax(&turns);
    }
}

// A team as large as the machine has each processor once, wherever the caller has gone.
START_TEST(workers_stand_on_processors_of_their_own) {
    cpu_set_t all;
    ck_assert_int_eq(sched_getaffinity(0, sizeof(all), &all), 0);
    uint32_t workers = (uint32_t)CPU_COUNT(&all);
    attn_cpu_team *team = create(workers);
    for (size_t processor = 0; processor < CPU_SETSIZE; processor++) {
        cpu_set_t here;
        CPU_ZERO(&here);
        CPU_SET(processor, &here);
        if (!CPU_ISSET(processor, &all) || sched_setaffinity(0, sizeof(here), &here) != 0) {
            continue;
        }
        places p = {.workers = workers};
        attn_cpu_team_run(team, note_place, &p);
        ck_assert(CPU_EQUAL(&p.seen, &all));
        usleep(1000); // now and then they sleep in between
    }
    attn_cpu_team_free(team);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("attn_cpu_team");
    TCase *c = tcase_create("team");
    tcase_set_timeout(c, 60);
    tcase_add_test(c, a_team_of_one_is_the_caller);
    tcase_add_test(c, all_helpers_come);
    tcase_add_test(c, no_helper_is_inside_after_the_call);
    tcase_add_test(c, sleeping_helpers_wake);
    tcase_add_test(c, a_team_stops_at_any_time);
    tcase_add_test(c, workers_stand_on_processors_of_their_own);
    suite_add_tcase(s, c);
    return s;
}

CHECK_MAIN(suite)
