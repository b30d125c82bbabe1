/* Settings of one GPU: each checks its argument as the driver does, and changes the state. */
#include <stdio.h>

#include "nvml.h"
#include "state.h"

static int set(int index, const char *key, long long value, int ignored) {
  char text[24];
  snprintf(text, sizeof text, "%lld", value);
  return ignored ? NVML_SUCCESS : gpu_set(index, key, text);
}

API int nvmlDeviceSetPersistenceMode(Device device, unsigned mode) {
  int index, ignored, code = enter_setter(__func__, device, &index, &ignored, "%u", mode);
  if (code != NVML_SUCCESS) return code;
  return mode > 1 ? NVML_INVALID_ARGUMENT : set(index, "persistence", mode, ignored);
}

API int nvmlDeviceSetPowerManagementLimit(Device device, unsigned milliwatts) {
  int index, ignored, code = enter_setter(__func__, device, &index, &ignored, "%u", milliwatts);
  if (code != NVML_SUCCESS) return code;
  long long low = gpu_number(index, "power_min", -1), high = gpu_number(index, "power_max", -1);
  if (low == -1) return NVML_NOT_SUPPORTED;
  return milliwatts < low || milliwatts > high ? NVML_INVALID_ARGUMENT : set(index, "power_limit", milliwatts, ignored);
}

API int nvmlDeviceSetEccMode(Device device, unsigned mode) {
  int index, ignored, code = enter_setter(__func__, device, &index, &ignored, "%u", mode);
  if (code != NVML_SUCCESS) return code;
  if (gpu_number(index, "ecc", -1) == -1) return NVML_NOT_SUPPORTED;
  return mode > 1 ? NVML_INVALID_ARGUMENT : set(index, "ecc_pending", mode, ignored);
}

API int nvmlDeviceSetComputeMode(Device device, unsigned mode) {
  int index, ignored, code = enter_setter(__func__, device, &index, &ignored, "%u", mode);
  if (code != NVML_SUCCESS) return code;
  return mode == 1 || mode > 3 ? NVML_INVALID_ARGUMENT : set(index, "compute_mode", mode, ignored);
}

API int nvmlDeviceSetMigMode(Device device, unsigned mode, unsigned *activation) {
  char processes[16];
  int index, ignored, code = enter_setter(__func__, device, &index, &ignored, "%u", mode);
  if (code != NVML_SUCCESS) return code;
  if (gpu_number(index, "mig", -1) == -1) return NVML_NOT_SUPPORTED;
  if (mode > 1) return NVML_INVALID_ARGUMENT;
  int busy = gpu_text(processes, sizeof processes, index, "processes") && *processes;
  *activation = busy ? NVML_IN_USE : NVML_SUCCESS;
  code = set(index, "mig_pending", mode, ignored);
  return busy || code ? code : set(index, "mig", mode, ignored);
}

/* NVML has no call that tells a lock: the state alone does. */
#define LOCK(set_function, reset_function, key)                                                          \
  API int set_function(Device device, unsigned low, unsigned high) {                                     \
    char text[32];                                                                                       \
    int index, ignored, code = enter_setter(#set_function, device, &index, &ignored, "%u %u", low, high); \
    if (code != NVML_SUCCESS) return code;                                                               \
    if (low > high) return NVML_INVALID_ARGUMENT;                                                        \
    snprintf(text, sizeof text, "%u-%u", low, high);                                                     \
    return ignored ? NVML_SUCCESS : gpu_set(index, key, text);                                           \
  }                                                                                                      \
  API int reset_function(Device device) {                                                                \
    int index, ignored, code = enter_setter(#reset_function, device, &index, &ignored, "%s", "");        \
    if (code != NVML_SUCCESS) return code;                                                               \
    return ignored ? NVML_SUCCESS : gpu_set(index, key, "");                                             \
  }

LOCK(nvmlDeviceSetGpuLockedClocks, nvmlDeviceResetGpuLockedClocks, "locked_clocks")
LOCK(nvmlDeviceSetMemoryLockedClocks, nvmlDeviceResetMemoryLockedClocks, "locked_memory_clocks")

/* Without persistence mode the driver lets go of a GPU that nobody uses, and its power limit with it. */
void forget_settings(void) {
  char processes[16] = "";
  for (int index = 0; index < gpu_count(); index++) {
    long long usual = gpu_number(index, "power_default", -1);
    int busy = gpu_text(processes, sizeof processes, index, "processes") && *processes;
    if (usual == -1 || busy || gpu_number(index, "persistence", 0) == 1) continue;
    if (gpu_number(index, "power_limit", usual) == usual) continue;
    set(index, "power_limit", usual, 0);
  }
}
