#include "state.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { STATE_SIZE = 1 << 16, KEY_SIZE = 128 };
static _Thread_local char state[STATE_SIZE];

void state_read(void) {
  const char *path = getenv("CUDA_STUB_STATE");
  size_t length = 0;
  int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (fd >= 0) {
    ssize_t got;
    while (length < sizeof state - 1 && (got = read(fd, state + length, sizeof state - 1 - length)) > 0)
      length += (size_t)got;
    close(fd);
  }
  state[length] = 0;
}

static int value_of(char *out, size_t size, const char *key) {
  size_t length = strlen(key);
  for (const char *line = state; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
    if (strncmp(line, key, length) != 0 || line[length] != '=') continue;
    const char *value = line + length + 1;
    snprintf(out, size, "%.*s", (int)strcspn(value, "\n"), value);
    return 1;
  }
  return 0;
}

int state_text(char *out, size_t size, const char *key, ...) {
  char name[KEY_SIZE];
  va_list arguments;
  va_start(arguments, key);
  vsnprintf(name, sizeof name, key, arguments);
  va_end(arguments);
  return value_of(out, size, name);
}

double state_number(double otherwise, const char *key, ...) {
  char name[KEY_SIZE], value[64];
  va_list arguments;
  va_start(arguments, key);
  vsnprintf(name, sizeof name, key, arguments);
  va_end(arguments);
  return value_of(value, sizeof value, name) ? strtod(value, NULL) : otherwise;
}

double state_for(const char *kind, const char *what, int a, int b) {
  double whole = state_number(0, "%s.%s", kind, what);
  if (a < 0) return whole;
  double one = state_number(whole, "%s.%s.%d", kind, what, a);
  return b < 0 ? one : state_number(one, "%s.%s.%d.%d", kind, what, a, b);
}

int device_count(void) {
  char address[32];
  int count = 0;
  while (state_text(address, sizeof address, "gpu%d.address", count)) count++;
  return count;
}

void trace(const char *line, ...) {
  const char *path = getenv("CUDA_STUB_TRACE");
  char text[256];
  if (path == NULL) return;
  int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd < 0) return;
  va_list arguments;
  va_start(arguments, line);
  vsnprintf(text, sizeof text, line, arguments);
  va_end(arguments);
  dprintf(fd, "%d %s\n", (int)getpid(), text);
  close(fd);
}
