// bench_cmd is the table of attn-bench's sub-commands.  To add one: write its function in a file of
// its own and give it a row in main.c.
#ifndef ATTND_LOAD_BENCH_CMD_H
#define ATTND_LOAD_BENCH_CMD_H

enum {
    BENCH_EXIT_OK = 0,
    BENCH_EXIT_FAILED = 1,   // errors, mismatches, no daemon
    BENCH_EXIT_USAGE = 2,    // wrong flags
    BENCH_EXIT_SIGNAL = 130, // ended by SIGINT or SIGTERM
};

typedef struct bench_cmd {
    const char *name, *help;
    int (*run)(int argc, char **argv); // argv[0] is the sub-command; returns the exit status
} bench_cmd;

int bench_serve(int argc, char **argv);
int bench_ipc(int argc, char **argv);
int bench_ceilings(int argc, char **argv);
int bench_kernels(int argc, char **argv);
int bench_audit(int argc, char **argv);
int bench_cache(int argc, char **argv);

#endif
