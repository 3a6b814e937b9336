// conf_gate runs a conf_launch behind a gate of a device (attn_device.h), with a stream of this
// process as the client, and checks what came of it on both sides.  What is wrong fails the test
// (Check), and every wait has a limit.  One device at a time, one thread.
#ifndef ATTND_TESTS_CONFORMANCE_CUDA_CONF_GATE_H
#define ATTND_TESTS_CONFORMANCE_CUDA_CONF_GATE_H

#include <cuda_runtime_api.h>

#include "attention/cuda/attn_cuda_device.h"
#include "proto/clock.h"
#include "tests/check_main.h"
#include "tests/conformance/conf_oracle.h"
#include "tests/conformance/cuda/conf_device.h"

enum {
    CONF_GATE_PAIRS = 8,
    CONF_GATE_LATER_US = 20,
    CONF_GATE_END_US = 1000000,            // a client that is answered ends within, also where
                                           // other processes have the GPU in between
    CONF_GATE_MASKS = ATTN_DEVICE_BUFFERS, // no buffer: see conf_gate_run
};

// When the client raises: never, before the gate is launched, right behind that, some time later.
typedef enum conf_when { CONF_NEVER, CONF_BEFORE, CONF_BEHIND, CONF_LATER } conf_when;

// Pairs and flags as words.
#define CONF_RAISED   UINT64_C(1)
#define CONF_ANSWERED (UINT64_C(1) << 32)

// conf_input is a launch, and what the GPU's memory held after one that the reference found right.
typedef struct conf_input {
    conf_launch launch;
    conf_oracle oracle;
    conf_device gpu;
    char *memory, *pool; // NULL = none yet
} conf_input;

// CONF_GATE_OK is for an attnd_err and a cudaError_t.
#define CONF_GATE_OK(call) ck_assert_int_eq((int)(call), 0)

#define CONF_GATE_AWAIT(condition, limit_us)                                \
    for (uint64_t from_us = attnd_clock_us(); !(condition);) {              \
        ck_assert_msg(attnd_clock_us() - from_us < (limit_us), #condition); \
    }

// conf_gate_open returns NULL where there is no GPU with gates, and says so.
attn_device *conf_gate_open(void);
void conf_gate_close(void);

// conf_gate_start ends what a test that failed has left, and makes all pairs and flags 0.
void conf_gate_start(void);

void conf_input_init(conf_input *in, const conf_spec *spec);
void conf_input_fini(conf_input *in);

// ---- the client

uint64_t conf_gate_address(uint32_t pair);
uint64_t conf_gate_pair(uint32_t pair);
uint64_t *conf_gate_flag(uint32_t pair);

// conf_gate_raise returns when the pair is raised, and its flag behind it.
void conf_gate_raise(uint32_t pair);

// conf_gate_client_ended is true when the client's stream waits no more.
bool conf_gate_client_ended(void);

// conf_gate_check_answered: the client's stream ends within 5 ms, answered in the pair.
void conf_gate_check_answered(uint32_t pair);

// ---- the daemon

// conf_gate_plan plans an input in a buffer, and uploads it; conf_gate_end waits for the buffer.
void conf_gate_plan(conf_input *in, uint32_t buffer);
void conf_gate_end(uint32_t buffer);

// conf_gate_check_right: as the reference says, and after the first time the same bits.
void conf_gate_check_right(conf_input *in);

// conf_gate_run launches an input behind a gate, checks that its memory is right when that has
// passed, and untouched when not, and that the client ends.  It returns whether the gate has
// passed.  Before the launch outputs hold canaries, and slots of new tokens NaN.  CONF_GATE_MASKS:
// it does what a device does that leaves block masks to the portable kernel.
bool conf_gate_run(conf_input *in, uint32_t buffer, uint32_t pair, conf_when when,
                   uint32_t *waited_us);

#endif
