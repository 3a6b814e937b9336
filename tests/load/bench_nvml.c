// The few functions that are used, as NVML's reference declares them (its header is not part of
// every CUDA toolkit).
#include "tests/load/bench_nvml.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *nvml_device;

enum {
    NVML_CLOCK_SM = 1,
    NVML_CLOCK_MEMORY = 2,
    NVML_TEMPERATURE_GPU = 0,
    NVML_VERSION_BYTES = 80
};

// XX(name, symbol, arguments): all return 0 on success.
#define NVML_MAP(XX)                                                            \
    XX(init, nvmlInit_v2, (void))                                               \
    XX(driver, nvmlSystemGetDriverVersion, (char *, unsigned))                  \
    XX(find, nvmlDeviceGetHandleByPciBusId_v2, (const char *, nvml_device *))   \
    XX(clock, nvmlDeviceGetClockInfo, (nvml_device, int, unsigned *))           \
    XX(max_clock, nvmlDeviceGetMaxClockInfo, (nvml_device, int, unsigned *))    \
    XX(power, nvmlDeviceGetPowerUsage, (nvml_device, unsigned *))               \
    XX(power_limit, nvmlDeviceGetEnforcedPowerLimit, (nvml_device, unsigned *)) \
    XX(temperature, nvmlDeviceGetTemperature, (nvml_device, int, unsigned *))

struct bench_nvml {
#define XX(name, symbol, arguments) int(*name) arguments;
    NVML_MAP(XX)
#undef XX
    void *lib;
    nvml_device device;
    const char *missing; // NULL = all is there
};

// find_nvml returns what is missing, NULL when all is there.
static const char *find_nvml(bench_nvml *n, const char *bus_id) {
    n->lib = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!n->lib) {
        return "clocks and power unknown: no libnvidia-ml.so.1";
    }
    // ISO C has no cast from an object to a function pointer; dlsym's is stored as bytes.
#define XX(name, symbol, arguments)                         \
    {                                                       \
        void *found = dlsym(n->lib, #symbol);               \
        if (!found) {                                       \
            return "clocks and power unknown: no " #symbol; \
        }                                                   \
        memcpy(&n->name, &found, sizeof(found));            \
    }
    NVML_MAP(XX)
#undef XX
    return n->init() == 0 && n->find(bus_id, &n->device) == 0
               ? NULL
               : "clocks and power unknown: NVML does not find the GPU";
}

bench_nvml *bench_nvml_open(const char *bus_id) {
    bench_nvml *n = calloc(1, sizeof(*n));
    if (n) {
        n->missing = find_nvml(n, bus_id);
    }
    return n;
}

void bench_nvml_close(bench_nvml *n) {
    if (n && n->lib) {
        (void)dlclose(n->lib);
    }
    free(n);
}

void bench_nvml_limits(const bench_nvml *n, char *out, size_t bytes) {
    char version[NVML_VERSION_BYTES] = "unknown";
    unsigned sm = 0, memory = 0, limit = 0; // MHz, MHz, mW
    if (n->missing) {
        snprintf(out, bytes, "%s", n->missing);
        return;
    }
    (void)n->driver(version, sizeof(version));
    (void)n->max_clock(n->device, NVML_CLOCK_SM, &sm);
    (void)n->max_clock(n->device, NVML_CLOCK_MEMORY, &memory);
    (void)n->power_limit(n->device, &limit);
    snprintf(out, bytes, "driver %s, SM up to %u MHz, memory up to %u MHz, power limit %u W",
             version, sm, memory, limit / 1000);
}

void bench_nvml_state(const bench_nvml *n, char *out, size_t bytes) {
    unsigned memory = 0, celsius = 0; // MHz
    double mhz, watts;
    if (n->missing) {
        snprintf(out, bytes, "%s", n->missing);
        return;
    }
    bench_nvml_pace(n, &mhz, &watts);
    (void)n->clock(n->device, NVML_CLOCK_MEMORY, &memory);
    (void)n->temperature(n->device, NVML_TEMPERATURE_GPU, &celsius);
    snprintf(out, bytes, "SM %.0f MHz, memory %u MHz, %.0f W, %u degrees Celsius", mhz, memory,
             watts, celsius);
}

void bench_nvml_pace(const bench_nvml *n, double *mhz, double *watts) {
    unsigned sm = 0, power = 0; // MHz, mW
    if (!n->missing) {
        (void)n->clock(n->device, NVML_CLOCK_SM, &sm);
        (void)n->power(n->device, &power);
    }
    *mhz = sm;
    *watts = power / 1000.0;
}
