/* How this library lays its structures out, for a test that compares them with those of the Python bindings. */
#include <stdio.h>

#include "nvml.h"

#define SIZE(type) length += (size_t)snprintf(text + length, sizeof text - length, #type " size %zu\n", sizeof(type));
#define FIELD(type, field) \
  length += (size_t)snprintf(text + length, sizeof text - length, #type " " #field " %zu\n", offsetof(type, field));

API const char *stub_layout(void) {
  static _Thread_local char text[4096];
  size_t length = 0;
  SIZE(PciInfo)
  FIELD(PciInfo, busIdLegacy) FIELD(PciInfo, domain) FIELD(PciInfo, bus) FIELD(PciInfo, device)
  FIELD(PciInfo, pciDeviceId) FIELD(PciInfo, pciSubSystemId) FIELD(PciInfo, busId)
  SIZE(Memory)
  FIELD(Memory, total) FIELD(Memory, free) FIELD(Memory, used)
  SIZE(Memory2)
  FIELD(Memory2, version) FIELD(Memory2, total) FIELD(Memory2, reserved) FIELD(Memory2, free) FIELD(Memory2, used)
  SIZE(Bar1Memory)
  FIELD(Bar1Memory, bar1Total) FIELD(Bar1Memory, bar1Free) FIELD(Bar1Memory, bar1Used)
  SIZE(Utilization)
  FIELD(Utilization, gpu) FIELD(Utilization, memory)
  SIZE(ProcessInfo)
  FIELD(ProcessInfo, pid) FIELD(ProcessInfo, usedGpuMemory) FIELD(ProcessInfo, gpuInstanceId)
  FIELD(ProcessInfo, computeInstanceId)
  SIZE(FieldValue)
  FIELD(FieldValue, fieldId) FIELD(FieldValue, scopeId) FIELD(FieldValue, timestamp) FIELD(FieldValue, latencyUsec)
  FIELD(FieldValue, valueType) FIELD(FieldValue, nvmlReturn) FIELD(FieldValue, value)
  SIZE(Value)
  FIELD(Value, dVal) FIELD(Value, uiVal) FIELD(Value, ulVal) FIELD(Value, ullVal) FIELD(Value, sllVal)
  FIELD(Value, siVal) FIELD(Value, usVal)
  SIZE(ConfComputeState)
  FIELD(ConfComputeState, environment) FIELD(ConfComputeState, ccFeature) FIELD(ConfComputeState, devToolsMode)
  return text;
}
