/* The state of a loaded kernel driver, and the device nodes that an open session holds. */
#ifndef NVML_STUB_KERNEL_H
#define NVML_STUB_KERNEL_H

#include <stddef.h>

size_t kernel_state(char *out, size_t size);
int kernel_open(void); /* 0, or an NVML code */
void kernel_close(void);
int kernel_set_persistence(const char *address, const char *value);

#endif
