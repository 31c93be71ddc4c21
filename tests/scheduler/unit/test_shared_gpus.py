"""Parts of GPUs: how tasks state them, which part of an offer a task gets, which GPU it is on, and
what the work may use of it.
"""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.drivers import make_driver
from tests.records import make_offer

from cavvy.agent.work import environment
from cavvy.agent.work.meters import NvidiaMeter, UsageMeter
from cavvy.agent.work.monitor import WorkMonitor
from cavvy.catalog.fit import match_offers
from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.offers import Offer
from cavvy.domain.shares import size_of_task
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.planner.shared_hosts import note_share, object_to_share, smallest_shares
from cavvy.providers.hosts.supervisor import service
from cavvy.scheduler.packing import AllocationOwner, allocate_one, choose_shared
from cavvy.scheduler.queue import HostWaits
from cavvy.spec import SpecError
from cavvy.task_files import ReadOptions, parse_task

ONE = make_offer(
    "local/me/A100-80GB",
    1_000_001,
    accelerator="A100",
    accelerator_count=1,
    accelerator_memory_mib=81920,
    vcpus=64,
    shared=True,
    owned=True,
)
KINDS = ("A100-80GB",) * 3
HOST = Host(name="local/me", cpus=64, memory_mib=8192, devices=("a", "b", "c"), kinds=KINDS)


def read(gpu: str, more: str = "") -> TaskSpec:
    return parse_task(f"run: x\nresources:\n  gpu: {gpu}\n{more}")


def divide(gpu: str, offer: Offer = ONE) -> Offer:
    (found,) = smallest_shares(read(gpu), [offer, replace(offer, accelerator_count=2)], ())
    return found


@pytest.mark.parametrize(
    ("gpu", "part", "rate"),
    [
        ("A100:0.25", 0.25, 250_000),
        ("A100:1/3", 1 / 3, 333_334),
        ("0.5", 0.5, 500_001),
        ("{name: A100, share: 0.5}", 0.5, 500_001),
        ("{name: [H100, A100], share: 20GB}", 0.25, 250_000),
        ("A100:share=10GB", 0.125, 125_000),
        ("[H100:8, A100:0.5]", 0.5, 500_001),
        ("A100:1", 1, 1_000_001),
        ("{memory: 10GB}", 1, 1_000_001),
        ("A100:80GB:share=80GB", 1, 1_000_001),
    ],
)
def test_a_task_gets_and_pays_the_part_that_it_asks_for(gpu: str, part: float, rate: int) -> None:
    offer = divide(gpu)
    assert offer.accelerator_part == pytest.approx(part)
    assert offer.accelerator_memory_mib == int(81920 * part)
    assert offer.rate == HourlyRate(rate)


def test_only_gpus_of_nvidia_on_shared_hosts_are_divided() -> None:
    amd = replace(ONE, accelerator="MI300X", accelerator_memory_mib=196608)
    assert divide("0.25", amd) == amd
    rented = replace(ONE, shared=False)
    assert smallest_shares(read("A100:0.25"), [rented], ()) == [rented]


def test_a_part_counts_as_a_part_in_the_queue() -> None:
    assert size_of_task(read("A100:0.25")) == 0.25
    assert size_of_task(read("A100:share=20GB")) == 0.25
    assert size_of_task(read("A100:4")) == 4


def test_a_part_that_must_be_isolated_is_refused_with_the_reason() -> None:
    task = read("{name: A100, share: 0.25, isolation: required}")
    (offer,) = smallest_shares(task, [ONE], ())
    assert "MPS or time slices" in object_to_share(task, offer)
    shard = replace(offer, shared=False)  # of the user's own cluster
    assert object_to_share(task, shard)
    assert object_to_share(task, replace(shard, owned=False)) == ""
    assert object_to_share(read("A100:0.25"), offer) == ""


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        ("{share: 10}", "memory with its unit, such as 10GB"),
        ("{share: 0}", "not a part of one GPU"),
        ("{share: 1..2}", "not a part of one GPU"),
        ("{share: 1.5}", "not a part of one GPU"),
        ("{share: -0.5}", "not a part of one GPU"),
        ("{share: 10GB, count: 2}", "exclude each other"),
        ("{name: TPU-v5e, share: 0.5}", "only GPUs have fractions"),
        ("{name: A100, share: 10GB..20GB}", "expected memory"),
        ("{isolation: required}", "whole GPUs are never shared"),
        ("A100:1.5", "a whole number for several GPUs"),
    ],
)
def test_a_wrong_share_says_what_to_write(gpu: str, said: str) -> None:
    with pytest.raises(SpecError, match=re.escape(said)):
        read(gpu)


def test_several_nodes_have_no_parts() -> None:
    with pytest.raises(SpecError, match="a task of 2 nodes needs whole GPUs"):
        read("A100:0.5", "nodes: 2")


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("resources: {gpu: 'A100:0.5'}", '{"nodes": 2}'),
        ("nodes: 2", '{"resources": {"gpu": "A100:0.5"}}'),
        ("workdir: .", '{"nodes": 2, "resources": {"gpu": "A100:share=10GB"}}'),
    ],
)
def test_options_of_commands_request_no_parts_for_several_nodes(text: str, options: str) -> None:
    with pytest.raises(SpecError, match="a task of 2 nodes needs whole GPUs"):
        parse_task(f"run: x\n{text}", options=ReadOptions(overrides=options))


def test_the_fullest_gpu_that_fits_is_chosen() -> None:
    free = {"a": 1.0, "b": 0.5, "c": 0.3}
    assert choose_shared(0.25, free) == ["c"]
    assert choose_shared(0.4, free) == ["b"]
    assert choose_shared(0.6, free) == ["a"]
    assert choose_shared(0.6, {"b": 0.5}) == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["A100:0.5", "A100:1/3", "A100:0.1", "A100:share=30GB", "A100:1"]),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_no_gpu_is_over_subscribed(steps: list[tuple[str, bool]]) -> None:
    """Some gangs end before the next one starts."""
    held: list[Allocation] = []
    for number, (gpu, ends) in enumerate(steps):
        owner = AllocationOwner(gang=str(number), project="p")
        found = allocate_one(read_once(gpu), divided_once(gpu), HOST, held, owner, 0)
        held += [found] if found else []
        used: defaultdict[str, list[float]] = defaultdict(list)
        for each in held:
            used[each.devices[0]].append(each.part)
        assert all(sum(parts) <= 1 + 1e-6 for parts in used.values())
        assert found or all(used[device] for device in HOST.devices)
        if ends and held:
            held.pop(0)


_TASKS: dict[str, TaskSpec] = {}
_OFFERS: dict[str, Offer] = {}


def read_once(gpu: str) -> TaskSpec:
    return _TASKS.setdefault(gpu, _TASKS.get(gpu) or read(gpu))


def divided_once(gpu: str) -> Offer:
    return _OFFERS.setdefault(gpu, _OFFERS.get(gpu) or divide(gpu))


class Config:
    """The parts of an agent's configuration that determine the variables of its devices."""

    def __init__(self, **fields: Any) -> None:
        self.devices = ["GPU-1"]
        self.device_indices = [1]
        self.device_part = 0.25
        self.device_memory_mib = 20000
        self.vendor = "nvidia"
        self.separates = False
        vars(self).update(fields)


def variables(contained: bool = False, **fields: Any) -> dict[str, str]:
    config: Any = Config(**fields)
    return environment.device_variables(config, contained=contained)


def test_work_with_a_part_sees_its_gpu_and_its_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    sliced = {
        "CUDA_VISIBLE_DEVICES": "GPU-1",
        "CAVVY_GPU_SHARE": "0.25",
        "CAVVY_GPU_MEMORY_MIB": "20000",
    }
    assert variables() == sliced
    daemon = tmp_path / "nvidia-cuda-mps-control.pid"
    daemon.write_text("999999999\n")
    assert variables() == sliced, "the daemon has ended"
    daemon.write_text("1\n")
    assert variables() == sliced | {
        "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=20000M",
    }
    assert variables(separates=True) == sliced
    assert variables(contained=True) == sliced
    whole = variables(device_part=1)
    assert whole == {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    instance = variables(device_part=1, devices=["MIG-1"])
    assert instance == {"CUDA_VISIBLE_DEVICES": "MIG-1"}


def test_only_an_instance_is_isolated_and_is_not_divided() -> None:
    instance = replace(
        ONE,
        instance_type="A100-MIG-1g.10gb",
        accelerator="A100-MIG-1g.10gb",
        accelerator_memory_mib=10240,
    )
    for gpu in ("A100:1g.10gb", "{name: A100, share: 1g.10gb, isolation: required}"):
        task = read(gpu)
        matches = match_offers([ONE, instance], task.resources)
        assert list(matches.offers) == [instance]
        assert smallest_shares(task, matches.offers, ()) == [instance]
        assert object_to_share(task, instance) == note_share(task, instance) == ""
    assert match_offers([instance], read("A100").resources).matched == 0
    assert match_offers([instance], read("A100:0.1").resources).matched == 0


def test_a_virtual_gpu_is_a_gpu_with_its_memory_and_is_not_divided() -> None:
    virtual = replace(ONE, instance_type="A100-vGPU-10C", accelerator_memory_mib=10240)
    for gpu in ("A100", "{memory: 10GB}", "A100:share=10GB", "A100:0.1"):
        assert match_offers([virtual], read(gpu).resources).matched == 1
    for gpu in ("A100:20GB", "A100:share=20GB", "A100:1g.10gb"):
        assert match_offers([virtual], read(gpu).resources).matched == 0
    assert smallest_shares(read("A100:0.1"), [virtual], ()) == [virtual]
    assert "whole virtual GPU" in note_share(read("A100:0.1"), virtual)
    isolated = read("{name: A100, share: 10GB, isolation: required}")
    assert "time slices" in object_to_share(isolated, virtual)
    backed = replace(virtual, instance_type="A100-vGPU-1-10C")
    assert object_to_share(isolated, backed) == object_to_share(read("A100"), virtual) == ""


class Meter(UsageMeter):
    """Work with these processes."""

    def __init__(self, *pids: int) -> None:
        super().__init__(0)
        self.pids = list(pids)

    def list_work(self) -> list[int]:
        return self.pids


def watch(*pids: int) -> tuple[WorkMonitor, list[tuple[str, dict[str, Any]]]]:
    said: list[tuple[str, dict[str, Any]]] = []
    monitor = WorkMonitor(
        lambda kind, **fields: said.append((kind, fields)),
        Meter(*pids),
        progress="/nowhere",
        checkpoints=None,
        idle_s=None,
    )
    monitor.gpu_memory_mib = 20000
    return monitor, said


def test_only_the_work_s_own_gpu_memory_counts() -> None:
    monitor, said = watch(7, 8)
    values = {"gpu_memory_mib": 70000.0}
    monitor.share_gpu({"7": 12000.0, "8": 8000.0, "9": 50000.0}, values)
    assert (values["gpu_memory_mib"], monitor.gpu_excess, said) == (20000.0, "", [])
    monitor.share_gpu({"7": 12000.0, "8": 8001.0}, values)
    assert monitor.gpu_excess.startswith("out of GPU memory: the work used 20001 MiB")
    assert "its share is 20000 MiB" in monitor.gpu_excess


def test_a_share_that_nothing_enforces_is_reported_once() -> None:
    monitor, said = watch(7)
    for _ in range(2):
        monitor.share_gpu(None, {})
    ((kind, fields),) = said
    assert (kind, fields["name"]) == ("event", "gpu-share")
    assert "the driver does not tell" in fields["text"]


def test_the_driver_tells_the_memory_of_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ctypes

    processes = tmp_path / "processes"
    monkeypatch.setenv("FAKE_PROCESSES", str(processes))
    nvml = ctypes.CDLL(str(make_driver(tmp_path) / "libnvidia-ml.so.1"))
    handle = ctypes.c_void_p()
    assert not nvml.nvmlDeviceGetHandleByUUID(
        b"GPU-00000000-0000-0000-0000-000000000001", ctypes.byref(handle)
    )
    meter = NvidiaMeter(nvml, handle)
    assert meter.read_processes() == {}
    processes.write_text("1 77 12000\n0 78 5\n1 4194304 1\n")
    assert meter.read_processes() == {"77": 12000.0, "4194304": 1.0}
    processes.write_text("1 77 12000\n1 78 -1\n")
    assert meter.read_processes() is None, "the driver does not know the size"
    processes.write_text("1 77 1\n" * 1025)
    assert meter.read_processes() is None, "too many processes"


def test_a_host_checks_the_parts_of_running_gangs(tmp_path: Path) -> None:
    """Two servers may use one host, and a server may have lost its database."""
    for number, line in enumerate(("GPU-1 0.5", "GPU-1 0.333333", "GPU-2")):
        folder = tmp_path / f"server/hosts/agents/g{number}/0"
        folder.mkdir(parents=True)
        (folder / "devices").write_text(f"{line}\n")
    service.check_free(str(tmp_path), {"GPU-1": 1 / 6})
    with pytest.raises(service.LockBusy, match="is using GPU-1"):
        service.check_free(str(tmp_path), {"GPU-1": 0.2})
    with pytest.raises(service.LockBusy, match="g2 is using GPU-2"):
        service.check_free(str(tmp_path), {"GPU-2": 0.01})


def test_plans_say_where_a_part_costs_a_whole_node() -> None:
    task = read("A100:0.25")
    assert note_share(task, divide("A100:0.25")) == ""
    assert "pays for the whole node" in note_share(task, replace(ONE, shared=False))
    assert "only NVIDIA's" in note_share(task, replace(ONE, accelerator="MI300X"))
    assert note_share(read("A100"), replace(ONE, shared=False)) == ""


def test_work_beside_parts_of_devices_may_delay_an_earlier_job() -> None:
    """A sum of parts does not tell whether a whole device will be free."""
    waits = HostWaits({HOST.name: HOST})
    whole = replace(ONE, accelerator_count=3)
    waits.add(lambda _: [(read("A100:3"), whole)])
    mine = Allocation(
        host=HOST.name,
        gang="m",
        rank=0,
        project="p",
        cpus=1,
        memory_mib=0,
        devices=("a",),
        part=0.1,
    )
    assert waits.may_delay([mine], [])
    alone = HostWaits({HOST.name: HOST})
    alone.add(lambda _: [(read("A100"), ONE)])
    assert not alone.may_delay([mine], [replace(mine, gang="n", devices=("b",))])


def test_the_use_of_gpus_by_short_work_is_reported_at_its_end() -> None:
    monitor, said = watch(7)
    monitor.end()
    assert said == []
    for used in (100.0, 9156.0, 40.0):
        monitor.take_gpus({"gpu_percent": 97.0, "gpu_memory_mib": used})
    monitor.end()
    values = said[0][1]["values"]
    assert (values["gpu_percent"], values["gpu_memory_peak_mib"]) == (97.0, 9156.0)
