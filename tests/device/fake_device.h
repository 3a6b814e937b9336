// fake_device is an attn_device of host memory, so that what drives a GPU is tested on machines
// without one.  It is as unforgiving as a device: nothing runs before somebody looks for its end
// (so that a buffer that is touched too early gives wrong outputs), and its memory cannot be read
// or written while nothing runs.  Kernels are attn_cpu's: it takes every shape that these take.
//
// Wrong accesses it finds lose it, as they would lose a CUDA context.  In that and in other errors
// it gives the CUDA code of the same error.
//
// With ATTND_FAKE_MPS in the environment it says that contexts on it are shared through MPS.
#ifndef ATTND_TESTS_FAKE_DEVICE_H
#define ATTND_TESTS_FAKE_DEVICE_H

#include "attention/attn_device.h"

enum { FAKE_INVALID_VALUE = 1, FAKE_ILLEGAL_ADDRESS = 700 };

#define FAKE_UUID "a fake GPU's own" // 16 bytes

extern const attn_device_ops fake_device_ops;

// fake_device_limit makes plans of more than so many query tokens ATTND_EMSGSIZE, 0 = any number;
// for the next device that is opened.
void fake_device_limit(int32_t tokens);

#endif
