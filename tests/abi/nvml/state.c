#include "state.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernel.h"
#include "nvml.h"

enum { STATE_SIZE = 1 << 16, KEY_SIZE = 128 };
static _Thread_local char state[STATE_SIZE];

static const char *state_path(void) { return getenv("NVML_STUB_STATE"); }

int in_kernel_mode(void) {
  const char *path = state_path();
  return path == NULL || !*path || !strcmp(path, "kernel");
}

size_t read_text(const char *path, char *out, size_t size) {
  size_t length = 0;
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd >= 0) {
    ssize_t got;
    while (length < size - 1 && (got = read(fd, out + length, size - 1 - length)) > 0) length += (size_t)got;
    close(fd);
  }
  out[length] = 0;
  return length;
}

int state_read(void) {
  if (in_kernel_mode()) return kernel_state(state, sizeof state) > 0;
  return read_text(state_path(), state, sizeof state) > 0;
}

static const char *line_of(const char *key) {
  size_t length = strlen(key);
  for (const char *line = state; *line; line = strchr(line, '\n') + 1) {
    if (!strncmp(line, key, length) && line[length] == '=') return line;
    if (!strchr(line, '\n')) break;
  }
  return NULL;
}

static int value_of(char *out, size_t size, const char *key) {
  const char *line = line_of(key);
  if (line == NULL) return 0;
  const char *value = strchr(line, '=') + 1;
  snprintf(out, size, "%.*s", (int)strcspn(value, "\n"), value);
  return 1;
}

int state_text(char *out, size_t size, const char *key, ...) {
  char name[KEY_SIZE];
  va_list arguments;
  va_start(arguments, key);
  vsnprintf(name, sizeof name, key, arguments);
  va_end(arguments);
  return value_of(out, size, name);
}

long long state_number(long long otherwise, const char *key, ...) {
  char name[KEY_SIZE], value[64];
  va_list arguments;
  va_start(arguments, key);
  vsnprintf(name, sizeof name, key, arguments);
  va_end(arguments);
  return value_of(value, sizeof value, name) ? strtoll(value, NULL, 0) : otherwise;
}

int gpu_text(char *out, size_t size, int index, const char *key) {
  return state_text(out, size, "gpu%d.%s", index, key) || state_text(out, size, "gpu.%s", key);
}

long long gpu_number(int index, const char *key, long long otherwise) {
  char value[64];
  return gpu_text(value, sizeof value, index, key) ? strtoll(value, NULL, 0) : otherwise;
}

int gpu_count(void) {
  char address[32];
  int count = 0;
  while (state_text(address, sizeof address, "gpu%d.address", count)) count++;
  return count;
}

int gpu_find(const char *address) {
  char found[32];
  for (int index = 0; state_text(found, sizeof found, "gpu%d.address", index); index++)
    if (!strcmp(found, address)) return index;
  return -1;
}

/* The file is replaced as a whole: a reader sees the old state or the new one. */
static int rewrite(const char *key, const char *value) {
  char next[4096];
  snprintf(next, sizeof next, "%s.%d", state_path(), (int)getpid());
  FILE *file = fopen(next, "w");
  if (file == NULL) return NVML_NO_PERMISSION;
  const char *old = line_of(key);
  const char *rest = old ? old + strcspn(old, "\n") : state + strlen(state);
  const char *end = old || !*state || rest[-1] == '\n' ? "" : "\n";
  fprintf(file, "%.*s%s%s=%s%s", (int)(old ? old - state : rest - state), state, end, key, value, *rest ? rest : "\n");
  if (fclose(file) != 0 || rename(next, state_path()) != 0) return NVML_UNKNOWN;
  state_read();
  return NVML_SUCCESS;
}

int gpu_set(int index, const char *key, const char *value) {
  char name[KEY_SIZE], address[32];
  snprintf(name, sizeof name, "gpu%d.%s", index, key);
  if (!in_kernel_mode()) return rewrite(name, value);
  if (strcmp(key, "persistence") != 0) return NVML_NOT_SUPPORTED;
  state_text(address, sizeof address, "gpu%d.address", index);
  return kernel_set_persistence(address, value);
}

void trace(const char *line) {
  const char *path = getenv("NVML_STUB_TRACE");
  if (path == NULL) return;
  int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd < 0) return;
  dprintf(fd, "%s\n", line);
  close(fd);
}
