// bench_nvml asks NVIDIA's management library (NVML), when it is there, for what belongs beside a
// figure: driver, clocks, power.  It is looked up at run time.  One thread.
#ifndef ATTND_LOAD_BENCH_NVML_H
#define ATTND_LOAD_BENCH_NVML_H

#include <stddef.h>

typedef struct bench_nvml bench_nvml;

// bench_nvml_open finds a GPU by its PCI address, as cudaDeviceGetPCIBusId gives it.  NULL only
// without memory; what is missing is said where it is asked for.  The caller owns the result:
// bench_nvml_close, which accepts NULL.
bench_nvml *bench_nvml_open(const char *bus_id);
void bench_nvml_close(bench_nvml *n);

// bench_nvml_limits writes what stays as it is: "driver 580.1, SM up to 1980 MHz, memory up to 3201
// MHz, power limit 700 W"; bench_nvml_state what does not: clocks, power, temperature.
void bench_nvml_limits(const bench_nvml *n, char *out, size_t bytes);
void bench_nvml_state(const bench_nvml *n, char *out, size_t bytes);

// bench_nvml_pace reads the clock of the SMs and the power as they are now; 0 = unknown.
void bench_nvml_pace(const bench_nvml *n, double *mhz, double *watts);

#endif
