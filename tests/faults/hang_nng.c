// Loaded into a daemon by LD_PRELOAD: closing a socket of NNG never returns.
#include <nng/nng.h>
#include <unistd.h>

int nng_close(nng_socket socket) {
    (void)socket;
    for (;;) {
        pause();
    }
}
