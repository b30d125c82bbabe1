/* Facts of one GPU. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nvml.h"
#include "state.h"

enum { UNSIGNED_INT = 1, UNSIGNED_LONG = 2, MOST_PROCESSES = 64 };
static const long long GIB = 1LL << 30;

#define TEXT(function, key)                                                           \
  API int function(Device device, char *out, unsigned size) {                         \
    char value[128];                                                                  \
    int index, code = enter_gpu(#function, device, &index);                           \
    if (code != NVML_SUCCESS) return code;                                            \
    if (!gpu_text(value, sizeof value, index, key)) return NVML_NOT_SUPPORTED;        \
    return snprintf(out, size, "%s", value) < (int)size ? NVML_SUCCESS : NVML_INSUFFICIENT_SIZE; \
  }

/* -1 for ``otherwise``: without a value in the state the GPU does not support it. */
#define NUMBER(function, type, key, otherwise)              \
  API int function(Device device, type *out) {              \
    int index, code = enter_gpu(#function, device, &index); \
    if (code != NVML_SUCCESS) return code;                  \
    long long value = gpu_number(index, key, otherwise);    \
    if (value == -1) return NVML_NOT_SUPPORTED;             \
    *out = (type)value;                                     \
    return NVML_SUCCESS;                                    \
  }

#define PAIR(function, first, second)                                          \
  API int function(Device device, unsigned *out, unsigned *out2) {             \
    int index, code = enter_gpu(#function, device, &index);                    \
    if (code != NVML_SUCCESS) return code;                                     \
    long long value = gpu_number(index, first, -1);                            \
    if (value == -1) return NVML_NOT_SUPPORTED;                                \
    *out = (unsigned)value;                                                    \
    *out2 = (unsigned)gpu_number(index, second, value);                        \
    return NVML_SUCCESS;                                                       \
  }

TEXT(nvmlDeviceGetName, "name")
TEXT(nvmlDeviceGetUUID, "uuid")
TEXT(nvmlDeviceGetSerial, "serial")
TEXT(nvmlDeviceGetVbiosVersion, "vbios")

NUMBER(nvmlDeviceGetMinorNumber, unsigned, "minor", index)
NUMBER(nvmlDeviceGetPersistenceMode, unsigned, "persistence", -1)
NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned, "power_limit", -1)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, "power_default", -1)
NUMBER(nvmlDeviceGetPowerUsage, unsigned, "power", -1)
NUMBER(nvmlDeviceGetComputeMode, unsigned, "compute_mode", 0)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, "link_gen", 5)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, "link_gen_max", 5)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, "link_width", 16)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, "link_width_max", 16)
NUMBER(nvmlDeviceGetPcieReplayCounter, unsigned, "replays", 0)
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, "clock_reasons", 1)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, "clock_reasons", 1)
PAIR(nvmlDeviceGetPowerManagementLimitConstraints, "power_min", "power_max")
PAIR(nvmlDeviceGetEccMode, "ecc", "ecc_pending")
PAIR(nvmlDeviceGetMigMode, "mig", "mig_pending")

API int nvmlDeviceGetIndex(Device device, unsigned *out) {
  int index, code = enter_gpu(__func__, device, &index);
  if (code == NVML_SUCCESS) *out = (unsigned)index;
  return code;
}

API int nvmlDeviceGetPciInfo_v3(Device device, PciInfo *out) {
  char address[32];
  unsigned function;
  int index, code = enter_gpu(__func__, device, &index);
  if (code != NVML_SUCCESS) return code;
  memset(out, 0, sizeof *out);
  if (!gpu_text(address, sizeof address, index, "pci_info")) gpu_text(address, sizeof address, index, "address");
  sscanf(address, "%x:%x:%x.%x", &out->domain, &out->bus, &out->device, &function);
  snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "%04X:%02X:%02X.0", out->domain & 0xffff, out->bus & 0xff,
           out->device & 0x1f);
  snprintf(out->busId, sizeof out->busId, "%08X:%02X:%02X.0", out->domain, out->bus, out->device);
  out->pciDeviceId = (unsigned)gpu_number(index, "pci_id", 0x2bb510de);
  return NVML_SUCCESS;
}

API int nvmlDeviceGetMemoryInfo(Device device, Memory *out) {
  int index, code = enter_gpu(__func__, device, &index);
  if (code != NVML_SUCCESS) return code;
  out->total = (unsigned long long)gpu_number(index, "memory_total", 96 * GIB);
  out->used = (unsigned long long)(gpu_number(index, "memory_used", 0) + gpu_number(index, "memory_reserved", 0));
  out->free = out->total - out->used;
  return NVML_SUCCESS;
}

API int nvmlDeviceGetMemoryInfo_v2(Device device, Memory2 *out) {
  int index, code = enter_gpu(__func__, device, &index);
  if (code != NVML_SUCCESS) return code;
  if (out->version != (2u << 24 | sizeof *out)) return NVML_ARGUMENT_VERSION_MISMATCH;
  out->total = (unsigned long long)gpu_number(index, "memory_total", 96 * GIB);
  out->reserved = (unsigned long long)gpu_number(index, "memory_reserved", 0);
  out->used = (unsigned long long)gpu_number(index, "memory_used", 0);
  out->free = out->total - out->reserved - out->used;
  return NVML_SUCCESS;
}

API int nvmlDeviceGetBAR1MemoryInfo(Device device, Bar1Memory *out) {
  int index, code = enter_gpu(__func__, device, &index);
  if (code != NVML_SUCCESS) return code;
  out->bar1Total = (unsigned long long)gpu_number(index, "bar1_total", 128 * GIB);
  out->bar1Used = (unsigned long long)gpu_number(index, "bar1_used", 0);
  out->bar1Free = out->bar1Total - out->bar1Used;
  return NVML_SUCCESS;
}

API int nvmlDeviceGetUtilizationRates(Device device, Utilization *out) {
  int index, code = enter_gpu(__func__, device, &index);
  if (code == NVML_SUCCESS)
    *out = (Utilization){(unsigned)gpu_number(index, "utilization", 0), (unsigned)gpu_number(index, "memory_busy", 0)};
  return code;
}

static int clock_of(int index, unsigned kind, const char *keys[3], unsigned *out) {
  if (kind > 2) return NVML_INVALID_ARGUMENT;
  long long value = gpu_number(index, keys[kind], -1);
  if (value == -1) return NVML_NOT_SUPPORTED;
  *out = (unsigned)value;
  return NVML_SUCCESS;
}

API int nvmlDeviceGetClockInfo(Device device, unsigned kind, unsigned *out) {
  static const char *keys[3] = {"clock_graphics", "clock_sm", "clock_memory"};
  int index, code = enter_gpu(__func__, device, &index);
  return code ? code : clock_of(index, kind, keys, out);
}

API int nvmlDeviceGetMaxClockInfo(Device device, unsigned kind, unsigned *out) {
  static const char *keys[3] = {"clock_graphics_max", "clock_sm_max", "clock_memory_max"};
  int index, code = enter_gpu(__func__, device, &index);
  return code ? code : clock_of(index, kind, keys, out);
}

API int nvmlDeviceGetRemappedRows(Device device, unsigned *correctable, unsigned *uncorrectable, unsigned *pending,
                                  unsigned *failed) {
  int index, code = enter_gpu(__func__, device, &index);
  if (code != NVML_SUCCESS) return code;
  *correctable = (unsigned)gpu_number(index, "rows_correctable", 0);
  *uncorrectable = (unsigned)gpu_number(index, "rows_uncorrectable", 0);
  *pending = (unsigned)gpu_number(index, "rows_pending", 0);
  *failed = (unsigned)gpu_number(index, "rows_failed", 0);
  return NVML_SUCCESS;
}

/* "4242:1048576 4243:-": pid and bytes, where "-" is a use that NVML cannot tell. */
static int processes(const char *function, const char *key, Device device, unsigned *count, ProcessInfo *out) {
  char list[1024] = "", *rest = NULL;
  ProcessInfo found[MOST_PROCESSES];
  unsigned number = 0, room = *count;
  int index, code = enter_gpu(function, device, &index);
  if (code != NVML_SUCCESS) return code;
  gpu_text(list, sizeof list, index, key);
  for (char *one = strtok_r(list, " ", &rest); one && number < MOST_PROCESSES; one = strtok_r(NULL, " ", &rest)) {
    char *used = strchr(one, ':');
    found[number++] = (ProcessInfo){(unsigned)atoi(one), used && used[1] != '-' ? strtoull(used + 1, NULL, 0) : ~0ULL,
                                    ~0u, ~0u};
  }
  *count = number;
  if (number == 0) return NVML_SUCCESS;
  if (out == NULL || room < number) return NVML_INSUFFICIENT_SIZE;
  memcpy(out, found, number * sizeof *out);
  return NVML_SUCCESS;
}

API int nvmlDeviceGetComputeRunningProcesses_v2(Device device, unsigned *count, ProcessInfo *out) {
  return processes(__func__, "processes", device, count, out);
}

API int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *count, ProcessInfo *out) {
  return processes(__func__, "processes", device, count, out);
}

API int nvmlDeviceGetGraphicsRunningProcesses_v2(Device device, unsigned *count, ProcessInfo *out) {
  return processes(__func__, "graphics_processes", device, count, out);
}

API int nvmlDeviceGetGraphicsRunningProcesses_v3(Device device, unsigned *count, ProcessInfo *out) {
  return processes(__func__, "graphics_processes", device, count, out);
}

/* "field.230.code=2": what a driver says of a field that it does not know. */
API int nvmlDeviceGetFieldValues(Device device, int count, FieldValue *values) {
  static const struct {
    unsigned id, type;
    const char *key;
  } fields[] = {{94, UNSIGNED_INT, "replays"},          {142, UNSIGNED_INT, "rows_correctable"},
                {143, UNSIGNED_INT, "rows_uncorrectable"}, {144, UNSIGNED_INT, "rows_pending"},
                {145, UNSIGNED_INT, "rows_failed"},      {230, UNSIGNED_LONG, "recovery_action"}};
  char key[32];
  int index, code = enter_gpu(__func__, device, &index);
  if (code != NVML_SUCCESS) return code;
  for (int i = 0; i < count; i++) {
    unsigned place = 0;
    while (place < sizeof fields / sizeof *fields && fields[place].id != values[i].fieldId) place++;
    int known = place < sizeof fields / sizeof *fields;
    snprintf(key, sizeof key, "field.%u.code", values[i].fieldId);
    values[i].nvmlReturn = (unsigned)gpu_number(index, key, known ? NVML_SUCCESS : NVML_INVALID_ARGUMENT);
    memset(&values[i].value, 0xff, sizeof values[i].value); /* what is not written is nothing that may be read */
    if (values[i].nvmlReturn != NVML_SUCCESS) continue;
    values[i].valueType = fields[place].type;
    unsigned long value = (unsigned long)gpu_number(index, fields[place].key, 0);
    if (fields[place].type == UNSIGNED_INT) values[i].value.uiVal = (unsigned)value;
    else values[i].value.ulVal = value;
  }
  return NVML_SUCCESS;
}

/* "p2p.0.1.write=4" for one direction and use, "p2p.0.1=4" for all its uses, "p2p=4" for every pair. */
API int nvmlDeviceGetP2PStatus(Device from, Device to, unsigned use, unsigned *out) {
  static const char *uses[] = {"read", "write", "nvlink", "atomics", "pci"};
  int source, target, code = enter_gpu(__func__, from, &source);
  if (code == NVML_SUCCESS) code = enter_gpu(__func__, to, &target);
  if (code != NVML_SUCCESS) return code;
  if (use >= sizeof uses / sizeof *uses) return NVML_INVALID_ARGUMENT;
  long long every = state_number(use == 2 ? 5 : 0, "p2p");
  long long pair = state_number(every, "p2p.%d.%d", source, target);
  *out = (unsigned)state_number(pair, "p2p.%d.%d.%s", source, target, uses[use]);
  return NVML_SUCCESS;
}
