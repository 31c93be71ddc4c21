"""The NVML calls themselves, against a library made here that has NVML's interface (nvml.h) and
says what it got.
"""

import ctypes
from pathlib import Path

import pytest
from tests.drivers import make_driver

from cavvy.providers.hosts.nvidia import NvmlLibrary


def test_every_call_against_its_c_signature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("GPUS", "3"), ("NAME", "NVIDIA H200"), ("MIB", "143771"), ("MIG", "2")):
        monkeypatch.setenv(f"FAKE_{name}", value)
    nvml = NvmlLibrary(ctypes.CDLL(str(make_driver(tmp_path) / "libnvidia-ml.so.1")))
    assert nvml.count() == 3
    assert [nvml.uuid(index) for index in range(3)] == [
        f"GPU-00000000-0000-0000-0000-00000000000{n}" for n in range(3)
    ]
    assert nvml.name(1) == "NVIDIA H200"
    assert nvml.memory_mib(2) == 143771
    assert [nvml.partitioned(index) for index in range(3)] == [False, False, True]
    assert nvml.instances(2) == [
        (f"MIG-00000000-0000-0000-0000-00000000000{n}", "1g.18gb") for n in (0, 2, 4, 6)
    ]
    assert nvml.instances(1) == []
    assert nvml.problem(0) == ""
    for name, told in (("ECC", "uncorrected"), ("PENDING", "must be reset"), ("ROWS", "failed")):
        monkeypatch.setenv(f"FAKE_{name}", "1")
        assert told in nvml.problem(0)
    with pytest.raises(OSError, match="error 2"):
        nvml.uuid(3)
    nvml.close()
    with pytest.raises(OSError, match="nvmlShutdown"):
        nvml.close()
