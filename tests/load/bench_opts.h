// bench_opts reads command-line flags from a table: "--name value" or "--name=value".  The table is
// the help text too.  One thread.
#ifndef ATTND_LOAD_BENCH_OPTS_H
#define ATTND_LOAD_BENCH_OPTS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "proto/err.h"

typedef enum bench_opt_kind {
    BENCH_OPT_HEADING, // a line of the help; name is its text
    BENCH_OPT_TEXT,    // const char *, borrowed from argv
    BENCH_OPT_U32,     // whole number in [lo, hi]
    BENCH_OPT_U64,     // whole number in [lo, hi]
    BENCH_OPT_REAL,    // double in [lo, hi]
    BENCH_OPT_REAL32,  // float in [lo, hi]
    BENCH_OPT_DTYPE,   // attnd_dtype, by name
    BENCH_OPT_ON_OFF,  // bool: on or off
    BENCH_OPT_FLAG,    // bool: no value
} bench_opt_kind;

typedef struct bench_opt {
    const char *name; // without the dashes
    bench_opt_kind kind;
    void *value;      // where it goes
    const char *arg;  // its name in the help; NULL for flags
    const char *help; // one line
    double lo, hi;    // numbers: the limits, both inclusive (below 2^53)
    bool seen;        // set by bench_opts_parse
} bench_opt;

// bench_opts_parse reads argv[1 .. argc - 1]; opts ends with a row of name NULL.  ATTND_EINVAL with
// the flag's name in info->field: unknown, no value, a wrong or out-of-range value, a repeat, or an
// argument that is no flag.  Values stay as they were where a flag is not given.
attnd_err bench_opts_parse(bench_opt *opts, int argc, char *const *argv, attnd_errinfo *info);

// bench_opts_seen says whether a flag was given.
bool bench_opts_seen(const bench_opt *opts, const char *name);

// bench_opts_help prints the table.
void bench_opts_help(const bench_opt *opts, FILE *out);

// bench_opts_ended says whether a command ends with its flags: err, which it tells of by
// info->text, or help asked for, which it prints, "usage: attn-bench COMMAND [FLAGS]" first.
// *status is the exit status then.
bool bench_opts_ended(const bench_opt *opts, const char *command, bool help, attnd_err err,
                      const attnd_errinfo *info, int *status);

#endif
