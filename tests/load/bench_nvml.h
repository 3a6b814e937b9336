// bench_nvml asks NVIDIA's management library (NVML), when it is there, for what belongs beside a
// figure: driver, clocks, power.  It is looked up at run time.  One thread.
#ifndef ATTND_LOAD_BENCH_NVML_H
#define ATTND_LOAD_BENCH_NVML_H

#include <stddef.h>

// bench_nvml_limits writes what stays as it is: "driver 580.1, SM up to 1980 MHz, memory up to 3201
// MHz, power limit 700 W"; bench_nvml_state what does not: clocks, power, temperature.  bus_id is
// the GPU's PCI address, as cudaDeviceGetPCIBusId gives it.  What cannot be asked is said.
void bench_nvml_limits(const char *bus_id, char *out, size_t bytes);
void bench_nvml_state(const char *bus_id, char *out, size_t bytes);

#endif
