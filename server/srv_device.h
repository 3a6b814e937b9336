// srv_device finds the devices that this build has kernels for.
#ifndef ATTND_SERVER_SRV_DEVICE_H
#define ATTND_SERVER_SRV_DEVICE_H

#include "attention/attn_device.h"

// srv_device_cuda returns the table for compute.device = cuda:N, NULL when the build has none.  (A
// test that wants another device defines this function itself, in place of srv_device.c.)
const attn_device_ops *srv_device_cuda(void);

#endif
