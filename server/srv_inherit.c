// Socket activation: descriptors from 3 on, their names in one variable, "name:name:...".  The
// variables of a parent that was activated itself name its process id, and are not meant for us.
#include "server/srv_inherit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FIRST_FD = 3, MAX_FDS = 1024, NAME_BYTES = 256 };

// number returns the value of a variable, 0 when it is missing or no number.
static long number(const char *variable) {
    const char *text = getenv(variable);
    char *end = NULL;
    long value = text ? strtol(text, &end, 10) : 0;
    return text && *text && !*end ? value : 0;
}

int srv_inherit_at(int i, char *name, size_t bytes) {
    const char *names = getenv("LISTEN_FDNAMES");
    long num = number("LISTEN_FDS");
    if (number("LISTEN_PID") != (long)getpid() || num > MAX_FDS || i >= num || !names) {
        return -1;
    }
    for (int n = 0; n < i; n++) {
        names += strcspn(names, ":");
        names += *names == ':';
    }
    snprintf(name, bytes, "%.*s", (int)strcspn(names, ":"), names);
    return FIRST_FD + i;
}

int srv_inherit_fd(const char *name) {
    char this[NAME_BYTES];
    int fd;
    for (int i = 0; (fd = srv_inherit_at(i, this, sizeof(this))) >= 0; i++) {
        if (strcmp(this, name) == 0) {
            return fd;
        }
    }
    return -1;
}
