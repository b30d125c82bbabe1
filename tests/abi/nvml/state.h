/* The state that the stand-in library answers from. All of it is per thread: ``state_read`` takes a new copy. */
#ifndef NVML_STUB_STATE_H
#define NVML_STUB_STATE_H

#include <stddef.h>

int in_kernel_mode(void);
int state_read(void); /* 0: there is none */
int state_text(char *out, size_t size, const char *key, ...) __attribute__((format(printf, 3, 4)));
long long state_number(long long otherwise, const char *key, ...) __attribute__((format(printf, 2, 3)));
int gpu_text(char *out, size_t size, int index, const char *key); /* of this GPU, else of every GPU */
long long gpu_number(int index, const char *key, long long otherwise);
int gpu_count(void);
int gpu_set(int index, const char *key, const char *value); /* 0, or an NVML code */
int gpu_find(const char *address);                          /* its index, or -1 */
void trace(const char *line);

size_t read_text(const char *path, char *out, size_t size);

#endif
