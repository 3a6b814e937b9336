// storm_client is a client in a storm of kills: it makes, appends to (also trees of tokens, and
// prompts that are in the prefix cache), forks, truncates and frees sequences at random, knows
// every token that each must hold, and looks.
//
// Looking.  A token is a number; its K is a word of 64 signs and its V 64 values, made of that
// number and the layer.  A query with the signs of token i meets its K with 64 times the score
// scale, and any other's with so much less that the weight of all others is 0 in float32: the
// output is V of token i, to the bit.  So reading a sequence with one row a token shows every
// value that it holds, and whose K it is found by.
//
// After a loss the client reconnects and looks at everything: the daemon's list of its sequences
// must be the model's, with at most the one call that was in flight made or not made, and every
// row of every sequence must be right.  It then goes on with what the daemon has.
#ifndef ATTND_TESTS_STORM_CLIENT_H
#define ATTND_TESTS_STORM_CLIENT_H

#include <stdatomic.h>
#include <stdint.h>

#include "proto/client/attnd.h"

typedef struct storm_client storm_client;

typedef struct storm_counts {
    uint64_t calls;                  // that changed something
    uint64_t losses;                 // of the connection
    uint64_t made, unmade, repeated; // calls in flight that had been made, or not; commits asked
    uint64_t cached;                 // tokens that were found in the prefix cache
    uint64_t seqs, rows;             // that were looked at
} storm_counts;

// storm_client_open connects; index tells clients of one daemon apart.  NULL: *info says why.  The
// caller owns it: storm_client_close.
storm_client *storm_client_open(const char *url, attnd_transport transport, uint32_t index,
                                uint64_t seed, attnd_errinfo *info);

// storm_client_run works until *stop, then frees its sequences; false when something was wrong, of
// which *why [256] tells.  *progress counts the changes of all clients, each straight before its
// call.  Any thread, one at a time.
bool storm_client_run(storm_client *s, const atomic_bool *stop, atomic_ulong *progress, char *why);

const storm_counts *storm_client_counts(const storm_client *s);
void storm_client_close(storm_client *s);

#endif
