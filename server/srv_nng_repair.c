// Two repairs of NNG 1.x, linked into the daemon.  Either fault lets one client take the daemon
// from all others.  Functions here stand in for the same ones of the C library and of NNG, which
// NNG calls through its procedure linkage table, as every distribution builds it; where it does
// not, or has no such fault, they change nothing.  Any thread.
//
// Deaf.  A listener accepts a connection and first sends 8 bytes of greeting.  When the peer has
// hung up by then, sendmsg gives EPIPE, which NNG 1.5 reports to its accept loop as NNG_ECLOSED,
// "the listener was closed"; the loop ends, and the daemon never accepts anybody again.  One
// connect() and close() by anyone who may connect is enough.  ECONNRESET, which means the same of a
// socket, is taken for what it is, the peer's doing, and the loop goes on at once.  Nobody here
// tells the two codes apart: libuv, libsystemd and NNG drop the connection for either.
//
// Stuck.  A message that a socket does not take, or give, in one piece is moved on piece by piece:
// when a piece is done, its callback asks the stream for the next.  When the connection was closed
// in between, the request is refused by nni_aio_begin, and then nobody is told: the message counts
// as being moved for ever, the thread that reaps closed connections waits for it for ever, and no
// lost connection is noticed any more.  The refusal leaves its mark in the result of the aio,
// NNG_ECANCELED, which nothing else leaves there: what cancels a transfer of a connection that is
// still being used says NNG_ECLOSED, and the aio cannot have gone on, since its callback needs the
// lock that the caller of these functions holds.  So the error that nobody was told is told.
#include <dlfcn.h>
#include <errno.h>
#include <nng/nng.h>
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

typedef void transfer(nng_stream *stream, nng_aio *aio);

static transfer *real_send, *real_recv;

__attribute__((constructor)) static void find_real(void) {
    real_send = (transfer *)dlsym(RTLD_NEXT, "nng_stream_send");
    real_recv = (transfer *)dlsym(RTLD_NEXT, "nng_stream_recv");
}

static void tell_refusal(nng_aio *aio) {
    if (nng_aio_result(aio) == NNG_ECANCELED) {
        nng_aio_finish(aio, NNG_ECLOSED);
    }
}

void nng_stream_send(nng_stream *stream, nng_aio *aio) {
    real_send(stream, aio);
    tell_refusal(aio);
}

void nng_stream_recv(nng_stream *stream, nng_aio *aio) {
    real_recv(stream, aio);
    tell_refusal(aio);
}
