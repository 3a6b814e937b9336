// srv_deadline ends the process at a given time, whatever its other threads are doing: a thread of
// its own waits for the time to come.  It is what bounds a stop, since a call that hangs inside a
// library would stop the loop and every timer with it.
#ifndef ATTND_SERVER_SRV_DEADLINE_H
#define ATTND_SERVER_SRV_DEADLINE_H

#include <stdint.h>

enum { SRV_DEADLINE_EXIT = 3 }; // exit status of a process that was ended so

// srv_deadline_set sets the time (of attnd_clock_ms), in place of one that was set before;
// UINT64_MAX = none.  When it has come, a line is logged and the process ends at once.  Any thread.
void srv_deadline_set(uint64_t at_ms);

#endif
