// srv_log is where the daemon's log lines go: standard error, one write a line.  Under systemd each
// line gets the priority prefix ("<4>") that the journal reads.  Any thread.
#ifndef ATTND_SERVER_SRV_LOG_H
#define ATTND_SERVER_SRV_LOG_H

// srv_log_init installs the sink.  Call it before any thread is started.
void srv_log_init(void);

#endif
