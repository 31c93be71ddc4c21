"""What is found of a machine, from folders that look like /proc and /sys and from a library that
answers like NVML.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cavvy.domain.units import HourlyRate, parse_rate
from cavvy.domain.values import replace
from cavvy.providers.hosts.devices import HostDevice, MachineSources, NvmlQueries
from cavvy.providers.hosts.machine import ThisMachine, discover
from cavvy.providers.local.offers import list_offers, make_host
from cavvy.providers.local.provider import limited


@dataclass
class FakeNvml:
    """Answers for GPUs given as (uuid, name, MiB, split by MIG)."""

    gpus: Sequence[tuple[str, str, int, bool]]
    broken: str = ""  # the question that fails
    split: int = 0  # MIG instances of each split GPU
    problems: Mapping[int, str] = field(default_factory=dict)
    closed: int = field(default=0, init=False)

    def count(self) -> int:
        self._answer("count")
        return len(self.gpus)

    def uuid(self, index: int) -> str:
        return self.gpus[index][0]

    def name(self, index: int) -> str:
        return self.gpus[index][1]

    def memory_mib(self, index: int) -> int:
        self._answer("memory_mib")
        return self.gpus[index][2]

    def partitioned(self, index: int) -> bool:
        return self.gpus[index][3]

    def instances(self, index: int) -> Sequence[tuple[str, str]]:
        return [(f"MIG-{self.gpus[index][0]}-{n}", "1g.10gb") for n in range(self.split)]

    def problem(self, index: int) -> str:
        return self.problems.get(index, "")

    def close(self) -> None:
        self.closed += 1

    def _answer(self, question: str) -> None:
        if question == self.broken:
            raise OSError(f"{question}: NVML error 15")


@pytest.fixture
def sources(tmp_path: Path) -> MachineSources:
    return MachineSources(
        root=tmp_path,
        environ={},
        system="Linux",
        hostname="Box_7.example.ORG",
        cpus=lambda: 16,
        memory_mib=lambda: 65536,
        disk_gib=lambda: 500,
        nvml=lambda: None,
        sysctl=lambda name: "",
        usable=lambda path: True,
    )


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def with_gpus(
    sources: MachineSources, *gpus: tuple[str, str, int, bool], broken: str = ""
) -> tuple[MachineSources, FakeNvml]:
    nvml = FakeNvml(gpus=gpus, broken=broken)
    answer: Callable[[], NvmlQueries] = lambda: nvml  # noqa: E731 - a source is a function
    return replace(sources, nvml=answer), nvml


def test_a_plain_machine(sources: MachineSources) -> None:
    machine = discover(sources)
    assert machine == ThisMachine(
        hostname="box-7.example.org", cpus=16, memory_mib=65536, disk_gib=500, devices=[], notes=[]
    )
    (offer,) = list_offers(machine, parse_rate("3.60"))
    assert offer.key == "local/box-7.example.org/cpu:0/on-demand"
    assert (offer.rate, offer.accelerator, offer.shared, offer.vcpus) == (
        HourlyRate(3_600_000),
        None,
        True,
        16,
    )


@pytest.mark.parametrize(
    ("files", "cpus", "memory_mib"),
    [
        (
            {"proc/self/cgroup": "0::/user/job", "sys/fs/cgroup/user/job/cpu.max": "250000 100000"},
            2.5,
            65536,
        ),
        (
            {"proc/self/cgroup": "0::/user/job", "sys/fs/cgroup/user/memory.max": str(8 << 30)},
            16,
            8192,
        ),
        (
            {
                "proc/self/cgroup": "0::/",
                "sys/fs/cgroup/cpu.max": "max 100000",
                "sys/fs/cgroup/memory.max": "max",
            },
            16,
            65536,
        ),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "6400000 100000"}, 16, 65536),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/1\n3:memory:/docker/1\n1:name=systemd:/",
                "sys/fs/cgroup/cpu/docker/1/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu/docker/1/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes": str(1 << 30),
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            },
            0.5,
            1024,
        ),
    ],
)
def test_control_groups_limit_what_is_offered(
    sources: MachineSources, files: dict[str, str], cpus: float, memory_mib: int
) -> None:
    put(sources.root, files)
    machine = discover(sources)
    assert (machine.cpus, machine.memory_mib) == (cpus, memory_mib)


def test_nvidia_gpus_by_uuid_and_canonical_name(sources: MachineSources) -> None:
    sources, nvml = with_gpus(
        sources,
        ("GPU-a", "NVIDIA A100-SXM4-80GB", 81920, False),
        ("GPU-b", "NVIDIA A100-SXM4-80GB", 81920, False),
        ("GPU-c", "Tesla T4", 15360, False),
    )
    machine = discover(sources)
    assert nvml.closed == 1
    assert [(d.id, d.index, d.vendor) for d in machine.devices] == [
        ("GPU-a", 0, "nvidia"),
        ("GPU-b", 1, "nvidia"),
        ("GPU-c", 2, "nvidia"),
    ]
    offers = list_offers(machine, HourlyRate(1_000_000))
    assert [(o.accelerator, o.accelerator_count, o.rate.micros_per_hour) for o in offers] == [
        (None, 0, 1_000_000),
        ("A100", 1, 1_000_000),
        ("A100", 2, 2_000_000),
        ("T4", 1, 1_000_000),
    ]
    assert offers[1].accelerator_memory_mib == 81920
    assert offers[3].accelerator_memory_mib == 16384  # nominal: the driver keeps a part of it
    assert [o.payers for o in offers] == [0, 1, 1, 1]  # once, or for each accelerator
    host = make_host(machine)
    assert host.devices == ("GPU-a", "GPU-b", "GPU-c")
    assert host.kinds == (offers[1].instance_type, offers[1].instance_type, offers[3].instance_type)


def test_faulty_gpus_and_their_instances_are_named(sources: MachineSources) -> None:
    gpus = (("GPU-a", "NVIDIA T4", 15360, False), ("GPU-b", "NVIDIA A100", 40960, True))
    given, nvml = with_gpus(sources, *gpus)
    nvml.split, nvml.problems = 1, {1: "3 uncorrected memory errors"}
    found = {each.id: each.problem for each in discover(given).devices}
    assert found == {"GPU-a": "", "MIG-GPU-b-0": "3 uncorrected memory errors"}


def test_split_and_hidden_gpus_are_left_out_with_a_note(sources: MachineSources) -> None:
    gpus = [(f"GPU-{name}", "NVIDIA H100 80GB HBM3", 81559, name == "b") for name in "abcd"]
    sources, _ = with_gpus(sources, *gpus)
    machine = discover(sources)
    assert [device.id for device in machine.devices] == ["GPU-a", "GPU-c", "GPU-d"]
    assert [device.index for device in machine.devices] == [0, 2, 3]
    assert "MIG" in machine.notes[0]
    for visible, seen in (("2,3", ["GPU-c", "GPU-d"]), ("GPU-d", ["GPU-d"]), ("", []), ("-1", [])):
        machine = discover(replace(sources, environ={"CUDA_VISIBLE_DEVICES": visible}))
        assert [device.id for device in machine.devices] == seen
        assert any("CUDA_VISIBLE_DEVICES" in note for note in machine.notes)


def test_instances_are_offered_in_place_of_a_split_gpu(sources: MachineSources) -> None:
    gpus = [(f"GPU-{name}", "NVIDIA A100-SXM4-80GB", 81920, name == "b") for name in "ab"]
    sources, nvml = with_gpus(sources, *gpus)
    nvml.split = 2
    machine = discover(sources)
    assert [each.id for each in machine.devices] == ["GPU-a", "MIG-GPU-b-0", "MIG-GPU-b-1"]
    assert machine.notes == []
    offers = list_offers(machine, HourlyRate(800_000))
    told = [
        (each.accelerator, each.accelerator_count, each.accelerator_memory_mib, each.rate)
        for each in offers
    ]
    assert told[1:] == [
        ("A100", 1, 81920, HourlyRate(800_000)),
        ("A100-MIG-1g.10gb", 1, 10240, HourlyRate(100_000)),
    ]
    assert make_host(machine).kinds == ("A100-80GB", "A100-MIG-1g.10gb", "A100-MIG-1g.10gb")


def test_a_virtual_gpu_is_offered_with_its_memory(sources: MachineSources) -> None:
    sources, _ = with_gpus(sources, ("GPU-a", "NVIDIA A100-10C", 9983, False))
    machine = discover(sources)
    (_, told) = list_offers(machine, HourlyRate(1))
    assert (told.accelerator, told.accelerator_memory_mib) == ("A100", 10240)
    assert make_host(machine).kinds == ("A100-vGPU-10C",)


@pytest.mark.parametrize("broken", ["count", "memory_mib"])
def test_a_broken_driver_is_told_and_closed(sources: MachineSources, broken: str) -> None:
    sources, nvml = with_gpus(sources, ("GPU-a", "Tesla T4", 15360, False), broken=broken)
    machine = discover(sources)
    assert machine.devices == []
    assert "NVML error 15" in machine.notes[0]
    assert nvml.closed == 1


def test_a_driver_that_does_not_start_is_told(sources: MachineSources) -> None:
    def fails() -> NvmlQueries:
        raise OSError("nvmlInit_v2: NVML error 9")

    machine = discover(replace(sources, nvml=fails))
    assert machine.devices == []
    assert "NVML error 9" in machine.notes[0]


AMD_NODE = "sys/class/kfd/kfd/topology/nodes"


def amd_files() -> dict[str, str]:
    gpu = (
        "simd_count 1216\nvendor_id 4098\ndevice_id 29857\nunique_id "
        "1311768467463790320\ndrm_render_minor 128"
    )
    return {
        f"{AMD_NODE}/0/properties": "simd_count 0\ncpu_cores_count 96",
        f"{AMD_NODE}/1/properties": gpu,
        f"{AMD_NODE}/1/mem_banks/0/properties": f"heap_type 1\nsize_in_bytes {192 << 30}\nflags 0",
        f"{AMD_NODE}/10/properties": gpu.replace("1311768467463790320", "1").replace("128", "129"),
        f"{AMD_NODE}/10/mem_banks/0/properties": f"heap_type 1\nsize_in_bytes {192 << 30}",
        f"{AMD_NODE}/2/properties": gpu.replace("1311768467463790320", "2").replace("128", "130"),
        f"{AMD_NODE}/2/mem_banks/0/properties": f"heap_type 1\nsize_in_bytes {192 << 30}",
        "sys/class/drm/renderD129/device/product_name": "AMD Instinct MI300X",
    }


def test_amd_gpus_of_the_kernels_topology(sources: MachineSources) -> None:
    put(sources.root, amd_files())
    machine = discover(sources)
    assert [(d.id, d.index, d.vendor, d.memory_mib) for d in machine.devices] == [
        ("GPU-123456789abcdef0", 0, "amd", 196608),
        ("GPU-0000000000000002", 1, "amd", 196608),
        ("GPU-0000000000000001", 2, "amd", 196608),
    ]
    assert {offer.accelerator for offer in list_offers(machine, HourlyRate(0))} == {None, "MI300X"}


def test_partitions_of_an_amd_gpu_are_not_offered_as_whole_gpus(sources: MachineSources) -> None:
    files = amd_files()
    for part in range(4):  # an MI300X in mode QPX, between two whole ones
        files[f"{AMD_NODE}/{3 + part}/properties"] = (
            f"simd_count 304\ndevice_id 29857\nunique_id 7\nlocation_id {part << 28 | 0x6300}\n"
            "drm_render_minor 131"
        )
        files[f"{AMD_NODE}/{3 + part}/mem_banks/0/properties"] = (
            f"heap_type 1\nsize_in_bytes {48 << 30}"
        )
    put(sources.root, files)
    machine = discover(sources)
    # the numbers by which ROCR_VISIBLE_DEVICES names them count the partitions, too
    assert [(each.id, each.index) for each in machine.devices] == [
        ("GPU-123456789abcdef0", 0),
        ("GPU-0000000000000002", 1),
        ("GPU-0000000000000001", 6),
    ]
    (note,) = machine.notes
    assert "GPU-0000000000000007 is divided into 4 partitions" in note
    assert "amd-smi set --compute-partition SPX" in note


def test_amd_gpus_that_may_not_be_opened_are_told(sources: MachineSources) -> None:
    put(sources.root, amd_files())
    machine = discover(replace(sources, usable=lambda path: path.name != "kfd"))
    assert machine.devices == []
    assert "render" in machine.notes[0]


def test_intel_cards_with_memory_of_their_own(sources: MachineSources) -> None:
    put(
        sources.root,
        {
            "sys/class/drm/card0/device/vendor": "0x8086",  # inside the CPU
            "sys/class/drm/card0/device/device": "0x4680",
            "sys/class/drm/card1/device/vendor": "0x8086",
            "sys/class/drm/card1/device/device": "0x0bda",
            "sys/class/drm/card1/device/tile0/physical_vram_size_bytes": str(48 << 30),
            "sys/class/drm/card1-DP-1/status": "connected",
            "sys/class/drm/card2/device/vendor": "0x10de",
            "sys/class/drm/card2/device/device": "0x20b2",
        },
    )
    (device,) = discover(sources).devices
    assert (device.vendor, device.index, device.product, device.memory_mib) == (
        "intel",
        0,
        "Data Center GPU Max 1100",
        49152,
    )


def test_apples_gpu_is_the_chip(sources: MachineSources) -> None:
    facts = {"machdep.cpu.brand_string": "Apple M2 Max", "hw.memsize": str(64 << 30)}
    apple = replace(sources, system="Darwin", sysctl=lambda name: facts[name])
    (device,) = discover(apple).devices
    assert (device.id, device.product, device.memory_mib) == ("apple-0", "Apple M2 Max", 65536)
    facts["machdep.cpu.brand_string"] = "Intel(R) Core(TM) i9"
    assert discover(apple).devices == []


def test_settings_limit_what_jobs_may_use(sources: MachineSources) -> None:
    gpu = HostDevice(id="GPU-a", index=0, vendor="nvidia", product="Tesla T4", memory_mib=15360)
    machine = replace(discover(sources), devices=[gpu])
    assert limited(machine, {}) == machine
    part = limited(machine, {"cpus": 4, "memory_gib": 1.5, "accelerators": False})
    assert (part.cpus, part.memory_mib, part.devices) == (4, 1536, ())
    assert limited(machine, {"cpus": 400, "memory_gib": 4000}) == machine
