// The notify protocol of systemd, by libsystemd where the build found it.
#include "server/srv_notify.h"

#if ATTND_HAVE_SYSTEMD

#include <systemd/sd-daemon.h>

void srv_notify_ready(const char *status) {
    sd_notifyf(0, "READY=1\nSTATUS=%s", status);
}

void srv_notify_status(const char *status) {
    sd_notifyf(0, "STATUS=%s", status);
}

void srv_notify_stopping(const char *status) {
    sd_notifyf(0, "STOPPING=1\nSTATUS=%s", status);
}

void srv_notify_alive(void) {
    sd_notify(0, "WATCHDOG=1");
}

uint64_t srv_notify_watchdog_ms(void) {
    uint64_t usec = 0;
    return sd_watchdog_enabled(0, &usec) > 0 ? usec / 1000 : 0;
}

#else

void srv_notify_ready(const char *status) {
    (void)status;
}

void srv_notify_status(const char *status) {
    (void)status;
}

void srv_notify_stopping(const char *status) {
    (void)status;
}

void srv_notify_alive(void) {}

uint64_t srv_notify_watchdog_ms(void) {
    return 0;
}

#endif
