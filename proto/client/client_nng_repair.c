// A repair of NNG 1.x.  The two functions here stand in for the same ones of NNG, which NNG calls
// through its procedure linkage table, as every distribution builds it; where it does not, or has
// no such fault, they change nothing.  Any thread.
//
// A message that a socket does not take, or give, in one piece is moved on piece by piece:
// when a piece is done, its callback asks the stream for the next.  When the connection was closed
// in between, the request is refused by nni_aio_begin, and then nobody is told: the message counts
// as being moved for ever, the thread that reaps closed connections waits for it for ever, and no
// lost connection is noticed any more; nng_close does not return.  The refusal leaves its mark in
// the result of the aio, NNG_ECANCELED, which nothing else leaves there: what cancels a transfer of
// a connection that is still being used says NNG_ECLOSED, and the aio cannot have gone on, since
// its callback needs the lock that the caller of these functions holds.  So the error that nobody
// was told is told.
#include "proto/client/client_nng_repair.h"

#include <dlfcn.h>
#include <nng/nng.h>
#include <pthread.h>

typedef void transfer(nng_stream *stream, nng_aio *aio);

static transfer *real_send, *real_recv;
static pthread_once_t found = PTHREAD_ONCE_INIT;

static void find_real(void) {
    real_send = (transfer *)dlsym(RTLD_NEXT, "nng_stream_send");
    real_recv = (transfer *)dlsym(RTLD_NEXT, "nng_stream_recv");
}

void client_nng_repair(void) {
    pthread_once(&found, find_real);
}

static void tell_refusal(nng_aio *aio) {
    if (nng_aio_result(aio) == NNG_ECANCELED) {
        nng_aio_finish(aio, NNG_ECLOSED);
    }
}

void nng_stream_send(nng_stream *stream, nng_aio *aio) {
    client_nng_repair();
    real_send(stream, aio);
    tell_refusal(aio);
}

void nng_stream_recv(nng_stream *stream, nng_aio *aio) {
    client_nng_repair();
    real_recv(stream, aio);
    tell_refusal(aio);
}
