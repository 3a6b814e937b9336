// fuzz_wire reads a message the way the daemon and the client do, whatever its bytes are.
#ifndef ATTND_TESTS_FUZZ_WIRE_H
#define ATTND_TESTS_FUZZ_WIRE_H

#include <stddef.h>
#include <stdint.h>

// LLVMFuzzerTestOneInput is libFuzzer's entry: reads one message with every reader of proto.
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

// fuzz_wire_seed writes a good message of kind i, so that mutation starts behind the first checks,
// and returns its length, 0 when there is no such kind.
enum { FUZZ_SEED_BYTES = 4096 };
size_t fuzz_wire_seed(int i, uint8_t out[FUZZ_SEED_BYTES]);

#endif
