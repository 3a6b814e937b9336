// A repair of NNG 1.x, linked into the daemon, beside the one of client_nng_repair.c.  Either fault
// lets one client take the daemon from all others.  sendmsg stands in for the C library's, which
// NNG calls through its procedure linkage table, as every distribution builds it; where it does
// not, or has no such fault, it changes nothing.  Any thread.
//
// A listener accepts a connection and first sends 8 bytes of greeting.  When the peer has
// hung up by then, sendmsg gives EPIPE, which NNG 1.5 reports to its accept loop as NNG_ECLOSED,
// "the listener was closed"; the loop ends, and the daemon never accepts anybody again.  One
// connect() and close() by anyone who may connect is enough.  ECONNRESET, which means the same of a
// socket, is taken for what it is, the peer's doing, and the loop goes on at once.  Nobody here
// tells the two codes apart: libuv, libsystemd and NNG drop the connection for either.
#include <errno.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    ssize_t sent = syscall(SYS_sendmsg, fd, message, flags);
    if (sent < 0 && errno == EPIPE) {
        errno = ECONNRESET;
    }
    return sent;
}
