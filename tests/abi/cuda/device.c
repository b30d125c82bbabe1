/* What is asked about devices. */
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "cuda.h"
#include "state.h"

enum { COMPUTE_MAJOR = 75, UNIFIED_ADDRESSING = 41 };

API CUresult cuDeviceGetCount(int *count) {
  CUresult code = enter("cuDeviceGetCount", NONE, NONE);
  if (code == CUDA_SUCCESS) *count = device_count();
  return code;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  CUresult code = enter("cuDeviceGet", ordinal, NONE);
  if (code == CUDA_SUCCESS) *device = ordinal;
  return code;
}

API CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
  CUresult code = enter("cuDeviceGetName", device, NONE);
  if (code == CUDA_SUCCESS && !state_text(name, (size_t)size, "gpu%d.name", device))
    snprintf(name, (size_t)size, "Stub");
  return code;
}

API CUresult cuDeviceGetPCIBusId(char *address, int size, CUdevice device) {
  CUresult code = enter("cuDeviceGetPCIBusId", device, NONE);
  if (code != CUDA_SUCCESS) return code;
  if (size < 13) return CUDA_ERROR_INVALID_VALUE;
  state_text(address, (size_t)size, "gpu%d.address", device);
  for (char *letter = address; *letter; letter++) *letter = (char)toupper((unsigned char)*letter);
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *address) {
  CUresult code = enter("cuDeviceGetByPCIBusId", NONE, NONE);
  char found[32];
  if (code != CUDA_SUCCESS) return code;
  for (int i = 0; state_text(found, sizeof found, "gpu%d.address", i); i++) {
    if (strcasecmp(found, address) != 0) continue;
    *device = i;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_DEVICE;
}

API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
  CUresult code = enter("cuDeviceGetUuid", device, NONE);
  char text[64];
  if (code != CUDA_SUCCESS) return code;
  memset(uuid, 0, sizeof *uuid);
  if (!state_text(text, sizeof text, "gpu%d.uuid", device)) return CUDA_SUCCESS;
  const char *at = strncmp(text, "GPU-", 4) ? text : text + 4;
  for (int i = 0; i < 16 && *at; i++) {
    while (*at == '-') at++;
    unsigned value = 0;
    if (sscanf(at, "%2x", &value) != 1) break;
    uuid->bytes[i] = (unsigned char)value;
    at += 2;
  }
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
  CUresult code = enter("cuDeviceGetAttribute", device, NONE);
  int otherwise = attribute == COMPUTE_MAJOR ? 12 : attribute == UNIFIED_ADDRESSING ? 1 : 0;
  if (code == CUDA_SUCCESS) *value = (int)state_number(otherwise, "gpu%d.attribute.%d", device, attribute);
  return code;
}

API CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
  CUresult code = enter("cuDeviceCanAccessPeer", device, peer);
  if (code == CUDA_SUCCESS) *can = device != peer && state_number(1, "peer.%d.%d", device, peer) != 0;
  return code;
}

enum { PERFORMANCE_RANK = 1, ACCESS_SUPPORTED = 2, NATIVE_ATOMICS = 3 };

API CUresult cuDeviceGetP2PAttribute(int *value, int attribute, CUdevice source, CUdevice destination) {
  CUresult code = enter("cuDeviceGetP2PAttribute", source, destination);
  if (code != CUDA_SUCCESS) return code;
  if (attribute < PERFORMANCE_RANK || source == destination) return CUDA_ERROR_INVALID_VALUE;
  int reaches = state_number(1, "peer.%d.%d", source, destination) != 0;
  *value = attribute == ACCESS_SUPPORTED || attribute == NATIVE_ATOMICS ? reaches : 0;
  return CUDA_SUCCESS;
}
