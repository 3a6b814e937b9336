// bench_ring times attends over rings: the round trip of one client with one in flight, for empty
// ones (zero rows in an open step: every check of a real one, no kernel) and for one token behind
// some others; then what 64 clients with 16 empty ones in flight each get through.  Clients are
// processes.  A line a case:
//     ring attend, kv_len <n> | 1 client x 1 | p50 <n> us | p99 <n> us
//     ring attend, kv_len 0 | 64 clients x 16 | <n> thousand a second
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "proto/proto_msg.h"
#include "tests/e2e/ring_client.h"

enum {
    WARM_UP = 1000,
    ROUND_TRIPS = 10000,
    P99 = ROUND_TRIPS / 100 * 99,
    REPETITIONS = 11,
    SLOT = 512,         // of a message or reply without tensors
    TOKEN_BYTES = 1024, // of q, k, v
    MAX_FLIGHT = 64,
    MAX_CLIENTS = 64
};

static const char model[] =
    "{\"name\": \"m\", \"digest\": "
    "\"0000000000000000000000000000000000000000000000000000000000000000\", \"dtype\": \"f32\", "
    "\"layers\": 1, \"q_heads\": 4, \"kv_heads\": 2, \"head_dim\": 32}";

// shared is what the processes tell each other.
typedef struct shared {
    volatile int ready, go, stop;
    uint64_t done[MAX_CLIENTS];
} shared;

typedef struct bench {
    ring_client ring;
    uint64_t step, id;
    uint32_t tokens; // of the step
} bench;

static void need(attnd_err err, const char *what) {
    if (err) {
        fprintf(stderr, "%s: %s\n", what, attnd_errname(err));
        exit(1);
    }
}

// open_seq opens a session, a model and a sequence.
static proto_step_seq open_seq(bench *b, const char *path, uint32_t *model_id) {
    const void *reply;
    proto_step_seq seq = {.seq = 0};
    need(ring_client_open(&b->ring, path, 128, 32 << 20), "attach");
    need(ring_client_call(&b->ring, PROTO_HELLO, ++b->id, "{}", 2, NULL), "hello");
    need(ring_client_call(&b->ring, PROTO_MODEL_OPEN, ++b->id, model, strlen(model), &reply),
         "model_open");
    *model_id = (uint32_t)strtoul(strstr(reply, "\"model\":") + strlen("\"model\":"), NULL, 10);
    proto_model m = {.model = *model_id};
    need(ring_client_call(&b->ring, PROTO_SEQ_CREATE, ++b->id, &m, sizeof(m), &reply), "create");
    memcpy(&seq.seq, reply, sizeof(seq.seq));
    return seq;
}

static void step(bench *b, uint32_t model_id, const proto_step_seq *seq) {
    const void *reply;
    struct {
        proto_step step;
        proto_step_seq seq;
    } body = {.step = {.model = model_id, .num_seqs = 1}, .seq = *seq};
    need(ring_client_call(&b->ring, PROTO_STEP, ++b->id, &body, sizeof(body), &reply), "step");
    memcpy(&b->step, reply, sizeof(b->step));
    b->tokens = seq->new_len;
}

static void send_attend(bench *b, uint32_t place) {
    uint64_t room = SLOT + (uint64_t)b->tokens * TOKEN_BYTES, at = 2 * room * place;
    uint8_t *msg = ring_client_data(&b->ring, at);
    uint32_t q = 104, k = q + b->tokens * 512, v = k + b->tokens * 256;
    proto_attend body = {.step = b->step};
    size_t bytes = PROTO_BODY + sizeof(body);
    if (b->tokens) {
        body.q.off = q;
        body.k.off = k;
        body.v.off = v;
        bytes = v + b->tokens * 256;
    }
    proto_write_header(msg, PROTO_ATTEND, ++b->id, ATTND_OK, bytes);
    memcpy(msg + PROTO_BODY, &body, sizeof(body));
    ring_client_submit(&b->ring, at, (uint32_t)bytes, at + room, (uint32_t)room, place);
}

static uint32_t take_attend(bench *b) {
    proto_ring_complete done;
    if (!ring_client_wait(&b->ring, &done, 10000)) {
        need(ATTND_ECONN, "attend");
    }
    need((attnd_err)done.status, "attend");
    return (uint32_t)done.user;
}

// open_step leaves a step open: of one token behind kv_len - 1 others, or of no rows.
static void open_step(bench *b, const char *path, uint32_t kv_len) {
    uint32_t model_id = 0;
    proto_step_seq seq = open_seq(b, path, &model_id);
    if (kv_len > 1) {
        struct {
            proto_commit commit;
            proto_commit_seq seq;
        } body = {.commit = {.num_seqs = 1}, .seq = {.accepted = kv_len - 1}};
        seq.new_len = kv_len - 1;
        step(b, model_id, &seq);
        send_attend(b, 0);
        ring_client_bell(&b->ring);
        take_attend(b);
        body.commit.step = b->step;
        need(ring_client_call(&b->ring, PROTO_COMMIT, ++b->id, &body, sizeof(body), NULL),
             "commit");
    }
    seq.new_len = kv_len > 0;
    step(b, model_id, &seq);
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void round_trips(const char *path, uint32_t kv_len) {
    static double us[ROUND_TRIPS], p50[REPETITIONS], p99[REPETITIONS];
    bench b = {.id = 0};
    open_step(&b, path, kv_len);
    for (int r = 0; r < REPETITIONS; r++) {
        for (int i = -WARM_UP; i < ROUND_TRIPS; i++) {
            double begin = now_us();
            send_attend(&b, 0);
            ring_client_bell(&b.ring);
            take_attend(&b);
            us[i < 0 ? 0 : i] = now_us() - begin;
        }
        qsort(us, ROUND_TRIPS, sizeof(us[0]), by_value);
        p50[r] = us[ROUND_TRIPS / 2];
        p99[r] = us[P99];
    }
    qsort(p50, REPETITIONS, sizeof(p50[0]), by_value);
    qsort(p99, REPETITIONS, sizeof(p99[0]), by_value);
    printf("ring attend, kv_len %u | 1 client x 1 | p50 %.2f us (%.2f-%.2f) | p99 %.2f us "
           "(%.2f-%.2f)\n",
           kv_len, p50[REPETITIONS / 2], p50[0], p50[REPETITIONS - 1], p99[REPETITIONS / 2], p99[0],
           p99[REPETITIONS - 1]);
    ring_client_close(&b.ring);
}

static void client(shared *s, int idx, const char *path, uint32_t flight) {
    bench b = {.id = 0};
    open_step(&b, path, 0);
    b.ring.spin_us = 0; // there are more clients than processors
    __atomic_add_fetch(&s->ready, 1, __ATOMIC_SEQ_CST);
    while (!s->go) {
        usleep(1000);
    }
    for (uint32_t i = 0; i < flight; i++) {
        send_attend(&b, i);
    }
    uint64_t done = 0;
    while (!s->stop) {
        uint32_t places[MAX_FLIGHT], num = 0;
        proto_ring_complete c;
        ring_client_bell(&b.ring);
        places[num++] = take_attend(&b);
        while (num < flight && ring_client_take(&b.ring, &c)) {
            need((attnd_err)c.status, "attend");
            places[num++] = (uint32_t)c.user;
        }
        for (uint32_t i = 0; i < num; i++) {
            send_attend(&b, places[i]);
        }
        done += num;
        s->done[idx] = done;
    }
    _exit(0);
}

static uint64_t sum(const shared *s, int clients) {
    uint64_t total = 0;
    for (int i = 0; i < clients; i++) {
        total += s->done[i];
    }
    return total;
}

static void throughput(const char *path, int clients, uint32_t flight, int seconds) {
    shared *s = mmap(NULL, sizeof(*s), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t pids[MAX_CLIENTS];
    fflush(stdout);
    for (int i = 0; i < clients; i++) {
        pids[i] = fork();
        if (pids[i] == 0) {
            client(s, i, path, flight);
        }
    }
    while (s->ready < clients) {
        usleep(1000);
    }
    s->go = 1;
    usleep(200000);
    uint64_t before = sum(s, clients);
    double begin = now_us();
    sleep((unsigned)seconds);
    double rate = (double)(sum(s, clients) - before) / (now_us() - begin) * 1e3;
    s->stop = 1;
    for (int i = 0; i < clients; i++) {
        waitpid(pids[i], NULL, 0);
    }
    uint64_t least = UINT64_MAX, most = 0;
    for (int i = 0; i < clients; i++) {
        least = s->done[i] < least ? s->done[i] : least;
        most = s->done[i] > most ? s->done[i] : most;
    }
    printf("ring attend, kv_len 0 | %d clients x %u | %.0f thousand a second | least %llu, most "
           "%llu of "
           "a client\n",
           clients, flight, rate, (unsigned long long)least, (unsigned long long)most);
    munmap(s, sizeof(*s));
}

// start runs a daemon in dir and waits until rings can be attached.
static pid_t start(const char *dir, const char *spin_us, const char *set) {
    char url[128], spin[64], path[128];
    snprintf(url, sizeof(url), "ipc://%s/s", dir);
    snprintf(path, sizeof(path), "%s/s.attach", dir);
    snprintf(spin, sizeof(spin), "server.spin_us=%s", spin_us);
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        freopen("/dev/null", "w", stdout);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        execl(ATTND_BINARY, "attnd", "--no-keeper", "--listen", url, "--set", "cache.memory=64MiB",
              "--set", spin, "--set", "server.log_level=warn", "--set", set, NULL);
        _exit(127);
    }
    ring_client probe;
    while (!ring_client_connect(&probe, path)) {
        if (waitpid(pid, NULL, WNOHANG) == pid) {
            need(ATTND_ECONN, "attnd");
        }
        usleep(1000);
    }
    ring_client_close(&probe);
    return pid;
}

int main(int argc, char **argv) {
    char dir[] = "/tmp/attnd_bench_XXXXXX", path[128];
    int seconds = argc > 2 ? (int)strtol(argv[2], NULL, 10) : 3;
    if (!mkdtemp(dir)) {
        need(ATTND_EIO, dir);
    }
    pid_t pid = start(dir, argc > 1 ? argv[1] : "50", argc > 3 ? argv[3] : "cache.slab=32MiB");
    snprintf(path, sizeof(path), "%s/s.attach", dir);
    round_trips(path, 0);
    round_trips(path, 1);
    round_trips(path, 64);
    round_trips(path, 256);
    round_trips(path, 1024);
    throughput(path, 1, 16, seconds);
    throughput(path, 8, 16, seconds);
    throughput(path, 64, 16, seconds);
    kill(pid, SIGTERM);
    waitpid(pid, NULL, 0);
    rmdir(dir);
    return 0;
}
