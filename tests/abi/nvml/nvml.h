/* A stand-in libnvidia-ml.so.1: the part of NVML's C interface that the agent uses. No code of NVIDIA's is in it.
 *
 * What it answers stands in a text file (environment NVML_STUB_STATE), one key=value a line, read again at each call:
 *   driver=590.48.01  cuda=13010  init.code=9          the whole library
 *   gpu0.address=0000:01:00.0  gpu0.persistence=1      one GPU; the numbers are NVML's indices, without gaps
 *   gpu0.pci_info=0000:02:00.0                         what that GPU says of itself, where it is not its address
 *   gpu.power_limit=600000                             every GPU that has no value of its own
 *   gpu3.code=15                                       that GPU cannot be opened, and answers nothing
 *   call.nvmlDeviceGetUUID=3  gpu3.call.nvmlDeviceGetUUID=3
 *                                                      a code, or hang, kill (the process dies there), or for
 *                                                      a setter: ignore (success that changes nothing)
 * A fact without a value and without a default here is "not supported". Setters change the file.
 * NVML_STUB_TRACE names a file that gets one line for each call: function, GPU, arguments.
 *
 * Without NVML_STUB_STATE, or with the value "kernel", the GPUs are those of a loaded kernel driver: see kernel.c.
 */
#ifndef NVML_STUB_H
#define NVML_STUB_H

#include <stddef.h>

#define API __attribute__((visibility("default")))

enum {
  NVML_SUCCESS = 0,
  NVML_UNINITIALIZED = 1,
  NVML_INVALID_ARGUMENT = 2,
  NVML_NOT_SUPPORTED = 3,
  NVML_NO_PERMISSION = 4,
  NVML_NOT_FOUND = 6,
  NVML_INSUFFICIENT_SIZE = 7,
  NVML_DRIVER_NOT_LOADED = 9,
  NVML_GPU_IS_LOST = 15,
  NVML_IN_USE = 19,
  NVML_ARGUMENT_VERSION_MISMATCH = 25,
  NVML_UNKNOWN = 999,
};

typedef struct device *Device;

typedef struct {
  char busIdLegacy[16];
  unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
  char busId[32];
} PciInfo;

typedef struct {
  unsigned long long total, free, used;
} Memory;

typedef struct {
  unsigned version;
  unsigned long long total, reserved, free, used;
} Memory2;

typedef struct {
  unsigned long long bar1Total, bar1Free, bar1Used;
} Bar1Memory;

typedef struct {
  unsigned gpu, memory;
} Utilization;

typedef struct {
  unsigned pid;
  unsigned long long usedGpuMemory;
  unsigned gpuInstanceId, computeInstanceId;
} ProcessInfo;

typedef union {
  double dVal;
  unsigned uiVal;
  unsigned long ulVal;
  unsigned long long ullVal;
  long long sllVal;
  int siVal;
  unsigned short usVal;
} Value;

typedef struct {
  unsigned fieldId, scopeId;
  long long timestamp, latencyUsec;
  unsigned valueType;
  unsigned nvmlReturn;
  Value value;
} FieldValue;

typedef struct {
  unsigned environment, ccFeature, devToolsMode;
} ConfComputeState;

/* Every call of the interface begins with one of these: it traces the call, reads the state and answers the code
 * that the state has for it, or never returns. ``enter_gpu`` also gives the GPU's index in the state. */
int enter(const char *function);
int enter_gpu(const char *function, Device device, int *index);
int enter_setter(const char *function, Device device, int *index, int *ignored, const char *arguments, ...)
    __attribute__((format(printf, 5, 6)));

/* The two settings that the driver forgets when nobody holds the GPU any more. */
void forget_settings(void);

#endif
