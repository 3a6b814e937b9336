// client_nng_repair lets a connection of NNG 1.x be closed at any moment; client_nng_repair.c says
// how.  Linked into libattnd and the daemon.
#ifndef ATTND_PROTO_CLIENT_CLIENT_NNG_REPAIR_H
#define ATTND_PROTO_CLIENT_CLIENT_NNG_REPAIR_H

// client_nng_repair does nothing but need to be there: a program that calls it has been linked with
// the functions that stand in for NNG's.  Any thread.
void client_nng_repair(void);

#endif
