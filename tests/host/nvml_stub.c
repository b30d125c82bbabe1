/* A stand-in libnvidia-ml.so.1 for tests: two GPUs at 0000:01:00.0 (minor 3) and 0000:c1:00.0 (minor 0).
 * The real pynvml loads it. Environment: STUB_INIT=CODE fails nvmlInit; STUB_LOST=INDEX loses a GPU;
 * STUB_CODE=CODE is what every per-GPU question but the address answers; STUB_HANG=1 hangs nvmlInit.
 * A function that is missing here is what an older driver looks like. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, LOST = 15 };
typedef struct gpu { int index; } *Device;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory;
typedef struct { unsigned field, scope; long long stamp, latency; int type, status; union { double d; unsigned u; } value; } Field;

static struct gpu gpus[2] = {{0}, {1}};
static const char *bus_ids[2] = {"00000000:01:00.0", "00000000:C1:00.0"};
static const unsigned minors[2] = {3, 0};

static int number(const char *name, int otherwise) { const char *v = getenv(name); return v ? atoi(v) : otherwise; }
static int lost(int index) { return number("STUB_LOST", -1) == index ? LOST : OK; }
static int code(void) { return number("STUB_CODE", OK); }
static int text(char *out, unsigned size, const char *value) { snprintf(out, size, "%s", value); return OK; }

int nvmlInitWithFlags(unsigned flags) { (void)flags; while (number("STUB_HANG", 0)) sleep(1); return number("STUB_INIT", OK); }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int result) { (void)result; return "stub error"; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { return text(out, size, "590.48.01"); }
int nvmlSystemGetNVMLVersion(char *out, unsigned size) { return text(out, size, "13.590.48.01"); }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = 13010; return OK; }
int nvmlDeviceGetCount_v2(unsigned *out) { *out = 2; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, Device *out) { *out = &gpus[i]; return lost((int)i); }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, Device *out) {
  for (int i = 0; i < 2; i++)
    if (!strcasecmp(id, bus_ids[i] + 4)) { *out = &gpus[i]; return lost(i); }
  return NOT_FOUND;
}
int nvmlDeviceGetIndex(Device d, unsigned *out) { *out = (unsigned)d->index; return OK; }
int nvmlDeviceGetPciInfo_v3(Device d, Pci *out) { memset(out, 0, sizeof *out); strcpy(out->bus_id, bus_ids[d->index]); return OK; }
int nvmlDeviceGetMinorNumber(Device d, unsigned *out) { *out = minors[d->index]; return code(); }
int nvmlDeviceGetUUID(Device d, char *out, unsigned size) { snprintf(out, size, "GPU-0000000%d", d->index); return code(); }
int nvmlDeviceGetName(Device d, char *out, unsigned size) { (void)d; text(out, size, "Stub"); return code(); }
int nvmlDeviceGetSerial(Device d, char *out, unsigned size) { (void)d; (void)out; (void)size; return NOT_SUPPORTED; }
int nvmlDeviceGetPersistenceMode(Device d, int *out) { *out = d->index == 0; return code(); }
int nvmlDeviceGetPowerManagementLimit(Device d, unsigned *out) { (void)d; *out = 600000; return code(); }
int nvmlDeviceGetPowerManagementLimitConstraints(Device d, unsigned *low, unsigned *high) {
  (void)d; *low = 300000; *high = 600000; return code();
}
int nvmlDeviceGetMemoryInfo_v2(Device d, Memory *out) {
  (void)d; out->total = 96ULL << 30; out->used = 2ULL << 20; return code();
}
int nvmlDeviceGetComputeRunningProcesses_v3(Device d, unsigned *count, void *out) { (void)d; (void)out; *count = 0; return code(); }
int nvmlDeviceGetFieldValues(Device d, int count, Field *out) {
  (void)d; (void)count; out->status = code(); out->value.u = 1; return OK;
}
int nvmlDeviceGetCurrPcieLinkGeneration(Device d, unsigned *out) { (void)d; *out = 1; return code(); }
int nvmlDeviceGetMaxPcieLinkGeneration(Device d, unsigned *out) { (void)d; *out = 5; return code(); }
int nvmlDeviceGetCurrPcieLinkWidth(Device d, unsigned *out) { (void)d; *out = 16; return code(); }
