/* What the stand-in shares between its files: codes and handles of NVIDIA's driver API, in its own words.
 *
 * The state is a text file of lines "key=value", read again at every call. A and B are device ordinals; data moves
 * from source A to destination B.
 *   version=13000               the driver's CUDA version
 *   gpuN.address= .uuid= .memory= .name= .attribute.K=
 *   peer.A.B=0                  cuDeviceCanAccessPeer(A, B) says no, and enabling it is error 217
 *   fault.A.B.PATH=KIND         PATH: copy (or only push, pull), kernel (or only store, load), staged, and concurrent:
 *                               while copies of other pairs are queued too
 *   fault.N.host=KIND           writes from the host; fault.N.readback: reads to the host
 *     KIND: zeros ones drop flip shift swap source guard, and mirror: what A writes lands in a copy that only A sees
 *     .from=BYTES               first wrong byte of a copy
 *     .above=BYTES              only where the destination's allocation is at least that long, from that offset on
 *     .stride=BYTES             only 64 bytes every so many
 *     .by=BYTES                 of shift (default 64) and swap (4096)
 *   error.WHAT[.A[.B]]=CODE     WHAT: a function; or copy, kernel, concurrent: told where the work is waited for, sticky
 *   hang.WHAT[.A[.B]]=SECONDS   sleeps; a query says "not ready"
 *   stuck.WHAT[.A[.B]]=SECONDS  sleeps in state D, and outlives SIGKILL by that long
 *   kill.WHAT[.A[.B]]=SIGNAL
 *   gbps.A.B=, gbps.A.B.staged=, gbps.A.B.concurrent=   what the events tell; nothing sleeps for it
 */
#ifndef CUDA_STUB_H
#define CUDA_STUB_H

#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))

enum {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
  CUDA_ERROR_INVALID_PTX = 218,
  CUDA_ERROR_INVALID_HANDLE = 400,
  CUDA_ERROR_NOT_FOUND = 500,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_ILLEGAL_ADDRESS = 700,
  CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
  CUDA_ERROR_PEER_ACCESS_NOT_ENABLED = 705,
  CUDA_ERROR_NOT_SUPPORTED = 801,
};
enum { MOST_DEVICES = 32, NONE = -1 };

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;
typedef struct module *CUmodule;
typedef struct function *CUfunction;
typedef struct {
  unsigned char bytes[16];
} CUuuid;

struct operation;
struct stream {
  CUcontext context;
  int blocking; /* waits for the null stream and the null stream for it */
  double clock; /* milliseconds that its work would have taken */
  struct operation *first, *last;
  struct stream *next;
};
struct context {
  int device, references;
  CUresult sticky;
  uint64_t peers; /* a bit for every device that this one may reach */
  struct stream null;
  struct stream *streams;
};
struct event {
  struct stream *stream;
  int recorded, reached;
  double at; /* milliseconds on its stream's clock */
};
struct allocation {
  CUdeviceptr start;
  size_t size;
  int device;
  void *shadows[MOST_DEVICES]; /* by accessor: what "mirror" has it see in place of this memory */
  struct allocation *next;
};

/* library.c: what begins a call. Devices may be NONE. */
CUresult enter(const char *function, int a, int b);
CUresult enter_context(const char *function, int a, int b, CUcontext *current);
CUresult scripted(const char *what, int a, int b, double *hang);
int current_device(void); /* of this thread, or NONE */
void pause_for(double seconds);

/* stuck.c */
void stuck(const char *what, int a, int b);

/* context.c */
CUcontext primary(int device);
void lock(void);
void unlock(void);

/* memory.c */
struct allocation *allocation_of(CUdeviceptr start, size_t size);

/* queue.c */
enum path { PATH_LOCAL, PATH_STAGED, PATH_COPY, PATH_KERNEL };
struct operation {
  enum { COPY, FILL, WRITE, READ, RECORD, ILLEGAL } what;
  enum path path;
  int source, destination, driver, concurrent;
  CUdeviceptr to, from;
  void *host;
  unsigned value, width; /* of a fill, in bytes */
  size_t size;
  CUevent event;
  double until; /* when a hang that has begun is over; 0: not begun */
  struct operation *next;
};
CUresult queue(CUcontext current, CUstream stream, struct operation operation);
CUresult drain(struct stream *stream, int wait);
CUresult drain_for_null_stream(CUcontext context);
struct stream *stream_of(CUcontext current, CUstream stream);

/* faults.c */
void move(const struct operation *operation);
double gbps(const struct operation *operation);

#endif
