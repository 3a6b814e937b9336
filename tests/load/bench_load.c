// Three random streams (inputs, outputs, arrivals) derived from the seed, so that changing one
// distribution leaves the other draws as they were.  A trace is used in file order; when its clock
// is used it is first sorted by time.
#include "tests/load/bench_load.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/load/bench_data.h"
#include "tests/load/bench_math.h"
#include "tests/load/bench_trace.h"

struct bench_load {
    bench_load_opts opts;
    bench_trace trace;
    uint64_t total; // 0 = no end
    uint64_t next;
    double clock_us; // of the last Poisson arrival
    bench_rng input_rng, output_rng, arrival_rng;
};

static bool read_real(const char **s, double *out) {
    char *end;
    errno = 0;
    *out = strtod(*s, &end);
    if (end == *s || errno != 0 || !isfinite(*out)) {
        return false;
    }
    *s = end;
    return true;
}

attnd_err bench_length_parse(bench_length *out, const char *text, attnd_errinfo *info) {
    static const char prefix[] = "lognormal:";
    const char *s = text;
    bench_length len = {0};
    if (strncmp(s, prefix, sizeof(prefix) - 1) == 0) {
        s += sizeof(prefix) - 1;
        len.lognormal = true;
        bool good = read_real(&s, &len.mean) && *s++ == ',' && read_real(&s, &len.sigma);
        if (!good || *s != '\0' || len.sigma < 0 || len.sigma > 10) {
            return attnd_fail(info, ATTND_EINVAL, "length",
                              "\"%.60s\" is not lognormal:MEAN,SIGMA with SIGMA in 0 to 10", text);
        }
    } else if (!read_real(&s, &len.mean) || *s != '\0' || len.mean != floor(len.mean)) {
        return attnd_fail(info, ATTND_EINVAL, "length",
                          "\"%.60s\" is neither a number of tokens nor lognormal:MEAN,SIGMA", text);
    }
    if (!(len.mean >= 1 && len.mean <= BENCH_MAX_LENGTH)) {
        return attnd_fail(info, ATTND_EINVAL, "length", "%g tokens is not in 1 to %d", len.mean,
                          BENCH_MAX_LENGTH);
    }
    *out = len;
    return ATTND_OK;
}

// draw returns a length.  A lognormal with log-mean mu has the mean exp(mu + sigma^2 / 2).
static uint32_t draw(const bench_length *len, bench_rng *rng) {
    if (!len->lognormal) {
        return (uint32_t)len->mean;
    }
    double mu = log(len->mean) - len->sigma * len->sigma / 2;
    double x = rint(exp(mu + len->sigma * bench_rng_normal(rng)));
    return (uint32_t)fmin(fmax(x, 1), BENCH_MAX_LENGTH);
}

static int by_time(const void *a, const void *b) {
    uint64_t x = ((const bench_trace_row *)a)->time_us, y = ((const bench_trace_row *)b)->time_us;
    return (x > y) - (x < y);
}

// sort_by_time leaves a sorted trace alone: rows of equal time then keep the file's order.
static void sort_by_time(bench_trace *trace) {
    for (uint64_t i = 1; i < trace->num_rows; i++) {
        if (trace->rows[i].time_us < trace->rows[i - 1].time_us) {
            qsort(trace->rows, trace->num_rows, sizeof(*trace->rows), by_time);
            return;
        }
    }
}

attnd_err bench_load_create(bench_load **out, const bench_load_opts *opts, attnd_errinfo *info) {
    bench_load *load = calloc(1, sizeof(*load));
    if (load == NULL) {
        return attnd_fail(info, ATTND_ENOMEM, "requests", "no memory for the requests");
    }
    load->opts = *opts;
    load->input_rng.state = bench_hash64(opts->seed ^ 0x696eu);
    load->output_rng.state = bench_hash64(opts->seed ^ 0x6f7574u);
    load->arrival_rng.state = bench_hash64(opts->seed ^ 0x6172u);
    load->total = opts->endless ? 0 : opts->num_requests;
    if (opts->trace != NULL) {
        attnd_err err = bench_trace_read(&load->trace, opts->trace, load->total, info);
        if (err != ATTND_OK) {
            free(load);
            return err;
        }
        if (opts->arrival == BENCH_TRACE_TIME) {
            sort_by_time(&load->trace);
        }
        if (load->total == 0 && !opts->endless) {
            load->total = load->trace.num_rows;
        }
    }
    *out = load;
    return ATTND_OK;
}

void bench_load_free(bench_load *load) {
    if (load != NULL) {
        bench_trace_free(&load->trace);
        free(load);
    }
}

static uint64_t arrival(bench_load *load, uint64_t lap, uint64_t time_us) {
    switch (load->opts.arrival) {
    case BENCH_POISSON: // gaps are exponential
        load->clock_us += -log(bench_rng_uniform(&load->arrival_rng)) / load->opts.rate * 1e6;
        return (uint64_t)load->clock_us;
    case BENCH_TRACE_TIME: {
        uint64_t span = load->trace.rows[load->trace.num_rows - 1].time_us + 1;
        return (uint64_t)((double)(lap * span + time_us) / load->opts.speed);
    }
    case BENCH_CLOSED:
        break;
    }
    return 0;
}

bool bench_load_next(bench_load *load, bench_request *out) {
    if (load->total != 0 && load->next == load->total) {
        return false;
    }
    uint64_t id = load->next++;
    bench_request req = {.id = id};
    uint64_t lap = 0, time_us = 0;
    if (load->trace.num_rows > 0) {
        const bench_trace_row *row = &load->trace.rows[id % load->trace.num_rows];
        lap = id / load->trace.num_rows;
        time_us = row->time_us;
        req.input = row->input > 0 ? row->input : 1;
        req.output = row->output > 0 ? row->output : 1;
        if (load->opts.shares_prefixes) {
            req.ids = load->trace.ids + row->first_id;
            req.num_ids = row->num_ids;
        }
    } else {
        req.input = draw(&load->opts.input, &load->input_rng);
        req.output = draw(&load->opts.output, &load->output_rng);
    }
    req.arrival_us = arrival(load, lap, time_us);
    *out = req;
    return true;
}

bool bench_load_shares(const bench_load *load) {
    return load->opts.shares_prefixes && load->trace.num_ids > 0;
}

uint64_t bench_load_total(const bench_load *load) {
    return load->total;
}
