/* Moving bytes, and how that goes wrong where the state says so. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cuda.h"
#include "state.h"

enum { BURST = 64, KEY = 64, STRAY = 0xc3 };
struct fault {
  char kind[16], key[KEY];
};

static int found(struct fault *fault, int a, int b, const char *path) {
  snprintf(fault->key, KEY, "fault.%d.%d.%s", a, b, path);
  return state_text(fault->kind, sizeof fault->kind, "%s", fault->key);
}

static int found_across(struct fault *fault, int a, int b, enum path path, int by_source) {
  if (path == PATH_STAGED) return found(fault, a, b, "staged");
  if (path == PATH_COPY) return found(fault, a, b, by_source ? "push" : "pull") || found(fault, a, b, "copy");
  if (path == PATH_KERNEL) return found(fault, a, b, by_source ? "store" : "load") || found(fault, a, b, "kernel");
  return 0;
}

static int fault_of(const struct operation *one, struct fault *fault) {
  int device = one->what == WRITE ? one->destination : one->source;
  if (one->what != COPY) {
    snprintf(fault->key, KEY, "fault.%d.%s", device, one->what == WRITE ? "host" : "readback");
    return state_text(fault->kind, sizeof fault->kind, "%s", fault->key);
  }
  if (one->concurrent && found(fault, one->source, one->destination, "concurrent")) return 1;
  return found_across(fault, one->source, one->destination, one->path, one->driver == one->source);
}

/* The memory that ``accessor`` sees in place of the real one. */
static unsigned char *shadow(CUdeviceptr address, size_t size, int accessor) {
  struct allocation *real = allocation_of(address, size);
  if (real->shadows[accessor] == NULL)
    real->shadows[accessor] =
        mmap(NULL, real->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return (unsigned char *)real->shadows[accessor] + (address - real->start);
}

static unsigned char *seen_source(const struct operation *one) {
  struct fault fault;
  int through_window = one->path == PATH_COPY || one->path == PATH_KERNEL;
  if (through_window && one->driver == one->destination &&
      found_across(&fault, one->destination, one->source, one->path, 1) && !strcmp(fault.kind, "mirror"))
    return shadow(one->from, one->size, one->driver);
  return (unsigned char *)(uintptr_t)one->from;
}

static size_t number(const struct fault *fault, const char *what, size_t otherwise) {
  return (size_t)state_number((double)otherwise, "%s.%s", fault->key, what);
}

static void spoil(const struct fault *fault, unsigned char *to, const unsigned char *from, const unsigned char *old,
                  size_t at, size_t length, size_t size) {
  switch (fault->kind[0] == 's' ? fault->kind[1] : fault->kind[0]) {
    case 'z': memset(to + at, 0, length); break;
    case 'o': memset(to + at, 0xff, length); break;
    case 'd': memcpy(to + at, old + at, length); break;
    case 'f': to[at + length / 2] ^= 0x10; break;
    case 'h': {
      size_t by = number(fault, "by", 64);
      for (size_t i = at; i < at + length && by < size; i++) to[i] = from[(i + size - by) % size];
      break;
    }
    default: break;
  }
}

static void swap(const struct fault *fault, unsigned char *to, const unsigned char *from, size_t first, size_t size) {
  size_t by = number(fault, "by", 4096), stride = number(fault, "stride", 2 * by);
  for (size_t at = first; at + 2 * by <= size; at += stride) {
    memcpy(to + at, from + at + by, by);
    memcpy(to + at + by, from + at, by);
  }
}

static size_t first_wrong(const struct operation *one, const struct fault *fault) {
  size_t from = number(fault, "from", 0), above = number(fault, "above", 0);
  if (above == 0 || one->what == READ) return from;
  size_t offset = one->to - allocation_of(one->to, one->size)->start;
  return offset + from >= above ? from : above - offset;
}

static void overwrite_source(const struct operation *one, size_t first) {
  unsigned char *source = (unsigned char *)(uintptr_t)one->from;
  for (size_t i = first; i < first + 8 && i < one->size; i++) source[i] = STRAY;
}

static void overwrite_guard(const struct operation *one) {
  if (!allocation_of(one->to, one->size + BURST)) return;
  memset((unsigned char *)(uintptr_t)one->to + one->size, STRAY, BURST);
}

static void move_wrongly(const struct operation *one, const struct fault *fault, unsigned char *to,
                         const unsigned char *from) {
  size_t first = first_wrong(one, fault), stride = number(fault, "stride", 0);
  unsigned char *old = NULL;
  if (!strcmp(fault->kind, "drop") && (old = malloc(one->size)) != NULL) memcpy(old, to, one->size);
  memmove(to, from, one->size);
  if (first >= one->size) first = one->size;
  if (!strcmp(fault->kind, "swap")) swap(fault, to, from, first, one->size);
  else if (!strcmp(fault->kind, "source") && one->what == COPY) overwrite_source(one, first);
  else if (!strcmp(fault->kind, "guard") && one->what != READ) overwrite_guard(one);
  else
    for (size_t at = first; at < one->size; at += stride ? stride : one->size) {
      size_t left = one->size - at;
      spoil(fault, to, from, old, at, stride && left > BURST ? BURST : left, one->size);
    }
  free(old);
}

void move(const struct operation *one) {
  struct fault fault = {"", ""};
  unsigned char *to = one->what == READ ? one->host : (unsigned char *)(uintptr_t)one->to;
  const unsigned char *from = one->what == WRITE ? one->host : seen_source(one);
  int wrong = fault_of(one, &fault);
  if (wrong && !strcmp(fault.kind, "mirror")) {
    if (one->what == COPY && one->driver == one->source) to = shadow(one->to, one->size, one->driver);
    wrong = 0;
  }
  if (wrong) move_wrongly(one, &fault, to, from);
  else memmove(to, from, one->size);
  if (one->what == WRITE) free(one->host);
}

double gbps(const struct operation *one) {
  int a = one->source, b = one->destination;
  if (one->what != COPY) return 20;
  if (one->path == PATH_LOCAL) return 500;
  if (one->path == PATH_STAGED) return state_number(11, "gbps.%d.%d.staged", a, b);
  double alone = state_number(24, "gbps.%d.%d", a, b);
  return one->concurrent ? state_number(alone, "gbps.%d.%d.concurrent", a, b) : alone;
}
