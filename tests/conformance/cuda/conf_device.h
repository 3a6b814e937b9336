// conf_device runs a conf_launch on the GPU: it mirrors the launch's memory there, NaN between the
// arrays, and brings pool and outputs back, so that the oracle judges them like a CPU's.
#ifndef ATTND_TESTS_CONFORMANCE_CUDA_CONF_DEVICE_H
#define ATTND_TESTS_CONFORMANCE_CUDA_CONF_DEVICE_H

#include "attention/cuda/attn_cuda.h"
#include "tests/conformance/conf_launch.h"

// conf_layout is where the blocks lie on the GPU: block e of the launch is block e + first_block,
// of which it is one of num_layers parts; row i has layer i % num_layers.
typedef struct conf_layout {
    uint64_t first_block;
    uint32_t num_layers;
} conf_layout;

typedef struct conf_device {
    conf_layout layout;
    char *memory; // device: all arrays but the pool
    char *image;  // host: what goes there
    size_t bytes;
    uint64_t offsets[CONF_MAX_MAPS]; // of map i in memory
    char *pool;                      // device, block first_block
    char *pool_image;                // host
    size_t pool_bytes;               // from there on
    attn_params params;              // with device pointers
    attn_row rows[CONF_MAX_ROWS];
    attn_block_mask masks[CONF_MAX_ROWS];
} conf_device;

// conf_device_init makes room for a launch, and params of it with device pointers.  Aborts without
// memory.
void conf_device_init(conf_device *d, const conf_launch *l, conf_layout layout);

void conf_device_fini(conf_device *d);

// conf_device_put copies the launch's memory to the GPU, conf_device_get copies pool and outputs
// back to it.
void conf_device_put(conf_device *d, const conf_launch *l);
void conf_device_get(conf_device *d, conf_launch *l);

#endif
