"""Meters of GPUs and processors, on the libraries and files of drivers in small."""

import ctypes
from pathlib import Path

import pytest
from tests.drivers import make_driver

from cavvy.agent.work.meters import CpuMeter, GpuSums, NvidiaMeter, list_cards
from cavvy.agent.work.monitor import ENERGY, MinuteFigures
from cavvy.store import meters


class Readings:
    """A GPU that reads as it is told."""

    def __init__(self, *readings: dict[str, float]) -> None:
        self.left = [*readings]

    def read(self) -> dict[str, float]:
        return self.left.pop(0)


def write(root: Path, files: dict[str, object]) -> None:
    for name, value in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")


def add_card(root: Path, number: int, address: str, files: dict[str, object]) -> Path:
    """Add a card as Linux shows it: `device` is a link to the folder of the PCI address."""
    place = root / "sys/devices/pci0000:00" / address
    place.mkdir(parents=True)
    card = root / f"sys/class/drm/card{number}"
    card.mkdir(parents=True)
    (card / "device").symlink_to(place)
    write(card, files)
    return card


AMD: dict[str, object] = {
    "device/vendor": "0x1002",
    "device/unique_id": "9d2f0a1b3c4d5e6f",
    "device/mem_info_vram_total": 64 << 30,
    "device/mem_info_vram_used": 3 << 30,
    "device/gpu_busy_percent": 87,
    "device/hwmon/hwmon3/power1_average": 305_000_000,
}


def test_an_amd_card_is_read_from_its_files(tmp_path: Path) -> None:
    card = add_card(tmp_path, 0, "0000:c1:00.0", AMD)
    write(card.parent, {"card0-DP-1/status": "connected"})
    add_card(tmp_path, 1, "0000:c5:00.0", AMD | {"device/unique_id": "1"})
    add_card(tmp_path, 2, "0000:03:00.0", {"device/vendor": "0x1a03"})  # a server's own graphics
    assert len(list_cards("amd", None, str(tmp_path))) == 2
    assert list_cards("amd", [], str(tmp_path)) == []
    assert list_cards("intel", None, str(tmp_path)) == []
    for name in ("GPU-9d2f0a1b3c4d5e6f", "amd-0-c100"):  # as the server names them
        (meter,) = list_cards("amd", [name], str(tmp_path))
        expected = {"gpu_percent": 87, "gpu_memory_mib": 3072, "gpu_power_w": 305}
        assert meter.read() == expected
    (other,) = list_cards("amd", ["GPU-0000000000000001"], str(tmp_path))
    write(tmp_path / "sys/class/drm/card1", {"device/hwmon/hwmon3/power1_average": "busy"})
    assert set(other.read()) == {"gpu_percent", "gpu_memory_mib"}


@pytest.mark.parametrize("driver", ["xe", "i915"])
def test_an_intel_card_is_read_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    xe = driver == "xe"
    parts = "device/tile0/gt{}/gtidle/idle_residency_ms" if xe else "gt/gt{}/rc6_residency_ms"
    memory = "device/tile0/physical_vram_size_bytes" if xe else "lmem_total_bytes"
    energy = f"device/hwmon/hwmon1/energy{2 if xe else 1}_input"
    files = {"device/vendor": "0x8086", memory: 16 << 30, energy: 5_000_000}
    card = add_card(
        tmp_path, 1, "0000:03:00.0", files | {parts.format(0): 1000, parts.format(1): 1000}
    )
    add_card(tmp_path, 0, "0000:00:02.0", {"device/vendor": "0x8086"})  # inside of the CPU
    (meter,) = list_cards("intel", None, str(tmp_path))
    assert [*map(len, (list_cards("intel", [f"intel-{a}"], str(tmp_path)) for a in "x"))] == [0]
    assert len(list_cards("intel", ["intel-0000:03:00.0"], str(tmp_path))) == 1
    times = iter([10.0, 12.0, 14.0])
    monkeypatch.setattr("cavvy.agent.work.meters.time.monotonic", lambda: next(times))
    sums = GpuSums([meter])
    assert sums.read(10.0) == {"joules": 0}
    write(card, {energy: 305_000_000, parts.format(0): 1500, parts.format(1): 3000})
    assert sums.read(12.0) == {"gpu_percent": 75.0, "gpu_power_w": 150.0, "joules": 300.0}
    write(card, {energy: 1_000_000, parts.format(0): 0, parts.format(1): 0})  # a new driver
    assert sums.read(14.0) == {"gpu_percent": 100.0, "joules": 300.0, "gpu_power_w": 0.0}


def test_nvidia_counts_energy_or_else_power_times_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = tmp_path / "counter"
    counter.write_text("1000000")
    monkeypatch.setenv("FAKE_WATTS", "70")
    nvml = ctypes.CDLL(str(make_driver(tmp_path) / "libnvidia-ml.so.1"))
    handle = ctypes.c_void_p()
    assert not nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
    sums = GpuSums([NvidiaMeter(nvml, handle)])
    assert sums.read(0.0)["joules"] == 0
    assert sums.read(2.0)["joules"] == 140
    monkeypatch.setenv("FAKE_ENERGY", str(counter))
    assert sums.read(4.0)["joules"] == 280, "no earlier value of the counter"
    counter.write_text("1150000")
    assert sums.read(6.0) == {
        "gpu_percent": 50.0,
        "gpu_memory_mib": 0.0,
        "gpu_power_w": 70.0,
        "joules": 430.0,
    }
    assert sums.read(5.0)["joules"] == 430, "a clock that goes back adds nothing"


def test_memory_that_the_driver_reserves_is_not_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = ctypes.CDLL(str(make_driver(tmp_path, used=31949, reserved=615) / "libnvidia-ml.so.1"))
    handle = ctypes.c_void_p()
    assert not nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
    assert NvidiaMeter(nvml, handle).read()["gpu_memory_mib"] == 31949
    monkeypatch.setenv("FAKE_OLD", "1")
    assert NvidiaMeter(nvml, handle).read()["gpu_memory_mib"] == 31949 + 615


def test_gpus_that_do_not_answer_add_nothing() -> None:
    full = {"gpu_percent": 50.0, "gpu_memory_mib": 10.0, "gpu_power_w": 100.0}
    sums = GpuSums([Readings(full, {}, full), Readings({}, {}, {"gpu_percent": 0.0})])
    assert sums.read(0)["joules"] == 0
    assert sums.read(2) == {}
    assert sums.each == {}
    assert sums.read(4) == full | {"gpu_percent": 25.0, "joules": 200.0}
    assert sums.each == {
        "gpu_percent.0": 50.0,
        "gpu_memory_mib.0": 10.0,
        "gpu_power_w.0": 100.0,
        "gpu_percent.1": 0.0,
    }


def add_zone(root: Path, zone: str, name: str, energy: int, most: int = 10**9) -> None:
    values = {"name": name, "energy_uj": energy, "max_energy_range_uj": most}
    write(root / "sys/class/powercap" / zone, dict(values))


def test_processors_count_packages_and_memory_once(tmp_path: Path) -> None:
    def count(package: int, memory: int) -> None:
        add_zone(tmp_path, "intel-rapl:0", "package-0", package)
        add_zone(tmp_path, "intel-rapl:0:0", "core", 7 * package)
        add_zone(tmp_path, "intel-rapl:0:1", "dram", memory)
        add_zone(tmp_path, "intel-rapl:1", "psys", 9 * package)

    count(900_000_000, 0)
    meter = CpuMeter(str(tmp_path))
    assert (meter.read(100.0), meter.watts) == (0.0, None)
    count(950_000_000, 10_000_000)
    assert (meter.read(110.0), meter.watts) == (60.0, 6.0)
    count(20_000_000, 10_000_000)  # it began anew after max_energy_range_uj
    assert meter.read(120.0) == 70.0
    assert CpuMeter(str(tmp_path / "nothing")).read(1.0) == 0


def test_work_on_a_shared_host_has_its_part_of_the_energy(tmp_path: Path) -> None:
    def tell(busy: int, energy: int) -> None:
        write(tmp_path, {"proc/stat": f"cpu {busy} 0 0 99999 500 0 0 0 0 0"})
        add_zone(tmp_path, "intel-rapl:0", "package-0", energy)

    tell(1000, 0)
    meter = CpuMeter(str(tmp_path))
    assert meter.read(0.0, 0) == 0
    tell(5000, 80_000_000)  # 40 s of CPU time at 100 ticks a second
    assert meter.read(10.0, 100.0) == pytest.approx(20), "10 of 40 seconds"
    tell(5001, 160_000_000)
    assert meter.read(20.0, 100.0) == 80, "never more than all"


def test_a_minute_has_its_energy_and_programs_cannot_report_it() -> None:
    said: list[dict[str, list[float]]] = []
    figures = MinuteFigures(lambda kind, seconds, figures: said.append(figures), lambda: 60.0)
    figures.report({ENERGY: 10**12, "cpu_power_w": 1, "loss": 2.0})
    figures.spend(1500.0)
    figures.spend(0.5)
    figures.send()
    figures.send()
    assert said == [{"loss": [2.0] * 3, ENERGY: [1500.5] * 3}]
    assert meters.ENERGY == ENERGY
