/* Device memory: sparse host memory, so that what is never written costs nothing. A device pointer is its address. */
#include <stdlib.h>
#include <sys/mman.h>

#include "cuda.h"
#include "state.h"

static struct allocation *allocations;
static size_t used[MOST_DEVICES];

static size_t memory_of(int device) { return (size_t)state_number((double)(8ull << 30), "gpu%d.memory", device); }

API CUresult cuDeviceTotalMem_v2(size_t *size, CUdevice device) {
  CUresult code = enter("cuDeviceTotalMem", device, NONE);
  if (code == CUDA_SUCCESS) *size = memory_of(device);
  return code;
}

API CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
  CUcontext current;
  CUresult code = enter_context("cuMemGetInfo", NONE, NONE, &current);
  if (code != CUDA_SUCCESS) return code;
  *total = memory_of(current->device);
  *free = *total > used[current->device] ? *total - used[current->device] : 0;
  return CUDA_SUCCESS;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *start, size_t size) {
  CUcontext current;
  CUresult code = enter_context("cuMemAlloc", NONE, NONE, &current);
  if (code != CUDA_SUCCESS) return code;
  if (size == 0) return CUDA_ERROR_INVALID_VALUE;
  int device = current->device;
  if (used[device] + size > memory_of(device)) return CUDA_ERROR_OUT_OF_MEMORY;
  void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  struct allocation *made = calloc(1, sizeof *made);
  if (memory == MAP_FAILED || made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  lock();
  *made = (struct allocation){(CUdeviceptr)(uintptr_t)memory, size, device, {NULL}, allocations};
  allocations = made;
  used[device] += size;
  unlock();
  trace("allocated %d: %zu", device, size);
  *start = made->start;
  return CUDA_SUCCESS;
}

static struct allocation *removed(CUdeviceptr start) {
  for (struct allocation **link = &allocations; *link; link = &(*link)->next) {
    struct allocation *found = *link;
    if (found->start != start) continue;
    *link = found->next;
    used[found->device] -= found->size;
    return found;
  }
  return NULL;
}

API CUresult cuMemFree_v2(CUdeviceptr start) {
  CUcontext current;
  CUresult code = enter_context("cuMemFree", NONE, NONE, &current);
  if (code != CUDA_SUCCESS) return code;
  lock();
  struct allocation *found = removed(start);
  unlock();
  if (found == NULL) return CUDA_ERROR_INVALID_VALUE;
  munmap((void *)(uintptr_t)found->start, found->size);
  for (int i = 0; i < MOST_DEVICES; i++)
    if (found->shadows[i]) munmap(found->shadows[i], found->size);
  free(found);
  return CUDA_SUCCESS;
}

struct allocation *allocation_of(CUdeviceptr start, size_t size) {
  lock();
  struct allocation *at = allocations;
  while (at && !(start >= at->start && start + size <= at->start + at->size)) at = at->next;
  unlock();
  return at;
}
