// One pass over the file, a line at a time, in a buffer of fixed size.  The first line decides the
// format: '{' opens JSON lines, anything else must be a CSV header that names the three columns.
// Times are kept as microseconds since 1970 (CSV) or since the trace began (JSON) while reading,
// and made relative to the earliest one at the end, so a trace need not be sorted.
#include "tests/load/bench_trace.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_COLUMNS = 64 };

typedef struct reader {
    FILE *file;
    const char *path;
    uint64_t line_num;
    char *line; // [BENCH_TRACE_LINE_BYTES + 1], NUL-terminated, without its newline
    size_t len;
    int column[3]; // of time, input and output, for CSV
    int64_t *times;
    bench_trace *trace;
    uint64_t capacity, ids_capacity;
    attnd_errinfo *info;
} reader;

static attnd_err fail_line(const reader *r, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

static attnd_err fail_line(const reader *r, const char *fmt, ...) {
    char what[112];
    va_list args;
    va_start(args, fmt);
    vsnprintf(what, sizeof(what), fmt, args);
    va_end(args);
    size_t len = strlen(r->path);
    const char *tail = len > 48 ? r->path + len - 48 : r->path;
    return attnd_fail(r->info, ATTND_EINVAL, "trace", "%s:%" PRIu64 ": %s", tail, r->line_num,
                      what);
}

// read_line reads the next line that is not blank; *more = false at the end of the file.
static attnd_err read_line(reader *r, bool *more) {
    do {
        int c;
        r->len = 0;
        r->line_num++;
        while ((c = getc_unlocked(r->file)) != EOF && c != '\n') {
            if (r->len == BENCH_TRACE_LINE_BYTES) {
                return fail_line(r, "line is longer than %d bytes", BENCH_TRACE_LINE_BYTES);
            }
            if (c == '\0') {
                return fail_line(r, "NUL byte");
            }
            r->line[r->len++] = (char)c;
        }
        if (ferror(r->file)) {
            return attnd_fail(r->info, ATTND_EIO, "trace", "%.80s: %s", r->path, strerror(errno));
        }
        while (r->len > 0 && strchr("\r \t", r->line[r->len - 1]) != NULL) {
            r->len--;
        }
        r->line[r->len] = '\0';
        if (r->len == 0 && c == EOF) {
            *more = false;
            return ATTND_OK;
        }
    } while (r->len == 0);
    *more = true;
    return ATTND_OK;
}

// append adds a row whose hash ids are the num_ids that are in the trace already.
static attnd_err append(reader *r, int64_t time_us, uint32_t input, uint32_t output,
                        uint32_t num_ids) {
    bench_trace *t = r->trace;
    if (t->num_rows == BENCH_TRACE_MAX_ROWS) {
        return fail_line(r, "more than %d requests", BENCH_TRACE_MAX_ROWS);
    }
    if (t->num_rows == r->capacity) {
        uint64_t capacity = r->capacity == 0 ? 1024 : 2 * r->capacity;
        void *rows = realloc(t->rows, capacity * sizeof(*t->rows));
        if (rows == NULL) {
            return attnd_fail(r->info, ATTND_ENOMEM, "trace", "no memory for the trace");
        }
        t->rows = rows;
        void *times = realloc(r->times, capacity * sizeof(*r->times));
        if (times == NULL) {
            return attnd_fail(r->info, ATTND_ENOMEM, "trace", "no memory for the trace");
        }
        r->times = times;
        r->capacity = capacity;
    }
    r->times[t->num_rows] = time_us;
    t->rows[t->num_rows++] = (bench_trace_row){
        .input = input, .output = output, .num_ids = num_ids, .first_id = t->num_ids - num_ids};
    return ATTND_OK;
}

// ---- Azure CSV

// split cuts the line into fields at commas, in place; blanks around a field are dropped.
static int split(char *line, char *fields[MAX_COLUMNS]) {
    int n = 0;
    for (char *field = line; field != NULL && n < MAX_COLUMNS;) {
        char *comma = strchr(field, ',');
        if (comma != NULL) {
            *comma = '\0';
        }
        field += strspn(field, " \t");
        char *end = field + strlen(field);
        while (end > field && strchr(" \t", end[-1]) != NULL) {
            *--end = '\0';
        }
        fields[n++] = field;
        field = comma != NULL ? comma + 1 : NULL;
    }
    return n;
}

static attnd_err read_header(reader *r) {
    static const char *const names[3] = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"};
    char *fields[MAX_COLUMNS];
    int n = split(r->line, fields);
    for (int want = 0; want < 3; want++) {
        r->column[want] = -1;
        for (int i = 0; i < n; i++) {
            if (strcmp(fields[i], names[want]) == 0) {
                r->column[want] = i;
            }
        }
        if (r->column[want] < 0) {
            return fail_line(r, "neither JSON nor a CSV header with the column %s", names[want]);
        }
    }
    return ATTND_OK;
}

// digits reads exactly n digits at *s and moves behind them.
static bool digits(const char **s, int n, int *out) {
    *out = 0;
    for (int i = 0; i < n; i++, (*s)++) {
        if (**s < '0' || **s > '9') {
            return false;
        }
        *out = *out * 10 + (**s - '0');
    }
    return true;
}

// read_zone reads "", "Z" or "+HH:MM" at the end of a time, as microseconds east of Greenwich.
static bool read_zone(const char *s, int64_t *east_us) {
    *east_us = 0;
    if (strcmp(s, "") == 0 || strcmp(s, "Z") == 0) {
        return true;
    }
    int hours, minutes, sign = *s == '-' ? -1 : 1;
    if ((*s != '+' && *s != '-') || !digits((s++, &s), 2, &hours) || *s++ != ':' ||
        !digits(&s, 2, &minutes) || *s != '\0' || hours > 14 || minutes > 59) {
        return false;
    }
    *east_us = ((int64_t)hours * 60 + minutes) * sign * 60000000;
    return true;
}

// read_time reads "2023-11-16 18:15:46.6805900".
static bool read_time(const char *s, int64_t *us) {
    struct tm tm = {0};
    if (!digits(&s, 4, &tm.tm_year) || *s++ != '-' || !digits(&s, 2, &tm.tm_mon) || *s++ != '-' ||
        !digits(&s, 2, &tm.tm_mday) || (*s != ' ' && *s != 'T') ||
        !digits((s++, &s), 2, &tm.tm_hour) || *s++ != ':' || !digits(&s, 2, &tm.tm_min) ||
        *s++ != ':' || !digits(&s, 2, &tm.tm_sec)) {
        return false;
    }
    if (tm.tm_mon < 1 || tm.tm_mon > 12 || tm.tm_mday < 1 || tm.tm_mday > 31 || tm.tm_hour > 23 ||
        tm.tm_min > 59 || tm.tm_sec > 60) {
        return false;
    }
    int64_t fraction = 0, unit = 100000;
    if (*s == '.') {
        for (s++; *s >= '0' && *s <= '9'; s++) {
            fraction += (*s - '0') * unit; // digits behind the sixth count 0
            unit /= 10;
        }
    }
    int64_t east;
    if (!read_zone(s, &east)) {
        return false;
    }
    tm.tm_year -= 1900;
    tm.tm_mon -= 1;
    *us = (int64_t)timegm(&tm) * 1000000 + fraction - east;
    return true;
}

static bool read_length(const char *s, uint32_t *out) {
    char *end;
    if (*s < '0' || *s > '9') {
        return false;
    }
    errno = 0;
    unsigned long long x = strtoull(s, &end, 10);
    if (errno != 0 || *end != '\0' || x > BENCH_MAX_LENGTH) {
        return false;
    }
    *out = (uint32_t)x;
    return true;
}

static attnd_err read_csv_row(reader *r) {
    char *fields[MAX_COLUMNS];
    int n = split(r->line, fields);
    for (int i = 0; i < 3; i++) {
        if (r->column[i] >= n) {
            return fail_line(r, "%d fields, but column %d is needed", n, r->column[i] + 1);
        }
    }
    int64_t us;
    uint32_t input, output;
    if (!read_time(fields[r->column[0]], &us)) {
        return fail_line(r, "TIMESTAMP \"%.40s\" is not YYYY-MM-DD HH:MM:SS.ffffff",
                         fields[r->column[0]]);
    }
    if (!read_length(fields[r->column[1]], &input)) {
        return fail_line(r, "ContextTokens \"%.40s\" is not a number from 0 to %d",
                         fields[r->column[1]], BENCH_MAX_LENGTH);
    }
    if (!read_length(fields[r->column[2]], &output)) {
        return fail_line(r, "GeneratedTokens \"%.40s\" is not a number from 0 to %d",
                         fields[r->column[2]], BENCH_MAX_LENGTH);
    }
    return append(r, us, input, output, 0);
}

// ---- Mooncake JSON lines

// read_number reads a key that must be a number from 0 to max.
static attnd_err read_number(const reader *r, const cJSON *object, const char *key, double max,
                             double *out) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    if (!cJSON_IsNumber(item)) {
        return fail_line(r, "%s is %s", key, item == NULL ? "missing" : "not a number");
    }
    if (!(item->valuedouble >= 0 && item->valuedouble <= max)) {
        return fail_line(r, "%s %g is not in 0 to %.0f", key, item->valuedouble, max);
    }
    *out = item->valuedouble;
    return ATTND_OK;
}

static attnd_err read_json_length(const reader *r, const cJSON *object, const char *key,
                                  uint32_t *out) {
    double x = 0;
    attnd_err err = read_number(r, object, key, BENCH_MAX_LENGTH, &x);
    if (err != ATTND_OK) {
        return err;
    }
    if (x != floor(x)) {
        return fail_line(r, "%s %g is not a whole number", key, x);
    }
    *out = (uint32_t)x;
    return ATTND_OK;
}

static attnd_err append_id(reader *r, uint32_t id) {
    bench_trace *t = r->trace;
    if (t->num_ids == r->ids_capacity) {
        uint64_t capacity = r->ids_capacity == 0 ? 4096 : 2 * r->ids_capacity;
        void *ids = realloc(t->ids, capacity * sizeof(*t->ids));
        if (ids == NULL) {
            return attnd_fail(r->info, ATTND_ENOMEM, "trace", "no memory for the trace");
        }
        t->ids = ids;
        r->ids_capacity = capacity;
    }
    t->ids[t->num_ids++] = id;
    return ATTND_OK;
}

static attnd_err read_hash_ids(reader *r, const cJSON *object, uint32_t *num) {
    const cJSON *ids = cJSON_GetObjectItemCaseSensitive(object, "hash_ids"), *id;
    if (!cJSON_IsArray(ids)) {
        return fail_line(r, "hash_ids is %s", ids == NULL ? "missing" : "not a list");
    }
    cJSON_ArrayForEach(id, ids) {
        if (!cJSON_IsNumber(id) || !(id->valuedouble >= 0 && id->valuedouble <= UINT32_MAX) ||
            id->valuedouble != floor(id->valuedouble)) {
            return fail_line(r, "hash_ids holds something that is no id below 2^32");
        }
        attnd_err err = append_id(r, (uint32_t)id->valuedouble);
        if (err != ATTND_OK) {
            return err;
        }
        ++*num;
    }
    return ATTND_OK;
}

static attnd_err read_object(reader *r, const cJSON *object) {
    double ms = 0;
    uint32_t input = 0, output = 0, num_ids = 0;
    if (!cJSON_IsObject(object)) {
        return fail_line(r, "not a JSON object");
    }
    attnd_err err = read_number(r, object, "timestamp", 1e13, &ms);
    if (err == ATTND_OK) {
        err = read_json_length(r, object, "input_length", &input);
    }
    if (err == ATTND_OK) {
        err = read_json_length(r, object, "output_length", &output);
    }
    if (err == ATTND_OK) {
        err = read_hash_ids(r, object, &num_ids);
    }
    return err != ATTND_OK ? err : append(r, llrint(ms * 1000), input, output, num_ids);
}

static attnd_err read_json_row(reader *r) {
    const char *end = NULL;
    cJSON *object = cJSON_ParseWithLengthOpts(r->line, r->len + 1, &end, true);
    attnd_err err = read_object(r, object);
    cJSON_Delete(object);
    return err;
}

// ---- the file

static attnd_err read_rows(reader *r, uint64_t max_rows) {
    bool more;
    attnd_err err = read_line(r, &more);
    if (err != ATTND_OK || !more) {
        return err;
    }
    bool json = r->line[0] == '{';
    r->trace->format = json ? "mooncake" : "azure";
    if (!json) {
        err = read_header(r);
        if (err == ATTND_OK) {
            err = read_line(r, &more);
        }
    }
    while (err == ATTND_OK && more) {
        err = json ? read_json_row(r) : read_csv_row(r);
        if (err != ATTND_OK || r->trace->num_rows == max_rows) {
            break;
        }
        err = read_line(r, &more);
    }
    return err;
}

static void make_times_relative(reader *r) {
    int64_t first = INT64_MAX;
    for (uint64_t i = 0; i < r->trace->num_rows; i++) {
        first = r->times[i] < first ? r->times[i] : first;
    }
    for (uint64_t i = 0; i < r->trace->num_rows; i++) {
        r->trace->rows[i].time_us = (uint64_t)(r->times[i] - first);
    }
}

attnd_err bench_trace_read(bench_trace *out, const char *path, uint64_t max_rows,
                           attnd_errinfo *info) {
    bench_trace trace = {0};
    reader r = {.path = path, .trace = &trace, .info = info};
    attnd_err err = ATTND_OK;
    r.line = malloc(BENCH_TRACE_LINE_BYTES + 1);
    r.file = fopen(path, "re");
    if (r.file == NULL) {
        err = attnd_fail(info, ATTND_EIO, "trace", "%.80s: %s", path, strerror(errno));
    } else if (r.line == NULL) {
        err = attnd_fail(info, ATTND_ENOMEM, "trace", "no memory for the trace");
    } else {
        err = read_rows(&r, max_rows);
    }
    if (err == ATTND_OK && trace.num_rows == 0) {
        err = attnd_fail(info, ATTND_EINVAL, "trace", "%.80s: holds no request", path);
    }
    if (err == ATTND_OK) {
        make_times_relative(&r);
        *out = trace;
    } else {
        bench_trace_free(&trace);
    }
    if (r.file != NULL) {
        fclose(r.file);
    }
    free(r.times);
    free(r.line);
    return err;
}

void bench_trace_free(bench_trace *trace) {
    free(trace->rows);
    free(trace->ids);
    *trace = (bench_trace){0};
}
