// A program outside of the tree: the installed kernels, and an engine of theirs in a client.
#include <attn.h>
#include <attn_engine.h>
#include <attnd.h>
#include <stdio.h>

int main(int argc, char **argv) {
    attn_cpu *cpu = NULL;
    attnd_client *c = NULL;
    attnd_errinfo info = {0};
    attnd_connect_opts opts = {.engine = attn_engine_cpu(), .engine_threads = 1};
    if (argc != 2 || attn_cpu_create(&cpu, &(attn_cpu_opts){.num_threads = 1}, &info) ||
        attnd_connect(&c, argv[1], &opts, &info)) {
        fprintf(stderr, "%s: %s\n", attnd_strerror(info.code), info.text);
        return 1;
    }
    printf("in process, %s kernels\n", attn_cpu_isa(cpu));
    attnd_close(c);
    attn_cpu_free(cpu);
    return 0;
}
