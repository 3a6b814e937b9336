// kill_storm KILLS ATTND [FLAG...]: kills attnd's worker by SIGKILL at random moments, under three
// clients that change their sequences at random and know every byte of them (storm_client.h), over
// rings and messages.
//
// A kill comes a random number of changes after the last one, soon after a change was called for
// (within AIM_US, doubled at random), so that many meet the ledger in the middle of it; every fifth
// at a random moment of the start instead, when the clients re-attach.  One in four is followed by
// one or two more while the next worker recovers; the keeper gives the cache up after three starts
// that fail in a row, so three would be one too many.  Violations: anything that a client finds
// wrong; a line of the log about damage, wrong accounting or an empty start; blocks that are in use
// when all sequences are free.  Exit status 1, and the log, when there is one.
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "proto/clock.h"
#include "tests/faults/storm_client.h"

enum {
    CLIENTS = 3,
    MAX_FLAGS = 64,
    READY_MS = 20000,
    MAX_CALLS = 24,
    QUIET_MS = 400,
    AIM_US = 50,
    AIMS = 6
};

static const attnd_transport transports[CLIENTS] = {ATTND_TRANSPORT_RING, ATTND_TRANSPORT_NNG,
                                                    ATTND_TRANSPORT_RING};

typedef struct storm {
    char dir[64], url[96], log[96];
    pid_t keeper, worker; // the newest worker that was met
    int out;              // of the keeper and its workers
    uint64_t ready;       // how many workers have been
    uint64_t rng, kills, in_recovery;
    storm_client *clients[CLIENTS];
    pthread_t threads[CLIENTS];
    char why[CLIENTS][256];
    atomic_bool stop, failed;
    atomic_ulong progress;
} storm;

static storm st;

static void fail(const char *why) {
    printf("kill_storm: %s\nlog: %s\n", why, st.log);
    if (st.keeper > 0) {
        kill(st.keeper, SIGKILL);
    }
    fflush(stdout);
    _exit(1);
}

static uint32_t below(uint32_t limit) {
    st.rng ^= st.rng << 13;
    st.rng ^= st.rng >> 7;
    st.rng ^= st.rng << 17;
    return (uint32_t)((st.rng >> 32) * limit >> 32);
}

static void sleep_us(uint32_t us) {
    nanosleep(&(struct timespec){.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000}, NULL);
}

// ---- the daemon

static void start(char *const *flags) {
    static const char *const ours[] = {
        "--set", "cache.memory=2MiB",       "--set", "cache.slab=256KiB",
        "--set", "cache.max_sequences=64",  "--set", "cache.max_blocks=4096",
        "--set", "cache.max_seq_blocks=64", "--set", "limits.connections=8",
        "--set", "limits.in_flight=8",      "--set", "limits.rings=32",
        "--set", "limits.steps=16",         "--set", "limits.session_steps=8",
        "--set", "limits.step_seqs=8",      "--set", "server.reattach_timeout=10s",
        "--set", "server.restart_pause=0s"};
    enum { OURS = sizeof(ours) / sizeof(ours[0]) };
    const char *argv[MAX_FLAGS + OURS + 4];
    int num = 0, ends[2];
    argv[num++] = flags[0];
    argv[num++] = "--listen";
    argv[num++] = st.url;
    for (int i = 0; i < OURS; i++) {
        argv[num++] = ours[i];
    }
    for (int i = 1; flags[i] && i < MAX_FLAGS; i++) {
        argv[num++] = flags[i];
    }
    argv[num] = NULL;
    if (pipe2(ends, O_CLOEXEC) != 0 || (st.keeper = fork()) < 0) {
        fail("the daemon cannot be started");
    }
    if (st.keeper == 0) {
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        dup2(ends[1], STDOUT_FILENO);
        dup2(open(st.log, O_WRONLY | O_CREAT | O_APPEND, 0600), STDERR_FILENO);
        execv(argv[0], (char **)argv);
        _exit(127);
    }
    close(ends[1]);
    st.out = ends[0];
    fcntl(st.out, F_SETFL, O_NONBLOCK);
}

// count_ready reads what workers have said.
static void count_ready(void) {
    char text[4096];
    ssize_t n;
    while ((n = read(st.out, text, sizeof(text))) > 0) {
        for (ssize_t i = 0; i < n; i++) {
            st.ready += text[i] == '\n'; // one line each
        }
    }
    if (n == 0) {
        fail("the keeper has ended");
    }
}

// await_ready waits until more than `before` workers have been ready.
static void await_ready(uint64_t before) {
    uint64_t until = attnd_clock_ms() + READY_MS;
    for (count_ready(); st.ready <= before; count_ready()) {
        if (attnd_clock_ms() > until) {
            fail("not ready again");
        }
        poll(&(struct pollfd){.fd = st.out, .events = POLLIN}, 1, 100);
    }
}

// worker_now returns the keeper's child, 0 for none.
static pid_t worker_now(void) {
    char path[64];
    int pid = 0;
    snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)st.keeper, (int)st.keeper);
    FILE *f = fopen(path, "re");
    if (f) {
        pid = fscanf(f, "%d", &pid) == 1 ? pid : 0;
        fclose(f);
    }
    return pid;
}

// next_worker waits for a worker that is not the one that was killed.
static pid_t next_worker(void) {
    pid_t pid;
    uint64_t until = attnd_clock_ms() + READY_MS;
    while ((pid = worker_now()) == 0 || pid == st.worker) {
        if (attnd_clock_ms() > until) {
            fail("the keeper starts no worker");
        }
        sleep_us(100);
    }
    return pid;
}

static void kill_worker(pid_t pid) {
    st.worker = pid;
    kill(pid, SIGKILL);
}

// ---- the storm

static void *run_client(void *arg) {
    int i = *(int *)arg;
    if (!storm_client_run(st.clients[i], &st.stop, &st.progress, st.why[i])) {
        atomic_store(&st.failed, true);
    }
    return NULL;
}

static void start_clients(uint64_t seed) {
    static int indices[CLIENTS];
    attnd_errinfo info;
    for (int i = 0; i < CLIENTS; i++) {
        indices[i] = i;
        st.clients[i] = storm_client_open(st.url, transports[i], (uint32_t)i, seed, &info);
        if (!st.clients[i]) {
            fail(info.text);
        }
    }
    for (int i = 0; i < CLIENTS; i++) {
        pthread_create(&st.threads[i], NULL, run_client, &indices[i]);
    }
}

// await_change waits until num changes were begun since the start of all, and watches for the last
// one without sleep.
static void await_change(unsigned long num) {
    uint64_t until_ms = attnd_clock_ms() + QUIET_MS;
    for (unsigned long left = 1; left > 0 && attnd_clock_ms() < until_ms;) {
        unsigned long now = atomic_load(&st.progress);
        left = now < num ? num - now : 0;
        if (left > 1) {
            sleep_us(100);
        }
    }
}

// await_moment waits for the random moment of a kill.
static void await_moment(void) {
    if (below(5) == 0) {
        sleep_us(below(30000));
        return;
    }
    await_change(atomic_load(&st.progress) + 1 + below(MAX_CALLS));
    uint64_t until_us = attnd_clock_us() + below((uint32_t)AIM_US << below(AIMS));
    while (attnd_clock_us() < until_us) {
    }
}

static void kill_once(void) {
    uint64_t before = st.ready;
    pid_t worker = next_worker();
    await_moment();
    kill_worker(worker);
    st.kills++;
    for (uint32_t n = below(4) ? 0 : 1 + below(2); n > 0; n--) {
        pid_t pid = next_worker();
        sleep_us(below(20000));
        kill_worker(pid);
        st.kills++;
        st.in_recovery++;
        count_ready();
        before = st.ready; // it may have been ready before it was killed
    }
    await_ready(before);
}

// ---- the end

static void check_all_free(void) {
    attnd_client *c;
    attnd_errinfo info;
    char *json;
    if (attnd_connect(&c, st.url, NULL, &info) || attnd_admin(c, "stats", NULL, &json, &info)) {
        fail(info.text);
    }
    if (!strstr(json, "\"in_use_bytes\":0,") || !strstr(json, "\"accounting_mismatches\":0,")) {
        printf("%s\n", json);
        fail("blocks are in use when all sequences are free");
    }
    attnd_free(json);
    attnd_close(c);
}

static void check_log(void) {
    static const char *const bad[] = {"starts empty", "damaged", "is wrong", "given up",
                                      "did not come back"};
    char line[1024];
    FILE *f = fopen(st.log, "re");
    while (f && fgets(line, sizeof(line), f)) {
        for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
            if (strstr(line, bad[i])) {
                fail(line);
            }
        }
    }
    fclose(f);
}

static void check_clients(void) {
    for (int i = 0; i < CLIENTS; i++) {
        if (st.why[i][0]) {
            fail(st.why[i]);
        }
    }
}

static void report(double seconds) {
    storm_counts all = {0};
    for (int i = 0; i < CLIENTS; i++) {
        const storm_counts *c = storm_client_counts(st.clients[i]);
        all.calls += c->calls;
        all.losses += c->losses;
        all.repeated += c->repeated;
        all.made += c->made;
        all.cached += c->cached;
        all.seqs += c->seqs;
        all.rows += c->rows;
    }
    printf("kills %llu, %llu of them in recovery | %.1f a second | changes %llu | losses %llu | "
           "commits asked again %llu, of which %llu had counted | tokens found in the prefix cache "
           "%llu | sequences looked at %llu, rows %llu | violations 0\n",
           (unsigned long long)st.kills, (unsigned long long)st.in_recovery,
           (double)st.kills / seconds, (unsigned long long)all.calls,
           (unsigned long long)all.losses, (unsigned long long)all.repeated,
           (unsigned long long)all.made, (unsigned long long)all.cached,
           (unsigned long long)all.seqs, (unsigned long long)all.rows);
}

static void end(void) {
    int status;
    for (int i = 0; i < CLIENTS; i++) {
        storm_client_close(st.clients[i]);
    }
    kill(st.keeper, SIGTERM);
    if (waitpid(st.keeper, &status, 0) != st.keeper || !WIFEXITED(status) ||
        WEXITSTATUS(status) != 0) {
        fail("the daemon did not end well");
    }
    st.keeper = 0;
    check_log();
    unlink(st.log);
    rmdir(st.dir);
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: kill_storm KILLS ATTND [FLAG...]\n");
        return 2;
    }
    const char *wanted = getenv("ATTND_KILLS"), *seed_text = getenv("ATTND_TEST_SEED");
    uint64_t kills = strtoull(wanted ? wanted : argv[1], NULL, 10);
    uint64_t seed = seed_text ? strtoull(seed_text, NULL, 10) : attnd_clock_us();
    st.rng = seed * 2 + 1;
    printf("kill_storm: seed %llu\n", (unsigned long long)seed);
    strcpy(st.dir, "/tmp/attnd_storm_XXXXXX");
    if (!mkdtemp(st.dir)) {
        fail("no folder");
    }
    snprintf(st.url, sizeof(st.url), "ipc://%s/s", st.dir);
    snprintf(st.log, sizeof(st.log), "%s/log", st.dir);
    start(argv + 2);
    await_ready(0);
    start_clients(seed);
    uint64_t from = attnd_clock_us();
    while (st.kills < kills && !atomic_load(&st.failed)) {
        kill_once();
    }
    atomic_store(&st.stop, true);
    for (int i = 0; i < CLIENTS; i++) {
        pthread_join(st.threads[i], NULL);
    }
    check_clients();
    check_all_free();
    report((double)(attnd_clock_us() - from) / 1e6);
    end();
    return 0;
}
