/* Copies and fills. What does not say Async is done when it returns, after everything queued on the null stream. */
#include <stdlib.h>
#include <string.h>

#include "cuda.h"
#include "state.h"

static CUresult submit(CUcontext current, CUstream stream, int wait, struct operation operation) {
  CUresult code = queue(current, stream, operation);
  return code == CUDA_SUCCESS && wait ? drain_for_null_stream(current) : code;
}

static CUresult write_to(const char *function, CUdeviceptr to, const void *host, size_t size, CUstream stream, int wait) {
  CUcontext current;
  struct allocation *target = allocation_of(to, size);
  CUresult code = enter_context(function, target ? target->device : NONE, NONE, &current);
  if (code != CUDA_SUCCESS) return code;
  if (target == NULL) return CUDA_ERROR_INVALID_VALUE;
  /* The caller's buffer may be gone by the time that the work is done: pageable memory is copied at once. */
  void *own = malloc(size);
  if (own == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  memcpy(own, host, size);
  trace("write %d by %d: %zu", target->device, current->device, size);
  return submit(current, stream, wait, (struct operation){.what = WRITE, .destination = target->device, .to = to,
                                                          .host = own, .size = size});
}

static CUresult read_from(const char *function, void *host, CUdeviceptr from, size_t size, CUstream stream, int wait) {
  CUcontext current;
  struct allocation *found = allocation_of(from, size);
  CUresult code = enter_context(function, found ? found->device : NONE, NONE, &current);
  if (code != CUDA_SUCCESS) return code;
  if (found == NULL) return CUDA_ERROR_INVALID_VALUE;
  trace("read %d by %d: %zu", found->device, current->device, size);
  return submit(current, stream, wait, (struct operation){.what = READ, .source = found->device, .from = from,
                                                          .host = host, .size = size});
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *host, size_t size) {
  return write_to("cuMemcpyHtoD", to, host, size, NULL, 1);
}
API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *host, size_t size, CUstream stream) {
  return write_to("cuMemcpyHtoDAsync", to, host, size, stream, 0);
}
API CUresult cuMemcpyDtoH_v2(void *host, CUdeviceptr from, size_t size) {
  return read_from("cuMemcpyDtoH", host, from, size, NULL, 1);
}
API CUresult cuMemcpyDtoHAsync_v2(void *host, CUdeviceptr from, size_t size, CUstream stream) {
  return read_from("cuMemcpyDtoHAsync", host, from, size, stream, 0);
}

static CUresult fill(const char *function, CUdeviceptr to, struct operation operation, CUstream stream, int wait) {
  CUcontext current;
  struct allocation *target = allocation_of(to, operation.size);
  CUresult code = enter_context(function, target ? target->device : NONE, NONE, &current);
  if (code != CUDA_SUCCESS) return code;
  if (target == NULL) return CUDA_ERROR_INVALID_VALUE;
  operation.what = FILL;
  operation.to = to;
  return submit(current, stream, wait, operation);
}

API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
  return fill("cuMemsetD8", to, (struct operation){.value = value, .width = 1, .size = count}, NULL, 1);
}
API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
  return fill("cuMemsetD8Async", to, (struct operation){.value = value, .width = 1, .size = count}, stream, 0);
}
API CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count) {
  return fill("cuMemsetD32", to, (struct operation){.value = value, .width = 4, .size = 4 * count}, NULL, 1);
}
API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
  return fill("cuMemsetD32Async", to, (struct operation){.value = value, .width = 4, .size = 4 * count}, stream, 0);
}

struct span {
  CUdeviceptr start;
  CUcontext context; /* NULL: the owner's */
};

static CUresult between(const char *function, struct span to, struct span from, size_t size, CUstream stream, int wait) {
  CUcontext current;
  struct allocation *target = allocation_of(to.start, size), *origin = allocation_of(from.start, size);
  int known = target && origin;
  CUresult code =
      enter_context(function, known ? origin->device : NONE, known ? target->device : NONE, &current);
  if (code != CUDA_SUCCESS) return code;
  if (!known) return CUDA_ERROR_INVALID_VALUE;
  int source = origin->device, destination = target->device;
  if (to.context && to.context->device != destination) return CUDA_ERROR_INVALID_VALUE;
  if (from.context && from.context->device != source) return CUDA_ERROR_INVALID_VALUE;
  int reaches = (primary(source)->peers >> destination | primary(destination)->peers >> source) & 1;
  enum path path = source == destination ? PATH_LOCAL : reaches ? PATH_COPY : PATH_STAGED;
  trace("copy %d>%d by %d: %zu %s", source, destination, current->device, size,
        path == PATH_LOCAL ? "local" : path == PATH_COPY ? "direct" : "staged");
  return submit(current, stream, wait,
                (struct operation){.what = COPY, .path = path, .source = source, .destination = destination,
                                   .driver = current->device, .to = to.start, .from = from.start, .size = size});
}

API CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t size) {
  return between("cuMemcpyPeer", (struct span){to, to_context}, (struct span){from, from_context}, size, NULL, 1);
}
API CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
                               size_t size, CUstream stream) {
  return between("cuMemcpyPeerAsync", (struct span){to, to_context}, (struct span){from, from_context}, size, stream, 0);
}
API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size) {
  return between("cuMemcpyDtoD", (struct span){to, NULL}, (struct span){from, NULL}, size, NULL, 1);
}
API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
  return between("cuMemcpyDtoDAsync", (struct span){to, NULL}, (struct span){from, NULL}, size, stream, 0);
}
