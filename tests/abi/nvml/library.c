/* The library as a whole: opening and closing, versions, handles, and what begins every other call. */
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernel.h"
#include "nvml.h"
#include "state.h"

enum { MOST_DEVICES = 64 };
/* A handle knows its GPU by address: after a loss the indices of the others move. */
struct device {
  char address[32];
};
static struct device devices[MOST_DEVICES];
static int sessions;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int scripted(const char *key, int *ignored) {
  char value[32];
  if (!state_text(value, sizeof value, "%s", key)) return NVML_SUCCESS;
  if (!strcmp(value, "hang"))
    for (;;) pause();
  if (!strcmp(value, "kill")) raise(SIGKILL);
  if (!strcmp(value, "ignore")) *ignored = 1;
  return atoi(value);
}

static int begin(const char *function, Device device, int *index, int *ignored, const char *arguments) {
  char line[160], key[96];
  snprintf(line, sizeof line, "%s%s%s%s%s", function, device ? " " : "", device ? device->address : "",
           *arguments ? " " : "", arguments);
  trace(line);
  int found = state_read();
  snprintf(key, sizeof key, "call.%s", function);
  int code = scripted(key, ignored);
  if (code != NVML_SUCCESS) return code;
  if (!strcmp(function, "nvmlInit")) return found ? NVML_SUCCESS : NVML_DRIVER_NOT_LOADED;
  if (sessions == 0) return NVML_UNINITIALIZED;
  if (index == NULL) return NVML_SUCCESS;
  if (device == NULL) return NVML_INVALID_ARGUMENT;
  *index = gpu_find(device->address);
  if (*index < 0) return NVML_GPU_IS_LOST;
  code = (int)gpu_number(*index, "code", NVML_SUCCESS);
  if (code != NVML_SUCCESS) return code;
  snprintf(key, sizeof key, "gpu%d.call.%s", *index, function);
  return scripted(key, ignored);
}

int enter(const char *function) {
  int ignored = 0;
  return begin(function, NULL, NULL, &ignored, "");
}

int enter_gpu(const char *function, Device device, int *index) {
  int ignored = 0;
  return begin(function, device, index, &ignored, "");
}

int enter_setter(const char *function, Device device, int *index, int *ignored, const char *arguments, ...) {
  char text[64];
  va_list values;
  va_start(values, arguments);
  vsnprintf(text, sizeof text, arguments, values);
  va_end(values);
  *ignored = 0;
  return begin(function, device, index, ignored, text);
}

API int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  int code = enter("nvmlInit");
  if (code == NVML_SUCCESS) code = (int)state_number(NVML_SUCCESS, "init.code");
  if (code != NVML_SUCCESS) return code;
  pthread_mutex_lock(&lock);
  if (sessions == 0 && in_kernel_mode()) code = kernel_open();
  if (code == NVML_SUCCESS) sessions++;
  else if (sessions == 0) kernel_close();
  pthread_mutex_unlock(&lock);
  return code;
}

API int nvmlShutdown(void) {
  int code = enter("nvmlShutdown");
  if (code != NVML_SUCCESS) return code;
  pthread_mutex_lock(&lock);
  if (--sessions == 0) {
    kernel_close();
    if (!in_kernel_mode()) forget_settings();
  }
  pthread_mutex_unlock(&lock);
  return NVML_SUCCESS;
}

API const char *nvmlErrorString(int code) {
  static _Thread_local char words[32];
  snprintf(words, sizeof words, "stub error %d", code);
  return words;
}

static int give(char *out, unsigned size, const char *value) {
  if (out == NULL) return NVML_INVALID_ARGUMENT;
  return snprintf(out, size, "%s", value) < (int)size ? NVML_SUCCESS : NVML_INSUFFICIENT_SIZE;
}

static int give_state(char *out, unsigned size, const char *key) {
  char value[96];
  return state_text(value, sizeof value, "%s", key) ? give(out, size, value) : NVML_UNKNOWN;
}

API int nvmlSystemGetDriverVersion(char *out, unsigned size) {
  int code = enter(__func__);
  return code ? code : give_state(out, size, "driver");
}

API int nvmlSystemGetNVMLVersion(char *out, unsigned size) {
  int code = enter(__func__);
  return code ? code : give_state(out, size, "nvml");
}

API int nvmlSystemGetCudaDriverVersion_v2(int *out) {
  int code = enter(__func__);
  if (code == NVML_SUCCESS) *out = (int)state_number(13010, "cuda");
  return code;
}

API int nvmlSystemGetConfComputeState(ConfComputeState *out) {
  int code = enter(__func__);
  if (code != NVML_SUCCESS) return code;
  long long feature = state_number(-1, "cc.feature");
  if (feature < 0) return NVML_NOT_SUPPORTED;
  *out = (ConfComputeState){(unsigned)state_number(0, "cc.environment"), (unsigned)feature,
                            (unsigned)state_number(0, "cc.devtools")};
  return NVML_SUCCESS;
}

API int nvmlDeviceGetCount_v2(unsigned *out) {
  int code = enter(__func__);
  if (code == NVML_SUCCESS) *out = (unsigned)gpu_count();
  return code;
}

static int handle(int index, Device *out) {
  char address[32];
  int code = (int)gpu_number(index, "code", NVML_SUCCESS);
  if (code != NVML_SUCCESS) return code;
  state_text(address, sizeof address, "gpu%d.address", index);
  code = NVML_UNKNOWN;
  pthread_mutex_lock(&lock);
  for (int i = 0; code != NVML_SUCCESS && i < MOST_DEVICES; i++) {
    if (*devices[i].address && strcmp(devices[i].address, address) != 0) continue;
    snprintf(devices[i].address, sizeof devices[i].address, "%s", address);
    *out = &devices[i];
    code = NVML_SUCCESS;
  }
  pthread_mutex_unlock(&lock);
  return code;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *out) {
  int code = enter(__func__);
  if (code != NVML_SUCCESS) return code;
  return (int)index < gpu_count() ? handle((int)index, out) : NVML_INVALID_ARGUMENT;
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, Device *out) {
  unsigned domain, bus, slot, function = 0;
  char address[32];
  int code = enter(__func__);
  if (code != NVML_SUCCESS) return code;
  if (sscanf(bus_id, "%x:%x:%x.%x", &domain, &bus, &slot, &function) < 3) return NVML_INVALID_ARGUMENT;
  snprintf(address, sizeof address, "%04x:%02x:%02x.%x", domain, bus, slot, function);
  int index = gpu_find(address);
  return index < 0 ? NVML_NOT_FOUND : handle(index, out);
}
