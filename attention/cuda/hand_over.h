// hand_over is how a client's stream and the daemon's pass a layer to each other on one GPU, by
// kernels of one warp that wait at a pair in the region (proto_region.h).  Under MPS they run
// beside each other, and see a store of the other's in a microsecond, where a stream that waits by
// memory operations is looked at every few, and slows other streams while it waits.
//
//     client's stream           daemon's stream
//     raise: pair, flag    ->   gate: sees ready, notes how long it waited
//       |                       launch of the attention, which the gate lets begin
//     waits               <-    answer: the pair's ready = 0, done = 1, if the gate has passed
//
// A gate that gives up stores 0 where the launch behind it finds how much there is to do.
//
// Device addresses throughout; streams are cudaStream_t.  Errors are CUDA's.  Any thread.
#ifndef ATTND_ATTENTION_CUDA_HAND_OVER_H
#define ATTND_ATTENTION_CUDA_HAND_OVER_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { HAND_OVER_PENDING = 0, HAND_OVER_MISSED = 1, HAND_OVER_PASSED = 2 };

// hand_over_gate is what became of a gate.
typedef struct hand_over_gate {
    uint32_t state;     // HAND_OVER_*
    uint32_t waited_us; // for ready
} hand_over_gate;

// hand_over_prepare: once for each device, before the first launch.
cudaError_t hand_over_prepare(void);

// hand_over_raise raises the pair and the flag (a proto_flag in host memory), and waits for the
// done of either.
cudaError_t hand_over_raise(uint64_t pair, uint64_t flag, cudaStream_t stream);

// hand_over_wait is the gate: *outcome is in device memory, for the answer.  After limit_us it
// gives up, and stores 0 to *work.
cudaError_t hand_over_wait(uint64_t pair, hand_over_gate *outcome, uint32_t *work,
                           uint32_t limit_us, cudaStream_t stream);

// hand_over_answer answers the pair if the gate has passed; *told, in host memory, is the outcome
// for whoever waits for the stream.
cudaError_t hand_over_answer(uint64_t pair, const hand_over_gate *outcome, hand_over_gate *told,
                             cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
