// Socket activation: descriptors from 3 on, their names in one variable, "name:name:...".  The
// variables of a parent that was activated itself name its process id, and are not meant for us.
#include "server/srv_inherit.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FIRST_FD = 3, MAX_FDS = 1024 };

// number returns the value of a variable, 0 when it is missing or no number.
static long number(const char *variable) {
    const char *text = getenv(variable);
    char *end = NULL;
    long value = text ? strtol(text, &end, 10) : 0;
    return text && *text && !*end ? value : 0;
}

int srv_inherit_fd(const char *name) {
    long num = number("LISTEN_FDS");
    const char *names = getenv("LISTEN_FDNAMES");
    if (number("LISTEN_PID") != (long)getpid() || num > MAX_FDS || !names) {
        return -1;
    }
    size_t len = strlen(name);
    for (int i = 0; i < num; i++) {
        size_t this = strcspn(names, ":");
        if (this == len && memcmp(names, name, len) == 0) {
            return FIRST_FD + i;
        }
        names += this + (names[this] == ':');
    }
    return -1;
}
