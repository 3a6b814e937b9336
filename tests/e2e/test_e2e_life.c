// The daemon's own life: start, second start, what lies at its socket's path, drain, reload,
// administration.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "tests/e2e/play.h"

static const char *const flags[] = {"--set", "cache.memory=32MiB",   "--set", "cache.slab=1MiB",
                                    "--set", "limits.connections=8", NULL};

static void write_file(const e2e_daemon *d, const char *name, const char *text) {
    char path[128];
    snprintf(path, sizeof(path), "%s/%s", d->dir, name);
    FILE *f = fopen(path, "w");
    ck_assert_ptr_nonnull(f);
    fputs(text, f);
    fclose(f);
}

static bool exists(const e2e_daemon *d, const char *suffix) {
    char path[128];
    struct stat st;
    snprintf(path, sizeof(path), "%s%s", d->path, suffix);
    return lstat(path, &st) == 0;
}

START_TEST(a_second_start_fails_and_leaves_the_first_alone) {
    e2e_daemon d = {.dir = ""}, second;
    e2e_client c;
    e2e_start(&d, flags);
    second = d;
    e2e_try_start(&second, flags);
    ck_assert_int_eq(e2e_wait(&second, 20000), 1);
    close(second.out);
    e2e_connect(&c, d.url);
    play_hello(&c, "test");
    e2e_close(&c);
    e2e_stop(&d);
}
END_TEST

START_TEST(of_many_that_start_together_one_serves) {
    enum { N = 6 };
    e2e_daemon d = {.dir = ""}, all[N];
    e2e_dir(&d);
    for (int i = 0; i < N; i++) {
        all[i] = d;
        e2e_try_start(&all[i], flags);
    }
    int failed = 0;
    for (uint64_t until = e2e_now_ms() + 60000; failed < N - 1 && e2e_now_ms() < until;) {
        for (int i = 0; i < N; i++) {
            int status = all[i].pid ? e2e_wait(&all[i], 0) : -1;
            if (status != -1) {
                ck_assert_int_eq(status, 1);
                close(all[i].out);
                failed++;
            }
        }
        e2e_sleep_ms(5);
    }
    int alive = 0;
    for (int i = 0; i < N; i++) {
        if (all[i].pid) {
            d = all[i];
            alive++;
        }
    }
    ck_assert_int_eq(alive, 1);
    e2e_client c;
    e2e_connect(&c, d.url);
    play_hello(&c, "test");
    e2e_close(&c);
    e2e_stop(&d);
}
END_TEST

START_TEST(a_socket_left_by_a_dead_daemon_is_taken_over) {
    e2e_daemon d = {.dir = ""};
    e2e_client c;
    e2e_start(&d, flags);
    kill(d.pid, SIGKILL);
    ck_assert_int_eq(e2e_wait(&d, 5000), 128 + SIGKILL);
    close(d.out);
    ck_assert(exists(&d, "") && exists(&d, ".admin"));
    d.ready[0] = '\0';
    e2e_start(&d, flags);
    e2e_connect(&c, d.url);
    play_hello(&c, "test");
    e2e_close(&c);
    e2e_stop(&d);
}
END_TEST

START_TEST(what_is_no_socket_is_never_removed) {
    e2e_daemon d = {.dir = ""};
    e2e_dir(&d);
    struct stat st;
    for (int kind = 0; kind < 3; kind++) {
        if (kind == 0) {
            write_file(&d, "s", "precious");
        } else if (kind == 1) {
            ck_assert_int_eq(symlink("/nonexistent", d.path), 0);
        } else {
            ck_assert_int_eq(mkdir(d.path, 0700), 0);
        }
        e2e_try_start(&d, flags);
        ck_assert_int_eq(e2e_wait(&d, 20000), 1);
        close(d.out);
        ck_assert_int_eq(lstat(d.path, &st), 0);
        ck_assert(kind == 0   ? S_ISREG(st.st_mode)
                  : kind == 1 ? S_ISLNK(st.st_mode)
                              : S_ISDIR(st.st_mode));
        ck_assert(!exists(&d, ".lock"));
        ck_assert_int_eq(kind == 2 ? rmdir(d.path) : unlink(d.path), 0);
    }
    d.out = open("/dev/null", O_RDONLY);
    e2e_remove(&d);
}
END_TEST

START_TEST(a_socket_of_somebody_else_is_left_alone) {
    e2e_daemon d = {.dir = ""};
    e2e_dir(&d);
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    strcpy(addr.sun_path, d.path);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
    ck_assert_int_eq(listen(fd, 4), 0);
    e2e_try_start(&d, flags);
    ck_assert_int_eq(e2e_wait(&d, 20000), 1);
    ck_assert(exists(&d, ""));
    close(fd);
    e2e_remove(&d);
}
END_TEST

START_TEST(sockets_have_their_modes_and_go_at_the_end) {
    e2e_daemon d = {.dir = ""};
    struct stat st;
    e2e_start(&d, flags);
    ck_assert_int_eq(stat(d.path, &st), 0);
    ck_assert_uint_eq(st.st_mode & 0777, 0660);
    ck_assert_int_eq(stat(d.admin_url + 6, &st), 0);
    ck_assert_uint_eq(st.st_mode & 0777, 0600);
    kill(d.pid, SIGTERM);
    ck_assert_int_eq(e2e_wait(&d, 10000), 0);
    ck_assert(!exists(&d, "") && !exists(&d, ".admin"));
    ck_assert(!exists(&d, ".lock") && !exists(&d, ".admin.lock"));
    e2e_remove(&d);
}
END_TEST

START_TEST(flags_and_files_that_are_wrong_are_refused) {
    e2e_daemon d = {.dir = ""};
    e2e_dir(&d);
    write_file(&d, "conf", "[cache]\nmemorx = 1GiB\n");
    char conf[96];
    snprintf(conf, sizeof(conf), "%s/conf", d.dir);
    const char *const wrong[][4] = {
        {"--config", conf},
        {"--config", "/nonexistent"},
        {"--nonsense"},
        {"--set", "cache.memory"},
        {"--set", "cache.memory=x"},
        {"--check-config", "--config", conf},
        {"argument"},
        {"--set", "compute.isa=abacus"},
        {"--listen", "udp://x"},
        {"--listen", "tcp://127.0.0.1:x"},
        {"--check-config", "--listen", "udp://x"},
        {"--listen", ""},
    };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        e2e_try_start(&d, wrong[i]);
        ck_assert_int_eq(e2e_wait(&d, 20000), 2);
        close(d.out);
    }
    ck_assert(e2e_log_has(&d, "conf:2: unknown key cache.memorx, the nearest is cache.memory"));
    e2e_try_start(&d, (const char *const[]){"--listen", "tcp://no.such.host.invalid:1", NULL});
    ck_assert_int_eq(e2e_wait(&d, 20000), 1); // good, as far as can be known before
    close(d.out);
    ck_assert(!exists(&d, "") && !exists(&d, ".lock"));
    e2e_try_start(&d, (const char *const[]){"--check-config", NULL});
    ck_assert_int_eq(e2e_wait(&d, 20000), 0);
    e2e_remove(&d);
}
END_TEST

START_TEST(tcp_serves_as_ipc_does) {
    e2e_daemon d = {.dir = ""};
    e2e_client c;
    char url[64];
    snprintf(url, sizeof(url), "tcp://127.0.0.1:%d", 20000 + (int)getpid() % 20000);
    const char *const with_tcp[] = {"--listen", url, "--set", "cache.memory=32MiB", NULL};
    e2e_start(&d, with_tcp);
    e2e_connect(&c, url);
    play_hello(&c, "far");
    play_model m = play_tiny();
    play_seq s;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_seq *const seqs[] = {&s};
    play_token(&c, seqs, 1, 30);
    play_free(&c, &s);
    e2e_close(&c);
    e2e_stop(&d);
}
END_TEST

START_TEST(more_memory_than_there_is_is_warned_of) {
    e2e_daemon d = {.dir = ""};
    char set[64];
    uint64_t mib = ((uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE) >> 20) + 64;
    snprintf(set, sizeof(set), "cache.memory=%lluMiB", (unsigned long long)mib);
    e2e_start(&d, (const char *const[]){"--set", set, "--set", "cache.slab=64MiB", NULL});
    ck_assert(e2e_log_has(&d, "WARN server cache.memory and tier.memory: "));
    e2e_stop(&d);
    d = (e2e_daemon){.dir = ""};
    e2e_start(&d, (const char *const[]){"--set", "cache.memory=32MiB", NULL});
    ck_assert(!e2e_log_has(&d, "WARN server cache.memory"));
    ck_assert(e2e_log_has(&d, "serves: 32.0 MiB of "));
    e2e_stop(&d);
}
END_TEST

// ---- drain

START_TEST(a_drain_refuses_new_work_and_answers_what_runs) {
    e2e_daemon d = {.dir = ""};
    e2e_client c, late, admin;
    e2e_start(&d, flags);
    e2e_connect(&c, d.url);
    e2e_connect(&late, d.url);
    e2e_connect(&admin, d.admin_url);
    play_hello(&c, "test");
    play_hello(&admin, "operator");
    play_model m = play_tiny();
    play_seq s, other;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_create(&c, &m, &other);
    play_step step, refused;
    play_part part = {.seq = &s, .new_len = 10}, more = {.seq = &other, .new_len = 1};
    ATTND_CK_OK(play_step_open(&c, &m, &part, 1, 0, &step, NULL));
    play_attend(&c, &step, 0);
    kill(d.pid, SIGTERM);
    while (!e2e_log_has(&d, "draining")) {
        e2e_sleep_ms(5);
    }
    ATTND_CK_ERR(play_step_open(&c, &m, &more, 1, 0, &refused, NULL), ATTND_ESHUTDOWN);
    ATTND_CK_ERR(e2e_call(&late, PROTO_HELLO, "{}", 2, NULL), ATTND_ESHUTDOWN);
    char *text = e2e_json(&admin, PROTO_STATS, "");
    ck_assert_ptr_nonnull(strstr(text, "\"state\":\"draining\""));
    free(text);
    play_attend(&c, &step, 1);
    ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    ck_assert_int_eq(e2e_wait(&d, 5000), 0);
    e2e_close(&c);
    e2e_close(&late);
    e2e_close(&admin);
    e2e_remove(&d);
}
END_TEST

START_TEST(a_step_that_waits_for_blocks_is_refused_by_a_drain) {
    e2e_daemon d = {.dir = ""};
    e2e_client c;
    e2e_start(&d, flags);
    e2e_connect(&c, d.url);
    play_hello(&c, "test");
    play_model m = play_tiny();
    play_seq s, other;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_create(&c, &m, &other);
    play_step step;
    play_part part = {.seq = &s, .new_len = 20000}, more = {.seq = &other, .new_len = 20000};
    ATTND_CK_OK(play_step_open(&c, &m, &part, 1, 0, &step, NULL));
    e2e_buf b;
    e2e_flight f;
    e2e_reply r;
    play_step_body(&b, ++c.id, &m, &more, 1, 60000);
    e2e_send(&c, &f, b.data, b.bytes);
    e2e_await_stat(&c, "scheduler.waiting_for_blocks", 1, 1000);
    kill(d.pid, SIGTERM);
    ATTND_CK_ERR(e2e_recv(&f, &r), ATTND_ESHUTDOWN);
    e2e_reply_fini(&r);
    e2e_close(&c); // ends the session, its step, and with them the drain
    ck_assert_int_eq(e2e_wait(&d, 5000), 0);
    e2e_buf_fini(&b);
    e2e_remove(&d);
}
END_TEST

START_TEST(a_drain_ends_at_its_timeout) {
    e2e_daemon d = {.dir = ""};
    e2e_client c, admin;
    e2e_start(&d, flags);
    e2e_connect(&c, d.url);
    e2e_connect(&admin, d.admin_url);
    play_hello(&c, "test");
    play_hello(&admin, "operator");
    play_model m = play_tiny();
    play_seq s;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_step step;
    play_part part = {.seq = &s, .new_len = 10};
    ATTND_CK_OK(play_step_open(&c, &m, &part, 1, 0, &step, NULL));
    uint64_t start = e2e_now_ms();
    char *text = e2e_json(&admin, PROTO_DRAIN, "{\"timeout_ms\": 400}");
    ck_assert_double_eq(e2e_number(text, "steps"), 1);
    free(text);
    ck_assert_int_eq(e2e_wait(&d, 10000), 0);
    ck_assert_uint_ge(e2e_now_ms() - start, 399);
    ck_assert_uint_le(e2e_now_ms() - start, 3000);
    e2e_close(&c);
    e2e_close(&admin);
    e2e_remove(&d);
}
END_TEST

START_TEST(a_second_signal_does_not_wait) {
    e2e_daemon d = {.dir = ""};
    e2e_client c;
    e2e_start(&d, flags);
    e2e_connect(&c, d.url);
    play_hello(&c, "test");
    play_model m = play_tiny();
    play_seq s;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_step step;
    play_part part = {.seq = &s, .new_len = 10};
    ATTND_CK_OK(play_step_open(&c, &m, &part, 1, 0, &step, NULL));
    kill(d.pid, SIGTERM);
    ck_assert_int_eq(e2e_wait(&d, 300), -1);
    kill(d.pid, SIGINT);
    ck_assert_int_eq(e2e_wait(&d, 3000), 0);
    e2e_close(&c);
    e2e_remove(&d);
}
END_TEST

START_TEST(a_prefill_that_runs_is_answered_before_the_end) {
    e2e_daemon d = {.dir = ""};
    e2e_client c;
    e2e_start(&d, flags);
    e2e_connect(&c, d.url);
    play_hello(&c, "test");
    play_model m = play_one();
    play_seq s;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_step step = {.model = &m, .num = 1, .rows = 1000, .new_rows = 1000};
    step.parts[0] = (play_part){.seq = &s, .new_len = 1000};
    play_tensors t = play_random(&step);
    e2e_buf b;
    e2e_flight f;
    e2e_reply r;
    play_attend1_body(&b, PROTO_PREFILL, ++c.id, &step, 0, &t);
    e2e_send(&c, &f, b.data, b.bytes);
    e2e_sleep_ms(30);
    kill(d.pid, SIGTERM);
    ATTND_CK_OK(e2e_recv(&f, &r));
    play_check(&step, 0, &t, &r);
    e2e_reply_fini(&r);
    ck_assert_int_eq(e2e_wait(&d, 5000), 0);
    play_tensors_fini(&t);
    e2e_buf_fini(&b);
    e2e_close(&c);
    e2e_remove(&d);
}
END_TEST

// ---- administration and configuration

START_TEST(administration_is_for_its_own_socket) {
    e2e_daemon d = {.dir = ""};
    e2e_client c, admin;
    e2e_start(&d, flags);
    e2e_connect(&c, d.url);
    e2e_connect(&admin, d.admin_url);
    play_hello(&c, "a client");
    static const uint32_t ops[] = {PROTO_SESSION_LIST, PROTO_DRAIN, PROTO_CONFIG_GET,
                                   PROTO_CONFIG_SET};
    for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++) {
        ATTND_CK_ERR(e2e_call(&c, ops[i], "{}", 2, NULL), ATTND_EPERM);
    }
    play_hello(&admin, "operator");
    play_model m = play_tiny();
    play_seq s;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    char *text = e2e_json(&admin, PROTO_SESSION_LIST, "");
    ck_assert_ptr_nonnull(strstr(text, "\"client\":\"a client\""));
    free(text);
    text = e2e_json(&admin, PROTO_SEQ_LIST, "");
    ck_assert_ptr_nonnull(strstr(text, "\"tenant\":\"default\""));
    free(text);
    text = e2e_json(&admin, PROTO_MODEL_LIST, "");
    ck_assert_ptr_nonnull(strstr(text, "\"name\":\"tiny\""));
    free(text);
    play_free(&c, &s);
    e2e_close(&c);
    e2e_close(&admin);
    e2e_stop(&d);
}
END_TEST

static attnd_err set_key(e2e_client *admin, const char *key, const char *value) {
    char json[256];
    snprintf(json, sizeof(json), "{\"key\": \"%s\", \"value\": \"%s\"}", key, value);
    return e2e_call(admin, PROTO_CONFIG_SET, json, strlen(json), NULL);
}

START_TEST(keys_can_be_read_and_reloadable_ones_set) {
    e2e_daemon d = {.dir = ""};
    e2e_client admin;
    e2e_start(&d, flags);
    e2e_connect(&admin, d.admin_url);
    play_hello(&admin, "operator");
    char *text = e2e_json(&admin, PROTO_CONFIG_GET, "{\"key\": \"cache.memory\"}");
    ck_assert_str_eq(text, "{\"cache.memory\":\"32MiB\"}");
    free(text);
    text = e2e_json(&admin, PROTO_CONFIG_GET, "{}");
    ck_assert_ptr_nonnull(strstr(text, "\"limits.in_flight\":\"64\""));
    free(text);
    ATTND_CK_OK(set_key(&admin, "server.log_level", "debug"));
    ATTND_CK_OK(set_key(&admin, "tenant new.quota_blocks", "7"));
    ATTND_CK_ERR(set_key(&admin, "cache.memory", "1GiB"), ATTND_ENOTSUP);
    ATTND_CK_ERR(set_key(&admin, "cache.memory", "much"), ATTND_EINVAL);
    ATTND_CK_ERR(set_key(&admin, "server.log_level", "loud"), ATTND_EINVAL);
    ATTND_CK_ERR(set_key(&admin, "server.log_levell", "info"), ATTND_ENOENT);
    text = e2e_json(&admin, PROTO_STATS, "");
    ck_assert_ptr_nonnull(
        strstr(text, "{\"name\":\"new\",\"blocks\":0,\"cached_blocks\":0,\"quota_blocks\":7"));
    free(text);
    e2e_close(&admin);
    e2e_stop(&d);
}
END_TEST

START_TEST(sighup_reads_the_file_again) {
    e2e_daemon d = {.dir = ""};
    e2e_client admin;
    char conf[96];
    e2e_dir(&d);
    snprintf(conf, sizeof(conf), "%s/conf", d.dir);
    write_file(&d, "conf", "[cache]\nmemory = 32MiB\n[tenant a]\nquota_blocks = 3\n");
    e2e_start(&d, (const char *const[]){"--config", conf, NULL});
    e2e_connect(&admin, d.admin_url);
    play_hello(&admin, "operator");
    write_file(&d, "conf", "[cache]\nmemory = 64MiB\n[tenant a]\nquota_blocks = 4\n");
    kill(d.pid, SIGHUP);
    while (!e2e_log_has(&d, "reloaded")) {
        e2e_sleep_ms(5);
    }
    char *text = e2e_json(&admin, PROTO_STATS, "");
    ck_assert_ptr_nonnull(
        strstr(text, "{\"name\":\"a\",\"blocks\":0,\"cached_blocks\":0,\"quota_blocks\":4"));
    ck_assert_double_eq(e2e_number(text, "arena.bytes"), 32 << 20);
    free(text);
    ck_assert(e2e_log_has(&d, "cache.memory = 64MiB takes effect at the next start"));
    ck_assert(e2e_log_has(&d, "tenant a.quota_blocks = 4, was 3"));
    write_file(&d, "conf", "[cache]\nmemory = lots\n[tenant a]\nquota_blocks = 5\n");
    kill(d.pid, SIGHUP);
    while (!e2e_log_has(&d, "nothing was reloaded")) {
        e2e_sleep_ms(5);
    }
    ck_assert(e2e_log_has(&d, "conf:2: cache.memory: \"lots\" is not a whole number"));
    text = e2e_json(&admin, PROTO_STATS, "");
    ck_assert_ptr_nonnull(
        strstr(text, "{\"name\":\"a\",\"blocks\":0,\"cached_blocks\":0,\"quota_blocks\":4"));
    free(text);
    e2e_close(&admin);
    e2e_stop(&d);
}
END_TEST

START_TEST(sighup_tells_of_tenants_that_come_and_go) {
    e2e_daemon d = {.dir = ""};
    char conf[96];
    e2e_dir(&d);
    snprintf(conf, sizeof(conf), "%s/conf", d.dir);
    write_file(&d, "conf", "[cache]\nmemory = 32MiB\n[tenant a]\nshare = 3\n");
    e2e_start(&d, (const char *const[]){"--config", conf, NULL});
    write_file(&d, "conf", "[cache]\nmemory = 32MiB\n[tenant b]\nquota_blocks = 5\nuids = 7\n");
    kill(d.pid, SIGHUP);
    while (!e2e_log_has(&d, "reloaded")) {
        e2e_sleep_ms(5);
    }
    ck_assert(e2e_log_has(&d, "WARN conf tenant a stays until the next start"));
    ck_assert(e2e_log_has(&d, "INFO conf tenant b is new"));
    ck_assert(e2e_log_has(&d, "tenant b.quota_blocks = 5, was 0"));
    ck_assert(e2e_log_has(&d, "tenant b.uids = 7, was (empty)"));
    ck_assert(!e2e_log_has(&d, "b.share")); // as by default
    e2e_stop(&d);
}
END_TEST

START_TEST(peers_that_never_greet_leave_room_for_clients) {
    enum { SOFT = 200, SILENT = 400 };
    e2e_daemon d = {.dir = ""};
    e2e_client c;
    struct rlimit files, few;
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &files), 0);
    few = files;
    few.rlim_cur = SOFT; // as far as the daemon does not raise it
    setrlimit(RLIMIT_NOFILE, &few);
    e2e_start(&d, flags);
    setrlimit(RLIMIT_NOFILE, &files);
    int silent[SILENT];
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    strcpy(addr.sun_path, d.path);
    for (int i = 0; i < SILENT; i++) {
        silent[i] = socket(AF_UNIX, SOCK_STREAM, 0);
        ck_assert_int_eq(connect(silent[i], (struct sockaddr *)&addr, sizeof(addr)), 0);
    }
    e2e_connect(&c, d.url);
    play_hello(&c, "test");
    for (int i = 0; i < SILENT; i++) {
        close(silent[i]);
    }
    e2e_close(&c);
    e2e_stop(&d);
}
END_TEST

START_TEST(a_raised_quota_ends_the_waiting_for_it) {
    e2e_daemon d = {.dir = ""};
    e2e_client c, admin;
    e2e_start(&d, (const char *const[]){"--set", "cache.memory=32MiB", "--set",
                                        "tenant default.quota_blocks=10", NULL});
    e2e_connect(&c, d.url);
    e2e_connect(&admin, d.admin_url);
    play_hello(&c, "test");
    play_hello(&admin, "operator");
    play_model m = play_tiny();
    play_seq s, other;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_create(&c, &m, &other);
    play_step step;
    play_part part = {.seq = &s, .new_len = 128}, more = {.seq = &other, .new_len = 128};
    ATTND_CK_OK(play_step_open(&c, &m, &part, 1, 0, &step, NULL));
    e2e_buf b;
    e2e_flight f;
    e2e_reply r;
    play_step_body(&b, ++c.id, &m, &more, 1, 60000);
    e2e_send(&c, &f, b.data, b.bytes);
    ck_assert(!e2e_arrived(&f, 50));
    ATTND_CK_OK(set_key(&admin, "tenant default.quota_blocks", "16"));
    ATTND_CK_OK(e2e_recv(&f, &r));
    e2e_reply_fini(&r);
    e2e_buf_fini(&b);
    e2e_close(&c);
    e2e_close(&admin);
    play_forget(&s);
    play_forget(&other);
    e2e_stop(&d);
}
END_TEST

START_TEST(a_connection_without_hello_is_closed) {
    e2e_daemon d = {.dir = ""};
    e2e_client c, idle;
    e2e_start(&d, (const char *const[]){"--set", "limits.hello_timeout=1s", NULL});
    e2e_connect(&c, d.url);
    play_hello(&c, "test");
    e2e_connect(&idle, d.url);
    e2e_await_stat(&c, "transport.clients.closed_idle", 1, 10000);
    e2e_close(&idle); // which connects again by itself until then
    e2e_await_stat(&c, "transport.clients.connections", 1, 10000);
    e2e_close(&c);
    e2e_stop(&d);
}
END_TEST

START_TEST(connections_above_the_limit_are_closed_and_the_rest_live) {
    enum { LIMIT = 8 };
    e2e_daemon d = {.dir = ""};
    e2e_client c[LIMIT], more;
    e2e_start(&d, flags);
    for (int i = 0; i < LIMIT; i++) {
        e2e_connect(&c[i], d.url);
        play_hello(&c[i], "test");
    }
    e2e_connect(&more, d.url);
    e2e_sleep_ms(300);
    ck_assert_double_ge(e2e_stat(&c[0], "transport.clients.closed_full"), 1);
    ck_assert_double_eq(e2e_stat(&c[0], "transport.clients.connections"), LIMIT);
    e2e_close(&c[LIMIT - 1]);
    static const char hello[] = "{\"client\": \"test\"}";
    attnd_err err = ATTND_ECONN; // gets in by dialing again; a dial under way may still be closed
    for (int i = 0; i < 50 && err == ATTND_ECONN; i++) {
        err = e2e_call(&more, PROTO_HELLO, hello, strlen(hello), NULL);
    }
    ATTND_CK_OK(err);
    ck_assert_double_eq(e2e_stat(&more, "sessions"), LIMIT);
    for (int i = 0; i < LIMIT - 1; i++) {
        ck_assert_double_ge(e2e_stat(&c[i], "sessions"), LIMIT - i);
        e2e_close(&c[i]);
    }
    e2e_close(&more);
    e2e_stop(&d);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_life");
    TCase *tc = tcase_create("life");
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, a_second_start_fails_and_leaves_the_first_alone);
    tcase_add_test(tc, of_many_that_start_together_one_serves);
    tcase_add_test(tc, a_socket_left_by_a_dead_daemon_is_taken_over);
    tcase_add_test(tc, what_is_no_socket_is_never_removed);
    tcase_add_test(tc, a_socket_of_somebody_else_is_left_alone);
    tcase_add_test(tc, sockets_have_their_modes_and_go_at_the_end);
    tcase_add_test(tc, flags_and_files_that_are_wrong_are_refused);
    tcase_add_test(tc, tcp_serves_as_ipc_does);
    tcase_add_test(tc, more_memory_than_there_is_is_warned_of);
    tcase_add_test(tc, a_drain_refuses_new_work_and_answers_what_runs);
    tcase_add_test(tc, a_step_that_waits_for_blocks_is_refused_by_a_drain);
    tcase_add_test(tc, a_drain_ends_at_its_timeout);
    tcase_add_test(tc, a_second_signal_does_not_wait);
    tcase_add_test(tc, a_prefill_that_runs_is_answered_before_the_end);
    tcase_add_test(tc, administration_is_for_its_own_socket);
    tcase_add_test(tc, keys_can_be_read_and_reloadable_ones_set);
    tcase_add_test(tc, sighup_reads_the_file_again);
    tcase_add_test(tc, sighup_tells_of_tenants_that_come_and_go);
    tcase_add_test(tc, peers_that_never_greet_leave_room_for_clients);
    tcase_add_test(tc, a_raised_quota_ends_the_waiting_for_it);
    tcase_add_test(tc, a_connection_without_hello_is_closed);
    tcase_add_test(tc, connections_above_the_limit_are_closed_and_the_rest_live);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
