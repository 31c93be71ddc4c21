"""Builds a host's hardware description and offers from the facts that its supervisor read."""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

from cavvy.catalog.accelerators import split_instance
from cavvy.domain.allocations import Host, SlicedGpu
from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate, format_memory
from cavvy.domain.values import Struct, field, replace
from cavvy.providers.hosts.devices import MachineSources, NvmlQueries
from cavvy.providers.hosts.machine import ThisMachine, discover
from cavvy.providers.hosts.models import (
    DeviceModel,
    count_models,
    instance_type,
    is_slice,
    model_of,
    model_of_instance,
    say_models,
)
from cavvy.providers.hosts.nvidia import explain_memory, read_domain

_COUNT = re.compile(r"[0-9]{1,18}|yes", re.ASCII | re.IGNORECASE)  # of faults; or that one waits
# (model, number of accelerators); the model is None if there are no accelerators
DeviceShape = tuple[DeviceModel | None, int]


class HostEntry(Struct, frozen=True, kw_only=True):
    """The configured properties of a host, in addition to the facts that its supervisor reads."""

    name: str
    group: str
    # False: the host has its own price, or no group, so it takes no part in gangs of its group
    in_group: bool = True
    # the price of one accelerator; for a host without accelerators, the price of the host
    rate: HourlyRate
    # the host's address for the other ranks of a gang; if None, the address from its facts
    node_address: str | None = None
    cpus: float | None = None
    memory_gib: float | None = None
    accelerators: bool = True
    # the location of the host in the network, such as {"rack": "r1"}
    labels: Mapping[str, str] = field(default_factory=dict)


class SmiReading(Struct, frozen=True, kw_only=True):
    """The output of nvidia-smi: for each GPU a row of index, UUID, name, memory in MiB and MIG
    mode. `rows` is None if nvidia-smi is not installed. `listing` is the output of `nvidia-smi -L`
    if MIG splits a GPU.
    """

    rows: Sequence[Sequence[str]] | None = None
    listing: str = ""  # older supervisors do not report it
    error: str = ""
    fabric: str = ""  # see `nvlink.read_domain`
    links: str = ""  # the output of `nvidia-smi topo -m`
    mig: Mapping[str, str] = field(default_factory=dict)  # see `supervisor.facts.read_mig`
    errors: str = ""  # for each GPU a row of UUID and uncorrected memory errors
    undivided: Mapping[str, str] = field(default_factory=dict)  # see `supervisor.mig_mode`
    remaps: str = ""  # for each GPU a row of UUID, and whether remappings are pending or failed


class SupervisorFacts(Struct, frozen=True, kw_only=True):
    """A host's facts, as read by `supervisor/facts.py`."""

    system: str
    hostname: str
    user: str
    python: str
    address: str  # the host's address for other hosts on its network
    cpus: int
    memory_mib: int
    disk_gib: int
    architecture: str = ""  # older supervisors do not report it
    smi: SmiReading = SmiReading()
    files: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    usable: Sequence[str] = ()
    engine: str = ""


class KnownHost(Struct, frozen=True, kw_only=True):
    """One host whose facts are known. `ready` states whether the host accepts work now. If it does
    not, `problem` is the reason.
    """

    provider: str
    entry: HostEntry
    facts: SupervisorFacts
    machine: ThisMachine
    ready: bool
    problem: str = ""

    def describe(self) -> str:
        """Describe the host's hardware for users."""
        engine = f"containers by {self.facts.engine}" if self.facts.engine else "no containers"
        return (
            f"accelerators {say_models(self.machine)}, {self.machine.cpus:g} CPUs, "
            f"{format_memory(self.machine.memory_mib)}, {self.machine.disk_gib} GiB free disk, "
            f"Python {self.facts.python}, {engine}"
        )


class _SmiRows:
    """Answers NVML queries from the output of nvidia-smi."""

    def __init__(self, smi: SmiReading) -> None:
        self._rows = [row for row in smi.rows or () if len(row) >= 5]
        self._errors, self._remaps = _read_rows(smi.errors), _read_rows(smi.remaps)
        # the lines of each GPU begin with one such as "GPU 0: NVIDIA A100 (UUID: GPU-...)"
        self._listed = {
            found[1]: part
            for part in re.split(r"(?m)^(?=GPU \d+:)", smi.listing)
            if (found := re.match(r"GPU \d+:.*\(UUID: ([^)]+)\)", part))
        }

    def count(self) -> int:
        return len(self._rows)

    def uuid(self, index: int) -> str:
        return self._rows[index][1]

    def name(self, index: int) -> str:
        return self._rows[index][2]

    def memory_mib(self, index: int) -> int:
        text = self._rows[index][3].split()[0] if self._rows[index][3].split() else ""
        if not text.isdigit():
            raise OSError(f"nvidia-smi reports that GPU {index} has {self._rows[index][3]!r} MiB")
        return int(text)

    def partitioned(self, index: int) -> bool:
        return self._rows[index][4].lower() == "enabled"

    def instances(self, index: int) -> Sequence[tuple[str, str]]:
        lines = self._listed.get(self.uuid(index), "")
        found = re.findall(r"MIG (\S+)\s+Device\s+\d+: \(UUID: ([^)]+)\)", lines)
        return [(uuid, profile) for profile, uuid in found]

    def problem(self, index: int) -> str:
        errors = self._errors.get(self.uuid(index), [""])[0]
        counts = (*self._remaps.get(self.uuid(index), ()), "", "")
        pending, failed = (each not in ("", "0") for each in counts[:2])
        count = int(errors) if errors.isdigit() else 0
        return explain_memory(count, pending=pending, failed=failed)

    def close(self) -> None: ...


def _read_rows(text: str) -> Mapping[str, Sequence[str]]:
    """Return the cells of each GPU's row by its UUID, "" for counts that the GPU does not have."""
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
    return {
        row[0]: [cell if _COUNT.fullmatch(cell) else "" for cell in row[1:]]
        for row in rows
        if len(row) > 1
    }


def make_machine(entry: HostEntry, facts: SupervisorFacts) -> ThisMachine:
    """Build a host's hardware description from the host's facts, within the limits of the
    inventory. The call blocks briefly, because it writes files.
    """

    def nvml() -> NvmlQueries | None:
        if facts.smi.error:
            raise OSError(f"nvidia-smi: {facts.smi.error}")
        return None if facts.smi.rows is None else _SmiRows(facts.smi)

    with TemporaryDirectory(prefix="cavvy-facts-") as folder:
        root = Path(folder)
        _mirror(root, facts)
        sources = MachineSources(
            root=root,
            environ={},
            system=facts.system,
            architecture=facts.architecture,
            hostname=entry.name,
            cpus=lambda: facts.cpus,
            memory_mib=lambda: facts.memory_mib,
            disk_gib=lambda: facts.disk_gib,
            nvml=nvml,
            links=lambda: facts.smi.links,
            mig=lambda: facts.smi.mig,
            sysctl=lambda name: "",
            usable=lambda path: f"/{path.relative_to(root)}" in facts.usable,
        )
        machine = discover(sources)
    kept = [f"NVIDIA: {uuid} is not divided: {why}" for uuid, why in facts.smi.undivided.items()]
    return replace(machine, notes=[*machine.notes, *kept]).limit(
        cpus=entry.cpus, memory_gib=entry.memory_gib, accelerators=entry.accelerators
    )


def _mirror(root: Path, facts: SupervisorFacts) -> None:
    """Fill the local folder `root` with copies of the files that a host's supervisor has read. With
    these copies of the host's files, the code that detects local hardware detects the host's
    hardware.
    """
    for link, target in facts.links.items():
        (root / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
        (root / link.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        if not (root / link.lstrip("/")).exists():
            (root / link.lstrip("/")).symlink_to(root / target.lstrip("/"))
    for name, text in facts.files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def make_hosts(
    known: Sequence[KnownHost], obstacle: Callable[[str], str | None] = lambda name: None
) -> Sequence[Host]:
    """Return the shared hosts. A host that is `in_group` can run a gang together with other hosts
    of its group. Hosts that are not `in_group` run only gangs that fit on one host. `obstacle`
    returns why a host does not separate the jobs of projects, "" if the host separates jobs, or
    None if the setting does not require separation.
    """
    obstacles = {each.entry.name: obstacle(each.entry.name) for each in known}
    return [
        replace(
            make_host(f"{each.provider}/{each.entry.name}", each.machine),
            group=f"{each.provider}/{each.entry.group if each.entry.in_group else each.entry.name}",
            ready=each.ready,
            problem=each.problem,
            separates=obstacles[each.entry.name] == "",
            obstacle=obstacles[each.entry.name] or "",
            labels=_list_labels(each),
        )
        for each in known
    ]


def _list_labels(known: KnownHost) -> tuple[tuple[str, str], ...]:
    """Return the labels of the inventory, and that of the NVLink domain that the host shares with
    other hosts."""
    domain = read_domain(known.facts.smi.fabric)
    return tuple(sorted({**({"nvlink": domain} if domain else {}), **known.entry.labels}.items()))


def make_host(name: str, machine: ThisMachine) -> Host:
    return Host(
        name=name,
        cpus=machine.cpus,
        memory_mib=machine.memory_mib,
        disk_gib=machine.disk_gib,
        devices=tuple(device.id for device in machine.devices),
        kinds=tuple(instance_type(model_of(device)) for device in machine.devices),
        sick=tuple((each.id, each.problem) for each in machine.devices if each.problem),
        islands=machine.islands,
        sliced=_list_sliced(machine),
        notes=tuple(machine.notes),
    )


def _list_sliced(machine: ThisMachine) -> tuple[SlicedGpu, ...]:
    """Return the GPUs of which agents can make MIG instances."""
    slices = [each for each in machine.devices if each.profiles]
    return tuple(
        SlicedGpu(
            gpu=gpu,
            profiles=tuple(
                (instance_type(model_of_instance(each[0], profile)), profile.size, profile.starts)
                for profile in each[0].profiles
            ),
        )
        for gpu, found in groupby(slices, key=lambda each: each.id.rpartition("/")[0])
        if (each := [*found])
    )


def list_offers(known: Sequence[KnownHost]) -> Sequence[Offer]:
    """Return the offers of each host and, for gangs, of each group. The result has one offer for
    each model and number of accelerators.

    The capacity of a host's offer is one node, or 0 while the host does not answer. The capacity of
    a group's offer is the number of the group's hosts that answer.
    """
    offers = [offer for each in known for offer in _of_host(each)]
    groups: dict[str, list[KnownHost]] = {}
    for each in known:
        if each.entry.in_group:
            groups.setdefault(each.entry.group, []).append(each)
    return [
        *offers,
        *(offer for members in groups.values() for offer in _of_group(members)),
    ]


def _of_host(known: KnownHost) -> Sequence[Offer]:
    capacity = 1 if known.ready else 0
    return [
        _offer([known], shape, zone=known.entry.name, capacity=capacity)
        for shape in list_shapes(known.machine)
    ]


def _of_group(members: Sequence[KnownHost]) -> Sequence[Offer]:
    having: dict[DeviceShape, list[KnownHost]] = {}
    for each in members:
        for shape in list_shapes(each.machine):
            having.setdefault(shape, []).append(each)
    return [
        _offer(hosts, shape, zone=None, capacity=sum(host.ready for host in hosts))
        for shape, hosts in having.items()
        if len(hosts) > 1
    ]


def _offer(
    hosts: Sequence[KnownHost], shape: DeviceShape, *, zone: str | None, capacity: int
) -> Offer:
    entry = hosts[0].entry
    return make_offer(
        [host.machine for host in hosts],
        shape,
        entry.rate,
        provider=hosts[0].provider,
        region=entry.group,
        zone=zone,
        capacity=capacity,
        source="your hosts",
    )


def list_shapes(machine: ThisMachine) -> Sequence[DeviceShape]:
    """Return (model, count) for each model of the machine and each count up to the number of
    installed accelerators. The result also contains (None, 0), which requests no accelerator. A job
    gets only one MIG instance, because CUDA programs use only one.
    """
    models = count_models(machine).items()
    made = {
        model_of_instance(each, profile): 1 for each in machine.devices for profile in each.profiles
    }
    most = {model: 1 if split_instance(model.name) else total for model, total in models}
    most = {model: n for model, n in {**most, **made}.items() if not is_slice(model)}
    return [(None, 0), *((model, n + 1) for model, total in most.items() for n in range(total))]


def make_offer(
    machines: Sequence[ThisMachine],
    shape: DeviceShape,
    price: HourlyRate,
    *,
    provider: str,
    region: str,
    source: str,
    zone: str | None = None,
    capacity: int | None = None,
) -> Offer:
    """Return the offer for these machines. `price` is for one accelerator, or for a node without
    accelerators. The offer states the CPUs, memory and free disk of the whole machine, but a job
    gets only the part that it requests. Of several machines, it states the largest disk, because
    each rank is placed on a machine with enough.
    """
    model, count = shape
    rate = price.times(max(1, count))
    return Offer(
        provider=provider,
        region=region,
        zone=zone,
        instance_type=instance_type(model),
        accelerator=model.name if model else None,
        accelerator_count=count,
        accelerator_memory_mib=model.memory_mib if model else 0,
        vcpus=min(machine.cpus for machine in machines),
        memory_mib=min(machine.memory_mib for machine in machines),
        disk_gib=max(machine.disk_gib for machine in machines),
        rate=rate.divide(model.part) if model else rate,
        capacity=capacity,
        shared=True,
        owned=True,
        architecture=machines[0].architecture,
        source=source,
    )
