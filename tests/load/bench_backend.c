// The backends of this build.  A new one: its table here, its file in CMakeLists.txt.
#include "tests/load/bench_backend.h"

#include <string.h>

const bench_backend_ops *const bench_backends[] = {&bench_backend_cpu, NULL};

const bench_backend_ops *bench_backend_find(const char *name) {
    for (int i = 0; bench_backends[i]; i++) {
        if (strcmp(bench_backends[i]->name, name) == 0) {
            return bench_backends[i];
        }
    }
    return NULL;
}
