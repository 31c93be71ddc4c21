"""The NVML calls themselves, against a library made here that has NVML's interface (nvml.h) and says what it got."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from remuda.providers.hosts.nvidia import NvmlLibrary

COMPILER = shutil.which("cc") or shutil.which("gcc")
SOURCE = r"""
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory_t;
static int handles[3], open_count;
int nvmlInit_v2(void) { open_count++; return 0; }
int nvmlShutdown(void) { return open_count-- > 0 ? 0 : 1; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { if (i > 2) return 2; *h = &handles[i]; return 0; }
int nvmlDeviceGetUUID(void *h, char *text, unsigned size) {
  if (size < 80) return 7;
  strcpy(text, "GPU-0000"); text[7] = '0' + (int)((int *)h - handles); return 0;
}
int nvmlDeviceGetName(void *h, char *text, unsigned size) { strncpy(text, "NVIDIA H200", size); return 0; }
int nvmlDeviceGetMemoryInfo(void *h, memory_t *m) { m->total = 143771ULL << 20; m->free = m->used = 0; return 0; }
int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *later) {
  if (h == &handles[0]) return 3; /* not supported */
  *later = 0; *now = h == &handles[2]; return 0;
}
"""


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler to make a stand-in for libnvidia-ml")
def test_every_call_against_its_c_signature(tmp_path: Path) -> None:
    (tmp_path / "nvml.c").write_text(SOURCE)
    library = tmp_path / "libfake.so"
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True, timeout=60)
    nvml = NvmlLibrary(ctypes.CDLL(str(library)))
    assert nvml.count() == 3
    assert [nvml.uuid(index) for index in range(3)] == ["GPU-0000", "GPU-0001", "GPU-0002"]
    assert nvml.name(1) == "NVIDIA H200"
    assert nvml.memory_mib(2) == 143771
    assert [nvml.partitioned(index) for index in range(3)] == [False, False, True]
    with pytest.raises(OSError, match="error 2"):
        nvml.uuid(3)
    nvml.close()
    with pytest.raises(OSError, match="nvmlShutdown"):
        nvml.close()
