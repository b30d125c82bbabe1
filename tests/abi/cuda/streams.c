/* Streams and events, and waiting for them. */
#include <stdlib.h>

#include "cuda.h"
#include "state.h"

enum { NON_BLOCKING = 1 };

API CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
  CUcontext current;
  CUresult code = enter_context("cuStreamCreate", NONE, NONE, &current);
  if (code != CUDA_SUCCESS) return code;
  if (flags & ~(unsigned)NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  struct stream *made = calloc(1, sizeof *made);
  if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
  lock();
  made->context = current;
  made->blocking = !(flags & NON_BLOCKING);
  made->next = current->streams;
  current->streams = made;
  unlock();
  *stream = made;
  return CUDA_SUCCESS;
}

API CUresult cuStreamDestroy_v2(CUstream stream) {
  CUcontext current;
  CUresult code = enter_context("cuStreamDestroy", NONE, NONE, &current);
  if (code != CUDA_SUCCESS) return code;
  code = drain(stream, 1);
  lock();
  struct stream **link = &stream->context->streams;
  while (*link && *link != stream) link = &(*link)->next;
  if (*link) *link = stream->next;
  unlock();
  free(stream);
  return code;
}

static int device_of(CUstream stream) { return (uintptr_t)stream <= 2 ? NONE : stream->context->device; }

static CUresult reach(const char *function, CUstream stream, int wait) {
  CUcontext current;
  CUresult code = enter_context(function, device_of(stream), NONE, &current);
  return code == CUDA_SUCCESS ? drain(stream_of(current, stream), wait) : code;
}

API CUresult cuStreamSynchronize(CUstream stream) { return reach("cuStreamSynchronize", stream, 1); }
API CUresult cuStreamQuery(CUstream stream) { return reach("cuStreamQuery", stream, 0); }

API CUresult cuCtxSynchronize(void) {
  CUcontext current;
  CUresult code = enter_context("cuCtxSynchronize", NONE, NONE, &current);
  if (code != CUDA_SUCCESS) return code;
  code = drain(&current->null, 1);
  for (struct stream *stream = current->streams; stream && code == CUDA_SUCCESS; stream = stream->next)
    code = drain(stream, 1);
  return code;
}

/* A stream that has to wait for an event has done, from then on, what came before the event. */
API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  CUcontext current;
  (void)flags;
  CUresult code = enter_context("cuStreamWaitEvent", device_of(stream), NONE, &current);
  if (code != CUDA_SUCCESS || !event->recorded || event->reached) return code;
  code = drain(event->stream, 1);
  struct stream *waiting = stream_of(current, stream);
  if (event->at > waiting->clock) waiting->clock = event->at;
  return code;
}

API CUresult cuEventCreate(CUevent *event, unsigned flags) {
  CUcontext current;
  (void)flags;
  CUresult code = enter_context("cuEventCreate", NONE, NONE, &current);
  if (code != CUDA_SUCCESS) return code;
  *event = calloc(1, sizeof **event);
  return *event ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuEventDestroy_v2(CUevent event) {
  CUcontext current;
  CUresult code = enter_context("cuEventDestroy", NONE, NONE, &current);
  if (code != CUDA_SUCCESS) return code;
  if (event->recorded && !event->reached) code = drain(event->stream, 1);
  free(event);
  return code;
}

API CUresult cuEventRecord(CUevent event, CUstream stream) {
  CUcontext current;
  CUresult code = enter_context("cuEventRecord", device_of(stream), NONE, &current);
  if (code != CUDA_SUCCESS) return code;
  if (event->recorded && !event->reached) code = drain(event->stream, 1);
  event->stream = stream_of(current, stream);
  event->recorded = 1;
  event->reached = 0;
  return code ? code : queue(current, stream, (struct operation){.what = RECORD, .event = event});
}

static CUresult reach_event(const char *function, CUevent event, int wait) {
  CUcontext current;
  CUresult code = enter_context(function, NONE, NONE, &current);
  if (code != CUDA_SUCCESS || !event->recorded || event->reached) return code;
  return drain(event->stream, wait);
}

API CUresult cuEventSynchronize(CUevent event) { return reach_event("cuEventSynchronize", event, 1); }
API CUresult cuEventQuery(CUevent event) { return reach_event("cuEventQuery", event, 0); }

API CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end) {
  CUcontext current;
  CUresult code = enter_context("cuEventElapsedTime", NONE, NONE, &current);
  if (code != CUDA_SUCCESS) return code;
  if (!start->recorded || !end->recorded) return CUDA_ERROR_INVALID_HANDLE;
  if (!start->reached || !end->reached) return CUDA_ERROR_NOT_READY;
  *milliseconds = (float)(end->at - start->at);
  return CUDA_SUCCESS;
}
API CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
  return cuEventElapsedTime_v2(milliseconds, start, end);
}
