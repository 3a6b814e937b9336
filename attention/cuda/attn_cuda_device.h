// attn_cuda_device is an attn_device on a CUDA device: the engine of attn_cuda.h, an arena of one
// exportable allocation (cuMemCreate), pinned buffers, one stream.
//
// The driver is looked for when a device is opened, and not before: a program with this library
// starts on a machine without one.
#ifndef ATTND_ATTENTION_CUDA_ATTN_CUDA_DEVICE_H
#define ATTND_ATTENTION_CUDA_ATTN_CUDA_DEVICE_H

#include "attention/attn_device.h"

extern const attn_device_ops attn_cuda_device_ops;

#endif
