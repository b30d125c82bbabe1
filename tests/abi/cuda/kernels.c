/* Modules and kernels. One kernel is known, by its name: p2p_copy(destination, source, count of 8-byte words). */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"
#include "state.h"

struct module {
  char *text;
};
struct function {
  char unused;
};
static struct function p2p_copy;

API CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, void *options, void *values) {
  CUcontext current;
  (void)count, (void)options, (void)values;
  CUresult code = enter_context("cuModuleLoadData", NONE, NONE, &current);
  if (code != CUDA_SUCCESS) return code;
  if (!strstr(image, ".version") || !strstr(image, ".target")) return CUDA_ERROR_INVALID_PTX;
  *module = malloc(sizeof **module);
  (*module)->text = strdup(image);
  return CUDA_SUCCESS;
}
API CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  return cuModuleLoadDataEx(module, image, 0, NULL, NULL);
}

API CUresult cuModuleUnload(CUmodule module) {
  CUcontext current;
  CUresult code = enter_context("cuModuleUnload", NONE, NONE, &current);
  if (code != CUDA_SUCCESS) return code;
  free(module->text);
  free(module);
  return CUDA_SUCCESS;
}

API CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  CUcontext current;
  char entry[64];
  CUresult code = enter_context("cuModuleGetFunction", NONE, NONE, &current);
  if (code != CUDA_SUCCESS) return code;
  snprintf(entry, sizeof entry, ".entry %s", name);
  if (strcmp(name, "p2p_copy") != 0 || !strstr(module->text, entry)) return CUDA_ERROR_NOT_FOUND;
  *function = &p2p_copy;
  return CUDA_SUCCESS;
}

struct size3 {
  unsigned x, y, z;
};

static int reaches(CUcontext current, const struct allocation *memory) {
  return memory->device == current->device || current->peers >> memory->device & 1;
}

static struct operation copying(CUcontext current, CUdeviceptr to, CUdeviceptr from, size_t size) {
  struct allocation *target = allocation_of(to, size), *origin = allocation_of(from, size);
  if (!target || !origin || !reaches(current, target) || !reaches(current, origin))
    return (struct operation){.what = ILLEGAL};
  enum path path = target->device == origin->device && origin->device == current->device ? PATH_LOCAL : PATH_KERNEL;
  trace("kernel %d>%d by %d: %zu", origin->device, target->device, current->device, size);
  return (struct operation){.what = COPY, .path = path, .source = origin->device, .destination = target->device,
                            .driver = current->device, .to = to, .from = from, .size = size};
}

API CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **parameters,
                            void **extra) {
  CUcontext current;
  struct size3 grid = {grid_x, grid_y, grid_z}, block = {block_x, block_y, block_z};
  (void)shared, (void)extra;
  CUresult code = enter_context("cuLaunchKernel", NONE, NONE, &current);
  if (code != CUDA_SUCCESS) return code;
  if (function != &p2p_copy || parameters == NULL) return CUDA_ERROR_INVALID_HANDLE;
  if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z) return CUDA_ERROR_INVALID_VALUE;
  if (block.x * block.y * block.z > 1024) return CUDA_ERROR_INVALID_VALUE;
  CUdeviceptr to = *(CUdeviceptr *)parameters[0], from = *(CUdeviceptr *)parameters[1];
  return queue(current, stream, copying(current, to, from, 8 * (size_t) * (uint64_t *)parameters[2]));
}
