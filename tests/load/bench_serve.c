// `attn-bench serve`: set-up, the run, the report.
//
// The first SIGINT or SIGTERM ends the run, which closes the session; a second one kills the
// process.
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/load/bench_cmd.h"
#include "tests/load/bench_host.h"
#include "tests/load/bench_load.h"
#include "tests/load/bench_report.h"
#include "tests/load/bench_run.h"
#include "tests/load/bench_serve_opts.h"

static volatile sig_atomic_t stop_signal; // the one that came, 0 = none

static void on_signal(int signum) {
    stop_signal = signum;
}

// join writes the command line; a word with anything but plain characters is put in quotes.
static void join(char *out, size_t bytes, int argc, char *const *argv) {
    size_t len = (size_t)snprintf(out, bytes, "attn-bench");
    for (int i = 0; i < argc && len < bytes; i++) {
        bool plain = argv[i][strcspn(argv[i], " \t\"'\\$*?;|&<>()")] == '\0' && argv[i][0] != '\0';
        len += (size_t)snprintf(out + len, bytes - len, plain ? " %s" : " '%s'", argv[i]);
    }
}

static void describe(const bench_serve_opts *o, char *lengths, char *arrivals, size_t bytes) {
    if (o->load.trace != NULL) {
        const char *slash = strrchr(o->load.trace, '/');
        snprintf(lengths, bytes, "lengths of %.100s", slash != NULL ? slash + 1 : o->load.trace);
    } else {
        snprintf(lengths, bytes, "input %.60s, output %.60s", o->input, o->output);
    }
    if (o->trace_time) {
        snprintf(arrivals, bytes, "open loop, the trace's times, speed %g", o->speed);
    } else if (o->rate > 0) {
        snprintf(arrivals, bytes, "open loop, Poisson, %g requests/s", o->rate);
    } else {
        snprintf(arrivals, bytes, "closed loop");
    }
}

static int write_json(FILE *f, const char *path, const bench_report *report) {
    char *text = bench_report_json(report);
    bool good = text != NULL && fputs(text, f) >= 0;
    good = fclose(f) == 0 && good;
    free(text);
    if (!good) {
        fprintf(stderr, "attn-bench: cannot write %s\n", path);
    }
    return good ? BENCH_EXIT_OK : BENCH_EXIT_FAILED;
}

static void catch_signals(void) {
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

// outcome is what a run leaves; the report borrows it.
typedef struct outcome {
    bench_stats stats;
    bench_verdict verdict;
    bench_host host;
    char ended[ATTND_ERR_TEXT_BYTES + 64];
} outcome;

// measure makes the run and fills in the report.  Returns the exit status.
static int measure(const bench_serve_opts *o, bench_load *load, outcome *out, bench_report *report,
                   FILE *json) {
    attnd_errinfo info = {0};
    bench_run_opts run = {
        .url = o->connect,
        .tenant = o->tenant,
        .transport = o->transport,
        .model = &o->model,
        .load = load,
        .open_loop = o->load.arrival != BENCH_CLOSED,
        .concurrency = o->concurrency,
        .prefill_chunk = o->prefill_chunk,
        .verify = o->verify,
        .verify_threads = o->verify_threads,
        .seed = o->load.seed,
        .duration_us = (uint64_t)(o->duration_s * 1e6),
        .timeout_ms = (int32_t)(o->timeout_s * 1e3),
        .patience_us = (uint64_t)(o->patience_s * 1e6),
        .stop = &stop_signal,
        .progress = isatty(STDERR_FILENO) == 1,
    };
    report->daemon_pid = o->daemon_pid > 0 ? (int64_t)o->daemon_pid : bench_peer_pid(o->connect);
    if (bench_usage_read(&report->before, report->daemon_pid) != ATTND_OK) {
        report->daemon_pid = 0;
    }
    attnd_err err = bench_run(&run, &out->stats, &out->verdict, &info);
    if (bench_usage_read(&report->after, report->daemon_pid) != ATTND_OK) {
        report->daemon_pid = 0;
    }
    if (err != ATTND_OK) {
        snprintf(out->ended, sizeof(out->ended), "%s: %s", attnd_errname(err),
                 info.text[0] != '\0' ? info.text : attnd_strerror(err));
        fprintf(stderr, "attn-bench: %s\n", out->ended);
    } else if (stop_signal != 0) {
        snprintf(out->ended, sizeof(out->ended), "signal %d", (int)stop_signal);
    }
    bench_host_read(&out->host);
    if (out->stats.elapsed_us > 0) { // else it never began, and the error says why
        bench_report_table(report, stdout);
    }
    int status = bench_report_ok(report) ? BENCH_EXIT_OK : BENCH_EXIT_FAILED;
    if (json != NULL && write_json(json, o->json, report) != BENCH_EXIT_OK) {
        status = BENCH_EXIT_FAILED;
    }
    return err == ATTND_OK && stop_signal != 0 ? BENCH_EXIT_SIGNAL : status;
}

static int serve(const bench_serve_opts *o, int argc, char **argv) {
    char command_line[2048], lengths[160], arrivals[160];
    attnd_errinfo info = {0};
    bench_load *load = NULL;
    FILE *json = NULL;
    bench_usage usage;
    if (o->daemon_pid > 0 && bench_usage_read(&usage, (int64_t)o->daemon_pid) != ATTND_OK) {
        fprintf(stderr, "attn-bench serve: --daemon-pid: %llu is no process that can be read\n",
                (unsigned long long)o->daemon_pid);
        return BENCH_EXIT_USAGE;
    }
    if (bench_load_create(&load, &o->load, &info) != ATTND_OK) {
        fprintf(stderr, "attn-bench: %s\n", info.text);
        return BENCH_EXIT_FAILED;
    }
    if (o->json != NULL && (json = fopen(o->json, "we")) == NULL) {
        fprintf(stderr, "attn-bench: cannot write %s\n", o->json);
        bench_load_free(load);
        return BENCH_EXIT_FAILED;
    }
    join(command_line, sizeof(command_line), argc, argv);
    describe(o, lengths, arrivals, sizeof(lengths));
    static outcome out; // 300 KiB of histograms
    bench_report report = {
        .model = &o->model,
        .stats = &out.stats,
        .verdict = &out.verdict,
        .host = &out.host,
        .ended = out.ended,
        .command_line = command_line,
        .url = o->connect,
        .transport = o->transport_name,
        .trace = o->load.trace,
        .lengths = lengths,
        .arrivals = arrivals,
        .verify = o->verify,
        .seed = o->load.seed,
        .concurrency = o->concurrency,
    };
    catch_signals();
    int status = measure(o, load, &out, &report, json);
    bench_load_free(load);
    return status;
}

int bench_serve(int argc, char **argv) {
    bench_serve_opts o;
    attnd_errinfo info = {0};
    int status = BENCH_EXIT_OK;
    if (bench_serve_parse(&o, argc, argv, &info) != ATTND_OK) {
        fprintf(stderr, "attn-bench serve: %s (attn-bench serve --help lists the flags)\n",
                info.text);
        status = BENCH_EXIT_USAGE;
    } else if (o.help) {
        bench_serve_help(stdout);
    } else {
        status = serve(&o, argc, argv);
    }
    bench_model_fini(&o.model);
    return status;
}
