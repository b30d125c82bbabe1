/* Kernel mode: the GPUs are the directories of /proc/driver/nvidia/gpus, in the order of their addresses.
 *
 * Of ADDRESS/information the lines "Model:", "GPU UUID:" and "Device Minor:" are read. ADDRESS/persistence (0 or 1)
 * is a file of a stand-in kernel driver: NVIDIA's own has none. As with the real library, an open session holds
 * /dev/nvidiactl and the node of every GPU. NVML_STUB_ROOT goes before every path.
 */
#include "kernel.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "nvml.h"
#include "state.h"

enum { PATH_SIZE = 4096, MOST_NODES = 64 };
static int nodes[MOST_NODES], opened;

static const char *under_root(char *out, const char *path) {
  const char *root = getenv("NVML_STUB_ROOT");
  snprintf(out, PATH_SIZE, "%s%s", root ? root : "", path);
  return out;
}

static int gpus(struct dirent ***entries) {
  char path[PATH_SIZE];
  return scandir(under_root(path, "/proc/driver/nvidia/gpus"), entries, NULL, alphasort);
}

static int is_address(const char *name) { return name[0] != '.'; }

static size_t gpu_file(const char *address, const char *name, char *out, size_t size) {
  char path[PATH_SIZE], full[PATH_SIZE];
  snprintf(path, sizeof path, "/proc/driver/nvidia/gpus/%s/%s", address, name);
  return read_text(under_root(full, path), out, size);
}

static void detail(const char *information, const char *label, char *out, size_t size) {
  const char *line = strstr(information, label);
  *out = 0;
  if (line == NULL) return;
  line += strlen(label);
  line += strspn(line, " \t");
  snprintf(out, size, "%.*s", (int)strcspn(line, "\n"), line);
}

/* Nothing for what the driver does not tell: "not supported" and "" are two things. */
static size_t put(char *out, size_t size, int index, const char *key, const char *value) {
  size_t length = *value ? (size_t)snprintf(out, size, "gpu%d.%s=%s\n", index, key, value) : 0;
  return length < size ? length : 0;
}

static size_t render(char *out, size_t size, int index, const char *address) {
  char information[4096], persistence[16], value[128];
  static const struct {
    const char *label, *key;
  } details[] = {{"Model:", "name"}, {"GPU UUID:", "uuid"}, {"Device Minor:", "minor"}};
  gpu_file(address, "information", information, sizeof information);
  gpu_file(address, "persistence", persistence, sizeof persistence);
  persistence[strcspn(persistence, "\n")] = 0;
  size_t length = put(out, size, index, "address", address);
  for (size_t i = 0; i < sizeof details / sizeof *details; i++) {
    detail(information, details[i].label, value, sizeof value);
    length += put(out + length, size - length, index, details[i].key, value);
  }
  return length + put(out + length, size - length, index, "persistence", persistence);
}

size_t kernel_state(char *out, size_t size) {
  char path[PATH_SIZE], version[64];
  struct dirent **entries;
  *out = 0;
  if (access(under_root(path, "/proc/driver/nvidia/version"), R_OK) != 0) return 0;
  read_text(under_root(path, "/sys/module/nvidia/version"), version, sizeof version);
  version[strcspn(version, "\n")] = 0;
  size_t length = (size_t)snprintf(out, size, "driver=%s\nnvml=13.%s\n", version, version);
  int count = gpus(&entries);
  for (int i = 0, index = 0; i < count; i++) {
    if (is_address(entries[i]->d_name)) length += render(out + length, size - length, index++, entries[i]->d_name);
    free(entries[i]);
  }
  if (count >= 0) free(entries);
  return length;
}

/* A node that the device cgroup denies gives EPERM, and NVML then says only "Unknown Error". */
static int code_of(int error) {
  switch (error) {
    case ENOENT: return NVML_DRIVER_NOT_LOADED;
    case EACCES: return NVML_NO_PERMISSION;
    case EIO:
    case ENODEV: return NVML_GPU_IS_LOST;
    default: return NVML_UNKNOWN;
  }
}

static int open_node(const char *path) {
  char full[PATH_SIZE];
  int fd = open(under_root(full, path), O_RDWR | O_CLOEXEC);
  if (fd < 0) return code_of(errno);
  if (opened == MOST_NODES) {
    close(fd);
    return NVML_UNKNOWN;
  }
  nodes[opened++] = fd;
  return NVML_SUCCESS;
}

/* Reads the state of this thread. A GPU whose node cannot be opened is no reason to fail here. */
int kernel_open(void) {
  char minor[16], path[64];
  int code = open_node("/dev/nvidiactl");
  for (int index = 0; code == NVML_SUCCESS && index < gpu_count(); index++) {
    if (!state_text(minor, sizeof minor, "gpu%d.minor", index)) continue;
    snprintf(path, sizeof path, "/dev/nvidia%s", minor);
    open_node(path);
  }
  return code;
}

void kernel_close(void) {
  while (opened > 0) close(nodes[--opened]);
}

int kernel_set_persistence(const char *address, const char *value) {
  char path[PATH_SIZE], full[PATH_SIZE];
  snprintf(path, sizeof path, "/proc/driver/nvidia/gpus/%s/persistence", address);
  int fd = open(under_root(full, path), O_WRONLY | O_CLOEXEC);
  if (fd < 0) return errno == ENOENT ? NVML_NOT_SUPPORTED : code_of(errno);
  size_t length = strlen(value);
  int code = write(fd, value, length) == (ssize_t)length ? NVML_SUCCESS : code_of(errno);
  close(fd);
  return code;
}
