// `attn-bench ipc`: what the hand-over costs.  Empty attends over NNG and over a ring, beside bare
// echoes of the same sizes in the same run, for 1 to 64 clients with 1 and 16 requests in flight.
//
// Clients and echoes are processes, forked before this one uses NNG, which does not survive it.  A
// client measures each request from its submission to its answer, in nanoseconds; of the times only
// those count that both began and ended while it was measured, of the rate all that ended.
//
// A round trip between processes that share a processor and one between processors that slept are
// two figures, and which one a run gets is the kernel's choice.  So all kinds of a case take turns,
// in several rounds, and of each the round with the middle p50 counts.
#include <cjson/cJSON.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "proto/hist.h"
#include "tests/load/bench_cmd.h"
#include "tests/load/bench_host.h"
#include "tests/load/bench_ipc_link.h"
#include "tests/load/bench_opts.h"

static const uint32_t client_counts[] = {1, 8, 64}, flights[] = {1, 16};

enum {
    NUM_KINDS = 5,
    NUM_COUNTS = sizeof(client_counts) / sizeof(client_counts[0]),
    NUM_FLIGHTS = sizeof(flights) / sizeof(flights[0]),
    NUM_CASES = NUM_KINDS * NUM_COUNTS * NUM_FLIGHTS,
    ROUNDS = 3, // of each case
    TRIES = 3,  // of a round in which nothing was answered: a host may stop its guest for a while
    WARM_UP_US = 150000,
};

typedef struct ipc_opts {
    const char *connect, *json;
    double seconds;
    uint32_t max_clients;
    bool help;
} ipc_opts;

typedef struct result {
    const bench_ipc_kind *kind;
    uint32_t clients, flight;
    double rate, p50_us, p99_us;      // of the median round
    double least_p50_us, most_p50_us; // of all rounds
} result;

// shared is what the processes of a case tell each other.
typedef struct shared {
    volatile int ready, stop;
    volatile int measuring;
    bool measured;                           // to the end
    attnd_hist hists[BENCH_IPC_MAX_CLIENTS]; // of nanoseconds
    uint64_t ended[BENCH_IPC_MAX_CLIENTS];   // while it was measured, whenever they began
} shared;

static const bench_ipc_kind *const kinds[NUM_KINDS] = {
    &bench_ipc_attend_nng,     &bench_ipc_attend_ring, &bench_ipc_echo_nng,
    &bench_ipc_echo_seqpacket, &bench_ipc_echo_ring,
};

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void *share(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    bench_ipc_must(p != MAP_FAILED, "mmap");
    return p;
}

static void play(const bench_ipc_kind *kind, const bench_ipc_env *env, uint32_t client, shared *s) {
    uint64_t begin[BENCH_IPC_MAX_FLIGHT];
    bool counts[BENCH_IPC_MAX_FLIGHT]; // began within the measured time
    void *link = kind->open(env, client);
    attnd_hist *hist = &s->hists[client];
    attnd_hist_init(hist);
    s->ended[client] = 0;
    __atomic_add_fetch(&s->ready, 1, __ATOMIC_SEQ_CST);
    for (uint32_t i = 0; i < env->flight; i++) {
        counts[i] = false;
        begin[i] = now_ns();
        kind->submit(link, i);
    }
    while (!s->stop) {
        uint32_t place = kind->take(link);
        uint64_t now = now_ns();
        s->ended[client] += s->measuring != 0;
        if (counts[place] && s->measuring) {
            attnd_hist_record(hist, now - begin[place]);
        }
        begin[place] = now;
        counts[place] = s->measuring != 0;
        kind->submit(link, place);
    }
}

static pid_t start_process(void) {
    pid_t parent = getpid(), pid = fork();
    bench_ipc_must(pid >= 0, "fork");
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) {
            _Exit(1);
        }
    }
    return pid;
}

static void end_processes(const pid_t *pids, uint32_t num) {
    for (uint32_t i = 0; i < num; i++) {
        kill(pids[i], SIGKILL);
    }
    for (uint32_t i = 0; i < num; i++) {
        waitpid(pids[i], NULL, 0);
    }
}

// await_ready waits until *ready is num; false when one of the processes ended before.
static bool await_ready(const volatile int *ready, int num, const pid_t *pids, uint32_t num_pids) {
    while (*ready < num) {
        for (uint32_t i = 0; i < num_pids; i++) {
            if (waitpid(pids[i], NULL, WNOHANG) != 0) {
                return false;
            }
        }
        usleep(1000);
    }
    return true;
}

static void read_result(const shared *s, double seconds, result *r) {
    static attnd_hist all;
    uint64_t ended = 0;
    attnd_hist_init(&all);
    for (uint32_t i = 0; i < r->clients; i++) {
        attnd_hist_merge(&all, &s->hists[i]);
        ended += s->ended[i];
    }
    r->rate = (double)ended / seconds;
    r->p50_us = (double)attnd_hist_quantile(&all, 0.5) / 1e3;
    r->p99_us = (double)attnd_hist_quantile(&all, 0.99) / 1e3;
}

// run_case measures r->kind; false when a client failed.
static bool run_case(const bench_ipc_env *base, double seconds, shared *s, result *r) {
    pid_t pids[BENCH_IPC_MAX_CLIENTS];
    bench_ipc_env env = *base;
    env.flight = r->flight;
    env.spin_us = r->clients > 1 ? -1 : 0; // more clients than processors
    s->ready = s->stop = s->measuring = 0;
    for (uint32_t i = 0; i < r->clients; i++) {
        pids[i] = start_process();
        if (pids[i] == 0) {
            play(r->kind, &env, i, s);
            _Exit(0);
        }
    }
    bool good = await_ready(&s->ready, (int)r->clients, pids, r->clients);
    if (good) {
        usleep(WARM_UP_US);
        uint64_t begin = now_ns();
        s->measuring = 1;
        usleep((useconds_t)(seconds * 1e6));
        s->measuring = 0;
        double elapsed = (double)(now_ns() - begin) / 1e9;
        usleep(20000); // who records now has begun to before
        s->measured = true;
        read_result(s, elapsed, r);
        good = attnd_hist_count(&s->hists[0]) > 0 || r->rate > 0;
    }
    s->stop = 1;
    end_processes(pids, r->clients);
    return good;
}

// measure_round measures a kind once, with an echo of its own.
static bool measure_round(const bench_ipc_env *base, double seconds, shared *s, result *r) {
    pid_t echo = 0;
    volatile int *ready = share(sizeof(*ready));
    s->measured = false;
    memset(base->rings, 0, bench_ipc_rings_bytes());
    unlink(base->path);
    unlink(base->nng_url + strlen("ipc://"));
    if (r->kind->serve && (echo = start_process()) == 0) {
        r->kind->serve(base, ready);
        _Exit(1);
    }
    bool good =
        (!r->kind->serve || await_ready(ready, 1, &echo, 1)) && run_case(base, seconds, s, r);
    end_processes(&echo, r->kind->serve ? 1 : 0);
    munmap((void *)(uintptr_t)ready, sizeof(*ready));
    return good;
}

static int compare_p50(const void *a, const void *b) {
    double x = ((const result *)a)->p50_us, y = ((const result *)b)->p50_us;
    return (x > y) - (x < y);
}

// median makes the round with the middle p50 the result.
static result median(result rounds[ROUNDS]) {
    qsort(rounds, ROUNDS, sizeof(rounds[0]), compare_p50);
    result r = rounds[ROUNDS / 2];
    r.least_p50_us = rounds[0].p50_us;
    r.most_p50_us = rounds[ROUNDS - 1].p50_us;
    return r;
}

// measure_case measures all kinds for so many clients, in turns: what the host does meanwhile, and
// on which processors the kernel puts the processes, meets all alike.
static bool measure_case(const ipc_opts *o, const bench_ipc_env *base, uint32_t clients,
                         uint32_t flight, shared *s, result *results) {
    static result rounds[NUM_KINDS][ROUNDS];
    for (uint32_t round = 0; round < ROUNDS; round++) {
        for (uint32_t i = 0; i < NUM_KINDS; i++) {
            result *r = &rounds[i][round];
            *r = (result){.kind = kinds[i], .clients = clients, .flight = flight};
            bool good = false;
            for (int tries = 0; tries < TRIES && !good && (tries == 0 || s->measured); tries++) {
                good = measure_round(base, o->seconds / ROUNDS, s, r);
            }
            if (!good) {
                fprintf(stderr, "attn-bench ipc: %s, %u clients x %u: %s\n", r->kind->name, clients,
                        flight, s->measured ? "no answer in all the time" : "a process has ended");
                return false;
            }
        }
    }
    for (uint32_t i = 0; i < NUM_KINDS; i++) {
        const result *r = &results[i];
        results[i] = median(rounds[i]);
        printf("%3u clients x %2u  %-15s %9.0f/s  p50 %8.1f us (%.1f to %.1f)  p99 %9.1f us\n",
               r->clients, r->flight, r->kind->name, r->rate, r->p50_us, r->least_p50_us,
               r->most_p50_us, r->p99_us);
    }
    fflush(stdout);
    return true;
}

static bool write_json(const ipc_opts *o, const result *results, uint32_t num) {
    cJSON *doc = cJSON_CreateObject();
    cJSON_AddStringToObject(doc, "bench", "attn-bench ipc");
    cJSON_AddStringToObject(doc, "version", ATTND_VERSION);
    cJSON_AddNumberToObject(doc, "seconds", o->seconds);
    cJSON_AddNumberToObject(doc, "rounds", ROUNDS);
    cJSON_AddNumberToObject(doc, "request_bytes", BENCH_IPC_REQUEST_BYTES);
    cJSON_AddNumberToObject(doc, "reply_bytes", BENCH_IPC_REPLY_BYTES);
    bench_host host;
    bench_host_read(&host);
    cJSON_AddStringToObject(doc, "cpu", host.cpu);
    cJSON_AddNumberToObject(doc, "cpus", host.cpus);
    cJSON *cases = cJSON_AddArrayToObject(doc, "cases");
    for (uint32_t i = 0; i < num; i++) {
        cJSON *one = cJSON_CreateObject();
        cJSON_AddStringToObject(one, "what", results[i].kind->name);
        cJSON_AddNumberToObject(one, "clients", results[i].clients);
        cJSON_AddNumberToObject(one, "in_flight", results[i].flight);
        cJSON_AddNumberToObject(one, "per_second", results[i].rate);
        cJSON_AddNumberToObject(one, "p50_us", results[i].p50_us);
        cJSON_AddNumberToObject(one, "least_p50_us", results[i].least_p50_us);
        cJSON_AddNumberToObject(one, "most_p50_us", results[i].most_p50_us);
        cJSON_AddNumberToObject(one, "p99_us", results[i].p99_us);
        cJSON_AddItemToArray(cases, one);
    }
    char *text = cJSON_Print(doc);
    cJSON_Delete(doc);
    FILE *f = text ? fopen(o->json, "we") : NULL;
    bool good = f && fprintf(f, "%s\n", text) > 0;
    good = (f && fclose(f) == 0) && good;
    cJSON_free(text);
    if (!good) {
        fprintf(stderr, "attn-bench: cannot write %s\n", o->json);
    }
    return good;
}

static int measure(const ipc_opts *o) {
    char dir[] = P_tmpdir "/attn-bench-XXXXXX", url[64], path[64];
    static result results[NUM_CASES];
    uint32_t num = 0;
    bench_ipc_must(mkdtemp(dir) != NULL, "mkdtemp");
    snprintf(url, sizeof(url), "ipc://%s/n", dir);
    snprintf(path, sizeof(path), "%s/p", dir);
    bench_ipc_env env = {
        .url = o->connect, .nng_url = url, .path = path, .rings = share(bench_ipc_rings_bytes())};
    shared *s = share(sizeof(*s));
    bool good = true;
    for (uint32_t c = 0; c < NUM_COUNTS && client_counts[c] <= o->max_clients; c++) {
        for (uint32_t f = 0; f < NUM_FLIGHTS && good; f++) {
            good = measure_case(o, &env, client_counts[c], flights[f], s, &results[num]);
            num += NUM_KINDS;
        }
    }
    unlink(path);
    unlink(url + strlen("ipc://"));
    rmdir(dir);
    if (good && o->json) {
        good = write_json(o, results, num);
    }
    return good ? BENCH_EXIT_OK : BENCH_EXIT_FAILED;
}

int bench_ipc(int argc, char **argv) {
    ipc_opts o = {.seconds = 2, .max_clients = BENCH_IPC_MAX_CLIENTS};
    attnd_errinfo info = {0};
    bench_opt table[] = {
        {"connect", BENCH_OPT_TEXT, &o.connect, "URL", "ipc://PATH of a running daemon", 0, 0,
         false},
        {"seconds", BENCH_OPT_REAL, &o.seconds, "S",
         "of each case, in 3 rounds of which the median counts; default 2", 0.15, 60, false},
        {"max-clients", BENCH_OPT_U32, &o.max_clients, "N", "leave cases with more out; default 64",
         1, BENCH_IPC_MAX_CLIENTS, false},
        {"json", BENCH_OPT_TEXT, &o.json, "FILE", "write the result there too", 0, 0, false},
        {"help", BENCH_OPT_FLAG, &o.help, NULL, "print this", 0, 0, false},
        {NULL, BENCH_OPT_HEADING, NULL, NULL, NULL, 0, 0, false},
    };
    attnd_err err = bench_opts_parse(table, argc, argv, &info);
    if (!err && !o.help && !o.connect) {
        err = attnd_fail(&info, ATTND_EINVAL, "connect", "--connect URL is needed");
    }
    if (err) {
        fprintf(stderr, "attn-bench ipc: %s (attn-bench ipc --help lists the flags)\n", info.text);
        return BENCH_EXIT_USAGE;
    }
    if (o.help) {
        printf("usage: attn-bench ipc --connect URL [FLAGS]\n");
        bench_opts_help(table, stdout);
        return BENCH_EXIT_OK;
    }
    return measure(&o);
}
