// srv_notify tells systemd how the daemon is.  Without libsystemd at build time, or outside
// systemd, every call does nothing.  Loop thread only.
#ifndef ATTND_SERVER_SRV_NOTIFY_H
#define ATTND_SERVER_SRV_NOTIFY_H

#include <stdint.h>

void srv_notify_ready(const char *status);
void srv_notify_status(const char *status);
void srv_notify_stopping(const char *status);
void srv_notify_alive(void);

// srv_notify_watchdog_ms returns how often systemd wants srv_notify_alive at the latest, 0 = not.
uint64_t srv_notify_watchdog_ms(void);

#endif
