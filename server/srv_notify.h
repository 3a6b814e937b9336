// srv_notify tells the supervisor how the daemon is, and gives it descriptors to keep for the next
// run, by systemd's protocol (sd_notify(3)): datagrams to the socket that NOTIFY_SOCKET names.  The
// supervisor is systemd or the keeper (srv_keeper.h).  Without one every call does nothing.  Loop
// thread only.
//
// libsystemd is not used: its sd_notify sends to NOTIFY_SOCKET alone, and has no other end, while
// the keeper is one, passes messages on, and runs where there is no systemd.
#ifndef ATTND_SERVER_SRV_NOTIFY_H
#define ATTND_SERVER_SRV_NOTIFY_H

#include <stddef.h>
#include <stdint.h>

void srv_notify_ready(const char *status);
void srv_notify_stopping(const char *status);
void srv_notify_alive(void);

// SRV_NOTIFY_RELOADED is a word that only the keeper knows: a SIGHUP was taken, whatever came of
// it.
#define SRV_NOTIFY_RELOADED "X_RELOADED"
void srv_notify_reloaded(void);

// SRV_NOTIFY_NO_DEVICE is another: the start has found no device that it could open, and why.
#define SRV_NOTIFY_NO_DEVICE "X_NO_DEVICE"
void srv_notify_no_device(const char *why);

// srv_notify_store has a descriptor kept under a name, in the place of one of that name;
// srv_notify_forget has it closed.
void srv_notify_store(const char *name, int fd);
void srv_notify_forget(const char *name);

// srv_notify_settle waits until all that was told so far has been heard and done, up to 2 s: memory
// behind a descriptor that was forgotten is free then.
void srv_notify_settle(void);

// srv_notify_watchdog_ms returns how often srv_notify_alive is wanted at the latest, 0 = not.
uint64_t srv_notify_watchdog_ms(void);

// srv_notify_send sends a datagram, with a descriptor when fd >= 0, to a notify socket: a path, or
// '@' and an abstract name.
void srv_notify_send(const char *socket_name, const char *text, size_t bytes, int fd);

#endif
