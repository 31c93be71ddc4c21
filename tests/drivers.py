"""NVIDIA's two libraries in small, compiled here: the calls of NVML and of the CUDA driver that are
used, by their C signatures, with GPUs as the environment says.

FAKE_GPUS, FAKE_NAME, FAKE_MIB, FAKE_FREE (percent), FAKE_GBS (what copies within a GPU reach),
FAKE_USED and FAKE_RESERVED (MiB), FAKE_OLD (no nvmlDeviceGetMemoryInfo_v2),
FAKE_WATTS, FAKE_ENERGY (a file with a counter in mJ),
FAKE_FLIP (the block in which one byte changes), FAKE_ECC (uncorrected errors), FAKE_MIG (the index
of a partitioned GPU), FAKE_HANG, FAKE_PROCESSES (a file with lines GPU PID MIB; a negative size is
unknown). Of each block of memory only 4 MiB are really there: writes beyond
them come round again.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef struct { unsigned long long total, free, used; } memory_t;
static int number(const char *name, int otherwise) { char *text = getenv(name); return text ? atoi(text) : otherwise; }
static int gpus(void) { return number("FAKE_GPUS", 2); }
static void get_name(char *text, unsigned size) {
  snprintf(text, size, "%s", getenv("FAKE_NAME") ? getenv("FAKE_NAME") : "NVIDIA A100-SXM4-80GB");
}
static unsigned long long total(void) { return (unsigned long long)number("FAKE_MIB", 81920) << 20; }

static int handles[16], open_count;
int nvmlInit_v2(void) { open_count++; return 0; }
int nvmlShutdown(void) { return open_count-- > 0 ? 0 : 1; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = gpus(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) {
  if ((int)i >= gpus()) return 2;
  *h = &handles[i]; return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **h) {
  unsigned i;
  if (sscanf(uuid, "GPU-00000000-0000-0000-0000-%12x", &i) != 1) return 2;
  return nvmlDeviceGetHandleByIndex_v2(i, h);
}
static int instances[7];
static int is_instance(void *h) { return (int *)h >= instances && (int *)h < instances + 7; }
int nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned *n) {
  if (h == &handles[0]) return 3; /* not supported */
  *n = 7; return 0;
}
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned i, void **found) {
  if (i >= 7) return 2;
  if (i % 2 || h != &handles[number("FAKE_MIG", -1)]) return 6; /* not found: places may be empty */
  *found = &instances[i]; return 0;
}
int nvmlDeviceGetUUID(void *h, char *text, unsigned size) {
  if (size < 80) return 7;
  if (is_instance(h)) {
    snprintf(text, size, "MIG-00000000-0000-0000-0000-%012x", (unsigned)((int *)h - instances)); return 0;
  }
  snprintf(text, size, "GPU-00000000-0000-0000-0000-%012x", (unsigned)((int *)h - handles)); return 0;
}
int nvmlDeviceGetName(void *h, char *text, unsigned size) {
  get_name(text, size);
  if (is_instance(h)) strncat(text, " MIG 1g.18gb", size - strlen(text) - 1);
  return 0;
}
static unsigned long long mib(const char *name) { return (unsigned long long)number(name, 0) << 20; }
int nvmlDeviceGetMemoryInfo(void *h, memory_t *m) {
  m->total = total(); m->used = mib("FAKE_USED") + mib("FAKE_RESERVED"); m->free = m->total - m->used; return 0;
}
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_2_t;
int nvmlDeviceGetMemoryInfo_v2(void *h, memory_2_t *m) {
  if (getenv("FAKE_OLD")) return 13; /* function not found */
  if (m->version != (sizeof(memory_2_t) | 2 << 24)) return 25; /* argument version mismatch */
  m->total = total(); m->used = mib("FAKE_USED"); m->reserved = mib("FAKE_RESERVED");
  m->free = m->total - m->used - m->reserved; return 0;
}
int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *later) {
  if (h == &handles[0]) return 3; /* not supported */
  *later = 0; *now = (int *)h - handles == number("FAKE_MIG", -1); return 0;
}
int nvmlDeviceGetUtilizationRates(void *h, unsigned *rates) { rates[0] = rates[1] = 50; return 0; }
int nvmlDeviceGetPowerUsage(void *h, unsigned *mw) {
  *mw = 1000 * number("FAKE_WATTS", 0); return *mw ? 0 : 3; /* not supported */
}
int nvmlDeviceGetTotalEnergyConsumption(void *h, unsigned long long *mj) {
  FILE *file = getenv("FAKE_ENERGY") ? fopen(getenv("FAKE_ENERGY"), "r") : NULL;
  if (!file) return 3; /* not supported */
  if (fscanf(file, "%llu", mj) != 1) *mj = 0;
  fclose(file); return 0;
}
typedef struct { unsigned pid; unsigned long long used; unsigned instance, compute; } process_t;
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, process_t *rows) {
  FILE *file = getenv("FAKE_PROCESSES") ? fopen(getenv("FAKE_PROCESSES"), "r") : NULL;
  unsigned most = *n, gpu, pid; long long mib;
  *n = 0;
  while (file && fscanf(file, "%u %u %lld", &gpu, &pid, &mib) == 3) {
    if (h != &handles[gpu]) continue;
    if (*n < most) {
      rows[*n].pid = pid; rows[*n].used = mib < 0 ? ~0ull : (unsigned long long)mib << 20;
      rows[*n].instance = rows[*n].compute = ~0u;
    }
    ++*n;
  }
  if (file) fclose(file);
  return *n > most ? 7 : 0; /* insufficient size */
}
int nvmlDeviceGetTotalEccErrors(void *h, int type, int counter, unsigned long long *n) {
  if (type != 1 || counter != 0) return 2;
  *n = number("FAKE_ECC", 0); return 0;
}
int nvmlDeviceGetRemappedRows(void *h, unsigned *c, unsigned *u, unsigned *pending, unsigned *failed) {
  *c = *u = 7; *pending = number("FAKE_PENDING", 0); *failed = number("FAKE_ROWS", 0); return 0;
}

typedef unsigned long long pointer_t; /* block number + 1, then 32 bits within the block */
#define REAL (4u << 20)
static unsigned char *blocks[1024];
static size_t sizes[1024];
static int used, inside = -1, ready;
static double copied, marks[2];
static unsigned char *at(pointer_t p) { return blocks[(p >> 32) - 1] + (p & 0xffffffff) % REAL; }
int cuInit(unsigned flags) { if (getenv("FAKE_HANG")) sleep(600); ready = 1; return flags ? 1 : 0; }
int cuGetErrorString(int code, const char **text) { *text = code == 2 ? "out of memory" : "invalid"; return 0; }
int cuDeviceGetCount(int *n) { *n = gpus(); return ready ? 0 : 3; }
int cuDeviceGet(int *device, int i) { if (i >= gpus()) return 101; *device = i; return 0; }
int cuDeviceGetName(char *text, int size, int device) { get_name(text, size); return 0; }
int cuDeviceGetUuid(unsigned char *raw, int device) { memset(raw, 0, 16); raw[15] = device; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &handles[device]; inside = device; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { int was = inside; inside = -1; return was == device ? 0 : 201; }
int cuCtxSetCurrent(void *context) { return context == &handles[inside] ? 0 : 201; }
int cuMemGetInfo_v2(size_t *free, size_t *all) {
  *all = total(); *free = *all / 100 * number("FAKE_FREE", 99); return 0;
}
int cuMemAlloc_v2(pointer_t *p, size_t size) {
  size_t taken = size;
  for (int i = 0; i < used; i++) taken += blocks[i] ? sizes[i] : 0;
  if (taken > total() || used == 1024) return 2;
  blocks[used] = calloc(1, REAL); sizes[used] = size; used++;
  *p = (pointer_t)used << 32; return 0;
}
int cuMemFree_v2(pointer_t p) {
  int i = (p >> 32) - 1;
  if (i < 0 || i >= used || !blocks[i]) return 1;
  free(blocks[i]); blocks[i] = 0;
  if (i == used - 1) while (used && !blocks[used - 1]) used--;
  return 0;
}
int cuMemcpyHtoD_v2(pointer_t p, const void *from, size_t size) { memcpy(at(p), from, size); return size > REAL; }
int cuMemcpyDtoH_v2(void *to, pointer_t p, size_t size) { memcpy(to, at(p), size); return size > REAL; }
int cuMemcpyDtoD_v2(pointer_t to, pointer_t from, size_t size) {
  int block = (int)(to >> 32) - 1;
  if (size != sizes[block]) return 1;
  memcpy(at(to), at(from), REAL);
  if (block == number("FAKE_FLIP", -1)) at(to)[12345] ^= 0x20;
  copied += size; return 0;
}
int cuEventCreate(void **event, unsigned flags) { static int next; *event = &marks[next++ % 2]; return 0; }
int cuEventDestroy_v2(void *event) { return 0; }
int cuEventRecord(void *event, void *stream) { *(double *)event = copied; return 0; }
int cuEventSynchronize(void *event) { return 0; }
int cuEventElapsedTime(float *ms, void *begin, void *end) {
  *ms = 2 * (*(double *)end - *(double *)begin) / (number("FAKE_GBS", 1700) * 1e6); return 0;
}
"""


def make_driver(folder: Path, **fakes: object) -> Path:
    """The folder, with both libraries in it, for LD_LIBRARY_PATH; skips where there is no C
    compiler.

    `fakes`: what the environment says (`gbs=100` is FAKE_GBS=100) where it does not reach the
    program.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler to make a stand-in for NVIDIA's libraries")
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(
        f'  setenv("FAKE_{name.upper()}", "{value}", 0);\n' for name, value in fakes.items()
    )
    (folder / "driver.c").write_text(
        f"{SOURCE}\n__attribute__((constructor)) static void settle(void) {{\n{lines}}}\n"
    )
    for name in ("libnvidia-ml.so.1", "libcuda.so.1"):
        command = [compiler, "-shared", "-fPIC", "-o", str(folder / name), str(folder / "driver.c")]
        subprocess.run(command, check=True, timeout=60)
    return folder
