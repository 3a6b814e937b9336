// The backends of this build.  A new one: its table here, its file in CMakeLists.txt.
#include "tests/load/bench_backend.h"

#include <string.h>

const bench_backend_ops *const bench_backends[] = {
    &bench_backend_cpu,
#ifdef ATTND_HAVE_CUDA
    &bench_backend_cuda,
#endif
    NULL,
};

attnd_err bench_backend_find(const bench_backend_ops **ops, const char *name, attnd_errinfo *info) {
    for (int i = 0; bench_backends[i]; i++) {
        if (strcmp(bench_backends[i]->name, name) == 0) {
            *ops = bench_backends[i];
            return ATTND_OK;
        }
    }
    if (strcmp(name, "cuda") == 0) {
        return attnd_fail(
            info, ATTND_ENOTSUP, "backend",
            "this build has no CUDA kernels: there was no nvcc when it was configured, "
            "or ATTND_CUDA was OFF");
    }
    return attnd_fail(info, ATTND_EINVAL, "backend", "no backend is called \"%s\"", name);
}
