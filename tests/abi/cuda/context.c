/* Contexts: one for each device, and who may reach whose memory. */
#include <pthread.h>

#include "cuda.h"
#include "state.h"

static struct context contexts[MOST_DEVICES];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

void lock(void) { pthread_mutex_lock(&mutex); }
void unlock(void) { pthread_mutex_unlock(&mutex); }
CUcontext primary(int device) { return &contexts[device]; }

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  CUresult code = enter("cuDevicePrimaryCtxRetain", device, NONE);
  if (code != CUDA_SUCCESS) return code;
  struct context *own = primary(device);
  own->device = device;
  own->null.context = own;
  own->null.blocking = 1;
  own->references++;
  *context = own;
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  CUresult code = enter("cuDevicePrimaryCtxRelease", device, NONE);
  if (code != CUDA_SUCCESS) return code;
  struct context *own = primary(device);
  if (own->references <= 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (--own->references == 0) *own = (struct context){.device = device};
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  CUresult code = enter("cuDevicePrimaryCtxGetState", device, NONE);
  if (code != CUDA_SUCCESS) return code;
  *flags = 0;
  *active = primary(device)->references > 0;
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice *device) {
  CUcontext current;
  CUresult code = enter_context("cuCtxGetDevice", NONE, NONE, &current);
  if (code == CUDA_SUCCESS) *device = current->device;
  return code;
}

API CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  CUcontext current;
  int own = current_device();
  CUresult code = enter_context("cuCtxEnablePeerAccess", own, peer ? peer->device : NONE, &current);
  if (code != CUDA_SUCCESS) return code;
  if (flags || peer == NULL) return CUDA_ERROR_INVALID_VALUE;
  if (peer == current) return CUDA_ERROR_INVALID_DEVICE;
  if (state_number(1, "peer.%d.%d", own, peer->device) == 0) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  if (current->peers >> peer->device & 1) return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
  current->peers |= UINT64_C(1) << peer->device;
  return CUDA_SUCCESS;
}

API CUresult cuCtxDisablePeerAccess(CUcontext peer) {
  CUcontext current;
  int own = current_device();
  CUresult code = enter_context("cuCtxDisablePeerAccess", own, peer ? peer->device : NONE, &current);
  if (code != CUDA_SUCCESS) return code;
  if (peer == NULL) return CUDA_ERROR_INVALID_VALUE;
  if (!(current->peers >> peer->device & 1)) return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
  current->peers &= ~(UINT64_C(1) << peer->device);
  return CUDA_SUCCESS;
}
