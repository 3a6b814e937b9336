// Loaded by LD_PRELOAD: there are eight processors, however few there are.  What spins only where
// nobody waits for the processor then does so in tests, too; it takes longer, but must be right.
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

enum { PROCESSORS = 8 };

long __sysconf(int name); // as the C library exports it, too

long sysconf(int name) {
    return name == _SC_NPROCESSORS_ONLN ? PROCESSORS : __sysconf(name);
}

static void set_eight(size_t bytes, cpu_set_t *set) {
    CPU_ZERO_S(bytes, set);
    for (size_t i = 0; i < PROCESSORS; i++) {
        CPU_SET_S(i, bytes, set);
    }
}

// NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name): theirs are reserved
int sched_getaffinity(pid_t pid, size_t bytes, cpu_set_t *set) {
    (void)pid;
    set_eight(bytes, set);
    return 0;
}

// NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name): theirs are reserved
int pthread_getaffinity_np(pthread_t thread, size_t bytes, cpu_set_t *set) {
    (void)thread;
    set_eight(bytes, set);
    return 0;
}
