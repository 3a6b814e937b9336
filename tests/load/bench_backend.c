// The backends of this build.  A new one: its table here, its file in CMakeLists.txt.
#include "tests/load/bench_backend.h"

#include <string.h>

const bench_backend_ops *const bench_backends[] = {&bench_backend_cpu, NULL};

attnd_err bench_backend_find(const bench_backend_ops **ops, const char *name, attnd_errinfo *info) {
    for (int i = 0; bench_backends[i]; i++) {
        if (strcmp(bench_backends[i]->name, name) == 0) {
            *ops = bench_backends[i];
            return ATTND_OK;
        }
    }
    return attnd_fail(info, ATTND_EINVAL, "backend", "no backend \"%s\" in this build", name);
}
