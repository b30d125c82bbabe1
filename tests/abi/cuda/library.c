/* The library as a whole: opening it, what begins every call, and finding functions by name and version. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cuda.h"
#include "state.h"

static int initialised;
static _Thread_local CUcontext current_context;

void pause_for(double seconds) {
  struct timespec left = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
  while (nanosleep(&left, &left) != 0 && errno == EINTR) continue;
}

/* With ``hang`` NULL it sleeps here; else the seconds are told, and the caller sleeps. */
CUresult scripted(const char *what, int a, int b, double *hang) {
  int sig = (int)state_for("kill", what, a, b);
  if (sig) raise(sig);
  if (state_for("stuck", what, a, b) > 0) stuck(what, a, b);
  double seconds = state_for("hang", what, a, b);
  if (hang) *hang = seconds;
  else if (seconds > 0) pause_for(seconds);
  return (CUresult)state_for("error", what, a, b);
}

static void trace_call(const char *function, int a, int b) {
  if (a == NONE) trace("%s", function);
  else if (b == NONE) trace("%s %d", function, a);
  else trace("%s %d %d", function, a, b);
}

static CUresult begin(const char *function, int a, int b) {
  trace_call(function, a, b);
  state_read();
  return scripted(function, a, b, NULL);
}

CUresult enter(const char *function, int a, int b) {
  CUresult code = begin(function, a, b);
  if (code != CUDA_SUCCESS) return code;
  if (!initialised) return CUDA_ERROR_NOT_INITIALIZED;
  int count = device_count();
  return a >= count || b >= count ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

int current_device(void) { return current_context ? current_context->device : NONE; }

CUresult enter_context(const char *function, int a, int b, CUcontext *current) {
  *current = current_context;
  if (a == NONE) a = current_device();
  CUresult code = enter(function, a, b);
  if (code != CUDA_SUCCESS) return code;
  if (current_context == NULL || current_context->references <= 0) return CUDA_ERROR_INVALID_CONTEXT;
  return current_context->sticky;
}

API CUresult cuInit(unsigned flags) {
  CUresult code = begin("cuInit", NONE, NONE);
  if (code != CUDA_SUCCESS) return code;
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  if (device_count() == 0) return CUDA_ERROR_NO_DEVICE;
  initialised = 1;
  return CUDA_SUCCESS;
}

API CUresult cuDriverGetVersion(int *version) {
  CUresult code = begin("cuDriverGetVersion", NONE, NONE);
  if (code != CUDA_SUCCESS) return code;
  *version = (int)state_number(13000, "version");
  return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext context) {
  CUresult code = enter("cuCtxSetCurrent", context ? context->device : NONE, NONE);
  if (code != CUDA_SUCCESS) return code;
  if (context && context->references <= 0) return CUDA_ERROR_INVALID_CONTEXT;
  current_context = context;
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext *context) {
  CUresult code = enter("cuCtxGetCurrent", NONE, NONE);
  if (code == CUDA_SUCCESS) *context = current_context;
  return code;
}

/* Where a function has had several forms: the version that brought each, and the symbol's ending. */
static const struct {
  const char *name;
  int since;
  const char *ending;
} FORMS[] = {
    {"cuGetProcAddress", 12000, "_v2"},
    {"cuEventElapsedTime", 12080, "_v2"},
    {"cuDeviceGetUuid", 11040, "_v2"},
    {"cuDevicePrimaryCtxRelease", 11000, "_v2"},
    {"cuDevicePrimaryCtxReset", 11000, "_v2"},
    {"cuEventDestroy", 4000, "_v2"},
    {"cuStreamDestroy", 4000, "_v2"},
    {"cuDeviceTotalMem", 3020, "_v2"},
    {"cuMemGetInfo", 3020, "_v2"},
    {"cuMemAlloc", 3020, "_v2"},
    {"cuMemFree", 3020, "_v2"},
    {"cuMemcpyHtoD", 3020, "_v2"},
    {"cuMemcpyDtoH", 3020, "_v2"},
    {"cuMemcpyDtoD", 3020, "_v2"},
    {"cuMemcpyHtoDAsync", 3020, "_v2"},
    {"cuMemcpyDtoHAsync", 3020, "_v2"},
    {"cuMemcpyDtoDAsync", 3020, "_v2"},
    {"cuMemsetD8", 3020, "_v2"},
    {"cuMemsetD32", 3020, "_v2"},
};

static const char *ending_of(const char *name, int version) {
  for (size_t i = 0; i < sizeof FORMS / sizeof *FORMS; i++)
    if (!strcmp(FORMS[i].name, name) && version >= FORMS[i].since) return FORMS[i].ending;
  return "";
}

enum { FOUND = 0, SYMBOL_NOT_FOUND = 1 };

API CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
  static void *self;
  char name[128];
  (void)flags;
  if (self == NULL) {
    Dl_info info;
    dladdr((void *)cuInit, &info);
    self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  }
  state_read();
  int newest = (int)state_number(13000, "version");
  int known = version > newest ? newest : version;
  snprintf(name, sizeof name, "%s%s", symbol, ending_of(symbol, known));
  *function = dlsym(self, name);
  if (status) *status = *function ? FOUND : SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

API CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
