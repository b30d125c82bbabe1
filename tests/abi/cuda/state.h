/* The text state that every answer comes from, and the trace of the calls. */
#ifndef CUDA_STUB_STATE_H
#define CUDA_STUB_STATE_H

#include <stddef.h>

void state_read(void); /* takes a new copy, for this thread */
int state_text(char *out, size_t size, const char *key, ...) __attribute__((format(printf, 3, 4)));
double state_number(double otherwise, const char *key, ...) __attribute__((format(printf, 2, 3)));
/* The value of "kind.what.a.b", else of "kind.what.a", else of "kind.what"; devices may be negative: not known. */
double state_for(const char *kind, const char *what, int a, int b);
int device_count(void);
void trace(const char *line, ...) __attribute__((format(printf, 1, 2)));

#endif
