/* Names of result codes: those that the stand-in answers by itself, and those that tests have it answer. */
#include "cuda.h"

static const struct {
  CUresult code;
  const char *name, *text;
} RESULTS[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "not initialised"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "the device is busy or unavailable"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no device found"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "no such device"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "no such context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no code for this device"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable memory error"},
    {CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "these devices cannot reach each other"},
    {CUDA_ERROR_INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "the PTX could not be compiled"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the PTX is newer than the driver"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "no such symbol"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "not finished yet"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access happened"},
    {CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is on already"},
    {CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access is not on"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "the kernel failed"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "not supported"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY", "the system is not ready yet"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "the library does not fit the driver"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static CUresult told(CUresult code, const char **out, int as_name) {
  *out = NULL;
  for (size_t i = 0; i < sizeof RESULTS / sizeof *RESULTS; i++)
    if (RESULTS[i].code == code) *out = as_name ? RESULTS[i].name : RESULTS[i].text;
  return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetErrorName(CUresult code, const char **name) { return told(code, name, 1); }
API CUresult cuGetErrorString(CUresult code, const char **text) { return told(code, text, 0); }
