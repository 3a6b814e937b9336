// Why not getopt_long: it neither checks a value nor knows a default, and would repeat the table.
#include "tests/load/bench_opts.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "proto/dtype.h"
#include "tests/load/bench_cmd.h"

static attnd_err bad_value(const bench_opt *o, const char *text, attnd_errinfo *info) {
    bool number = o->kind == BENCH_OPT_U32 || o->kind == BENCH_OPT_U64 ||
                  o->kind == BENCH_OPT_REAL || o->kind == BENCH_OPT_REAL32;
    if (number) {
        return attnd_fail(info, ATTND_EINVAL, o->name,
                          "--%s: \"%.40s\" is not a %snumber from %.15g to %.15g", o->name, text,
                          o->kind == BENCH_OPT_U32 || o->kind == BENCH_OPT_U64 ? "whole " : "",
                          o->lo, o->hi);
    }
    return attnd_fail(info, ATTND_EINVAL, o->name, "--%s: \"%.40s\" is not %s", o->name, text,
                      o->kind == BENCH_OPT_DTYPE ? "f32, bf16, f16 or f8e4m3" : "on or off");
}

static bool parse_whole(const bench_opt *o, const char *text, uint64_t *out) {
    char *end;
    errno = 0;
    if (*text < '0' || *text > '9') {
        return false;
    }
    *out = strtoull(text, &end, 10);
    return errno == 0 && *end == '\0' && *out >= (uint64_t)o->lo && *out <= (uint64_t)o->hi;
}

static bool parse_real(const bench_opt *o, const char *text, double *out) {
    char *end;
    errno = 0;
    *out = strtod(text, &end);
    return errno == 0 && end != text && *end == '\0' && *out >= o->lo && *out <= o->hi;
}

// set stores a value; false when text is none.
static bool set(const bench_opt *o, const char *text) {
    uint64_t whole = 0;
    double real = 0;
    switch (o->kind) {
    case BENCH_OPT_TEXT:
        *(const char **)o->value = text;
        return true;
    case BENCH_OPT_U32:
        if (!parse_whole(o, text, &whole)) {
            return false;
        }
        *(uint32_t *)o->value = (uint32_t)whole;
        return true;
    case BENCH_OPT_U64:
        if (!parse_whole(o, text, &whole)) {
            return false;
        }
        *(uint64_t *)o->value = whole;
        return true;
    case BENCH_OPT_REAL:
    case BENCH_OPT_REAL32:
        if (!parse_real(o, text, &real)) {
            return false;
        }
        if (o->kind == BENCH_OPT_REAL) {
            *(double *)o->value = real;
            return true;
        }
        *(float *)o->value = (float)real;
        return ((float)real != 0) == (real != 0); // 0 may mean something else
    case BENCH_OPT_DTYPE:
        *(attnd_dtype *)o->value = attnd_dtype_parse(text);
        return *(attnd_dtype *)o->value != ATTND_NUM_DTYPES;
    case BENCH_OPT_ON_OFF:
        *(bool *)o->value = strcmp(text, "on") == 0;
        return strcmp(text, "on") == 0 || strcmp(text, "off") == 0;
    case BENCH_OPT_HEADING:
    case BENCH_OPT_FLAG:
        break;
    }
    return false;
}

static bench_opt *find(bench_opt *opts, const char *name, size_t len) {
    for (bench_opt *o = opts; o->name != NULL; o++) {
        if (o->kind != BENCH_OPT_HEADING && strlen(o->name) == len &&
            strncmp(o->name, name, len) == 0) {
            return o;
        }
    }
    return NULL;
}

// parse_one reads the flag at argv[*i], and its value, which may be the next argument.
static attnd_err parse_one(bench_opt *opts, int argc, char *const *argv, int *i,
                           attnd_errinfo *info) {
    const char *arg = argv[*i];
    if (strncmp(arg, "--", 2) != 0 || arg[2] == '\0') {
        return attnd_fail(info, ATTND_EINVAL, "argument", "\"%.60s\" is not a flag", arg);
    }
    const char *name = arg + 2, *equals = strchr(name, '=');
    size_t len = equals != NULL ? (size_t)(equals - name) : strlen(name);
    bench_opt *o = find(opts, name, len);
    if (o == NULL) {
        return attnd_fail(info, ATTND_EINVAL, "argument", "no flag --%.*s",
                          len < 60 ? (int)len : 60, name);
    }
    if (o->seen) {
        return attnd_fail(info, ATTND_EINVAL, o->name, "--%s is given twice", o->name);
    }
    o->seen = true;
    if (o->kind == BENCH_OPT_FLAG) {
        *(bool *)o->value = true;
        return equals == NULL
                   ? ATTND_OK
                   : attnd_fail(info, ATTND_EINVAL, o->name, "--%s takes no value", o->name);
    }
    if (equals == NULL && *i + 1 == argc) {
        return attnd_fail(info, ATTND_EINVAL, o->name, "--%s needs a value: %s", o->name, o->arg);
    }
    const char *text = equals != NULL ? equals + 1 : argv[++*i];
    return set(o, text) ? ATTND_OK : bad_value(o, text, info);
}

attnd_err bench_opts_parse(bench_opt *opts, int argc, char *const *argv, attnd_errinfo *info) {
    for (int i = 1; i < argc; i++) {
        attnd_err err = parse_one(opts, argc, argv, &i, info);
        if (err != ATTND_OK) {
            return err;
        }
    }
    return ATTND_OK;
}

bool bench_opts_seen(const bench_opt *opts, const char *name) {
    for (const bench_opt *o = opts; o->name != NULL; o++) {
        if (strcmp(o->name, name) == 0) {
            return o->seen;
        }
    }
    return false;
}

void bench_opts_help(const bench_opt *opts, FILE *out) {
    for (const bench_opt *o = opts; o->name != NULL; o++) {
        if (o->kind == BENCH_OPT_HEADING) {
            fprintf(out, "\n%s\n", o->name);
            continue;
        }
        char left[64];
        snprintf(left, sizeof(left), "--%s%s%s", o->name, o->arg != NULL ? " " : "",
                 o->arg != NULL ? o->arg : "");
        fprintf(out, "  %-40s %s\n", left, o->help);
    }
}

bool bench_opts_ended(const bench_opt *opts, const char *command, bool help, attnd_err err,
                      const attnd_errinfo *info, int *status) {
    *status = err ? BENCH_EXIT_USAGE : BENCH_EXIT_OK;
    if (err) {
        fprintf(stderr, "attn-bench %s: %s (attn-bench %s --help lists the flags)\n", command,
                info->text, command);
    } else if (help) {
        printf("usage: attn-bench %s [FLAGS]\n", command);
        bench_opts_help(opts, stdout);
    }
    return err || help;
}
