// attn-bench measures attnd and its kernels.  Each sub-command is a row here and a file of its own.
#include <stdio.h>
#include <string.h>

#include "tests/load/bench_cmd.h"

static const bench_cmd commands[] = {
    {"serve", "play a model runtime against a running daemon", bench_serve},
    {"ipc", "time empty calls over NNG and ring, beside bare echoes", bench_ipc},
    {"ceilings", "measure what this machine can do at most", bench_ceilings},
    {"kernels", "time the kernels, each beside its ceiling", bench_kernels},
    {"cache", "replay a trace's prompts against the prefix cache", bench_cache},
    {"audit", "hold every kernel's results against float64", bench_audit},
};
enum { NUM_COMMANDS = sizeof(commands) / sizeof(commands[0]) };

static void usage(FILE *out) {
    fprintf(out,
            "usage: attn-bench COMMAND [FLAGS]      (attn-bench COMMAND --help lists the flags)\n"
            "       attn-bench --help | --version\n\n");
    for (int i = 0; i < NUM_COMMANDS; i++) {
        fprintf(out, "  %-10s %s\n", commands[i].name, commands[i].help);
    }
}

int main(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : "";
    for (int i = 0; i < NUM_COMMANDS; i++) {
        if (strcmp(commands[i].name, name) == 0) {
            return commands[i].run(argc - 1, argv + 1);
        }
    }
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
        usage(stdout);
        return BENCH_EXIT_OK;
    }
    if (strcmp(name, "--version") == 0) {
        printf("attn-bench %s\n", ATTND_VERSION);
        return BENCH_EXIT_OK;
    }
    if (argc > 1) {
        fprintf(stderr, "attn-bench: no command \"%s\"\n", name);
    }
    usage(stderr);
    return BENCH_EXIT_USAGE;
}
