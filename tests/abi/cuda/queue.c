/* Streams: work is queued, and done when it is waited for. So a copy knows which others were under way with it. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cuda.h"
#include "state.h"

static double now(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

static int crosses(const struct operation *one) { return one->path == PATH_COPY || one->path == PATH_KERNEL; }

static int other_pair(const struct operation *one, const struct operation *other) {
  return crosses(one) && crosses(other) &&
         (one->source != other->source || one->destination != other->destination);
}

static int note_others(struct operation *added, struct stream *stream) {
  int found = 0;
  for (struct operation *waiting = stream->first; waiting; waiting = waiting->next) {
    if (!other_pair(added, waiting)) continue;
    waiting->concurrent = found = 1;
  }
  return found;
}

static int note_all(struct operation *added) {
  int found = 0;
  for (int device = 0; device < MOST_DEVICES; device++) {
    CUcontext context = primary(device);
    found |= note_others(added, &context->null);
    for (struct stream *stream = context->streams; stream; stream = stream->next) found |= note_others(added, stream);
  }
  return found;
}

struct stream *stream_of(CUcontext current, CUstream stream) {
  return (uintptr_t)stream <= 2 ? &current->null : stream; /* 1 and 2 stand for the null stream as well */
}

CUresult queue(CUcontext current, CUstream handle, struct operation operation) {
  struct stream *stream = stream_of(current, handle);
  struct operation *added = malloc(sizeof *added);
  if (added == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  *added = operation;
  lock();
  added->concurrent = note_all(added);
  if (stream->last) stream->last->next = added;
  else stream->first = added;
  stream->last = added;
  unlock();
  return CUDA_SUCCESS;
}

static void *at(CUdeviceptr address) { return (void *)(uintptr_t)address; }

static void fill(const struct operation *one) {
  if (one->width == 1) {
    memset(at(one->to), (int)one->value, one->size);
    return;
  }
  for (size_t i = 0; i + 4 <= one->size; i += 4) memcpy((char *)at(one->to) + i, &one->value, 4);
}

static void carry_out(struct stream *stream, struct operation *one) {
  if (one->what == RECORD) {
    one->event->at = stream->clock;
    one->event->reached = 1;
  } else if (one->what == FILL) {
    fill(one);
  } else {
    move(one);
    stream->clock += (double)one->size / (gbps(one) * 1e6);
  }
}

/* An error or a hang that belongs to work rather than to a call. */
static CUresult mishap(struct operation *one, int wait) {
  double seconds = 0;
  if (one->what == ILLEGAL) return CUDA_ERROR_ILLEGAL_ADDRESS;
  if (!crosses(one)) return CUDA_SUCCESS;
  if (one->until == 0) {
    CUresult code = scripted(one->path == PATH_KERNEL ? "kernel" : "copy", one->source, one->destination, &seconds);
    if (code == CUDA_SUCCESS && seconds == 0 && one->concurrent)
      code = scripted("concurrent", one->source, one->destination, &seconds);
    if (code != CUDA_SUCCESS) return code;
    one->until = now() + seconds;
  }
  if (now() >= one->until) return CUDA_SUCCESS;
  if (!wait) return CUDA_ERROR_NOT_READY;
  pause_for(one->until - now());
  return CUDA_SUCCESS;
}

static void drop_first(struct stream *stream) {
  struct operation *done = stream->first;
  stream->first = done->next;
  if (stream->first == NULL) stream->last = NULL;
  free(done);
}

CUresult drain(struct stream *stream, int wait) {
  CUresult code = stream->context->sticky;
  while (code == CUDA_SUCCESS && stream->first) {
    code = mishap(stream->first, wait);
    if (code == CUDA_ERROR_NOT_READY) return code;
    if (code == CUDA_SUCCESS) carry_out(stream, stream->first);
    else stream->context->sticky = code;
    lock();
    drop_first(stream);
    unlock();
  }
  return code;
}

CUresult drain_for_null_stream(CUcontext context) {
  CUresult code = drain(&context->null, 1);
  for (struct stream *stream = context->streams; stream && code == CUDA_SUCCESS; stream = stream->next)
    if (stream->blocking) code = drain(stream, 1);
  return code;
}
