"""Which GPUs NVLink joins, and which of them a job gets."""

import pytest
from tests.scheduler.unit.test_scheduler_queue import A_ALLOCATION, ANY, GPU, HOST, job

from cavvy.domain.values import replace
from cavvy.providers.hosts.devices import HostDevice
from cavvy.providers.hosts.nvidia import read_domain, read_islands
from cavvy.scheduler.packing import allocate_one
from cavvy.scheduler.topology import choose_joined

# as `nvidia-smi topo -m` prints it, with an underlined header; pairs of GPUs have bridges
PAIRS = """\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tSYS\tNV4\tSYS\tSYS\tPIX\t0-31\t0\t\tN/A
GPU1\tSYS\t X \tSYS\tNV4\tSYS\tSYS\t32-63\t1\t\tN/A
GPU2\tNV4\tSYS\t X \tSYS\tPHB\tSYS\t0-31\t0\t\tN/A
GPU3\tSYS\tNV4\tSYS\t X \tSYS\tSYS\t32-63\t1\t\tN/A
GPU4\tSYS\tSYS\tPHB\tSYS\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\tSYS\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
UUID = "01234567-89ab-cdef-0123-456789abcdef"


def gpus(count: int) -> list[HostDevice]:
    return [
        HostDevice(id=f"g{at}", index=at, vendor="nvidia", product="A100", memory_mib=80)
        for at in range(count)
    ]


def test_gpus_with_nvlinks_are_one_island() -> None:
    assert read_islands(PAIRS, gpus(5)) == (("g0", "g2"), ("g1", "g3"))
    assert read_islands(PAIRS.replace("SYS", "NV12"), gpus(5)) == (("g0", "g1", "g2", "g3", "g4"),)
    assert read_islands(PAIRS, gpus(2)) == ()
    for broken in ("", "GPU0", "Failed to initialize NVML", PAIRS.replace("NV4", "SYS")):
        assert read_islands(broken, gpus(5)) == ()


@pytest.mark.parametrize(
    ("fabric", "domain"),
    [
        (f"{UUID}, 32766\n" * 4, f"{UUID}.32766"),
        (f"{UUID}, 1\n{UUID}, 2\n", ""),  # the GPUs of the host are in several
        ("00000000-0000-0000-0000-000000000000, 0\n" * 8, ""),  # NVLink only within the host
        ("N/A, N/A\n", ""),
        ('Field "fabric.clusterUuid" is not a valid field to query.', ""),
        ("", ""),
    ],
)
def test_hosts_share_a_domain_of_nvlink(fabric: str, domain: str) -> None:
    assert read_domain(fabric) == domain


@pytest.mark.parametrize(
    ("free", "count", "chosen"),
    [
        ("abcdef", 2, "bd"),  # the smallest island that holds the job
        ("abcdef", 3, "ace"),
        ("abcdef", 1, "f"),  # joined devices stay together
        ("abcde", 1, "b"),
        ("abcdef", 4, "acef"),
        ("acd", 2, "ac"),
        ("ab", 3, "ab"),
    ],
)
def test_a_job_gets_devices_of_few_islands(free: str, count: int, chosen: str) -> None:
    assert "".join(choose_joined(free, count, ("ace", "bd"))) == chosen
    assert list(choose_joined(free, count, ())) == list(free[:count])


def test_the_devices_of_a_job_are_joined_if_those_of_an_island_are_free() -> None:
    host = replace(HOST, islands=(("a", "c"), ("b", "d")))
    two = replace(GPU, accelerator_count=2)
    for taken, devices in (((), ("a", "c")), (("a",), ("b", "d"))):
        other = replace(A_ALLOCATION, devices=taken)
        found = allocate_one(job("j").task, two, host, (other,), ANY, 0)
        assert found is not None
        assert found.devices == devices
