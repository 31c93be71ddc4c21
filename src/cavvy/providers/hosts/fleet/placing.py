"""Determines the host, the devices and the agent's configuration of each rank of a gang. No
I/O.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import floor

from cavvy.agent.documents import LEAVES_AFTER_S, AgentConfigFile, ReclaimSignal
from cavvy.catalog.accelerators import split_instance
from cavvy.domain.allocations import Allocation
from cavvy.domain.values import Struct
from cavvy.providers.base import GangSpec, NoCapacity
from cavvy.providers.hosts.devices import HostDevice
from cavvy.providers.hosts.fleet.machines import KnownHost
from cavvy.providers.hosts.machine import ThisMachine


class PlacedRank(Struct, frozen=True, kw_only=True):
    """One rank with its host and devices."""

    rank: int
    host: str
    node_address: str  # the rank's address for the other ranks of the gang
    allocation: Allocation | None
    devices: Sequence[HostDevice]
    vendor: str | None

    @property
    def part(self) -> float:
        """The part of its one device that the rank holds; 1 for whole devices."""
        return self.allocation.part if self.allocation and self.devices else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRoute:
    """The route by which one agent reaches the control plane, and the token of the agent."""

    address: str
    token: str = field(repr=False)
    pin: str | None = None
    # who else may send SIGTERM to the agent, to show to users; "" if no one else does
    taken_by: str = ""


def make_config(
    gang: GangSpec, placed: PlacedRank, way: AgentRoute, home: str, cache: str, private: str
) -> AgentConfigFile:
    """Return the configuration of one rank's agent. The agent sends its reports through `way`. The
    work's files are in `home`, the agent's records in `private`.
    """
    return AgentConfigFile(
        gang=gang.name,
        rank=placed.rank,
        address=way.address,
        token=way.token,
        pin=way.pin or "",
        home=home,
        private=private,
        cache=cache,
        covers=False,
        lease_s=gang.lease.total_seconds(),
        grace_s=gang.grace.total_seconds(),
        leaves_after_s=LEAVES_AFTER_S,
        devices=[device.id for device in placed.devices],
        device_indices=[device.index for device in placed.devices],
        device_part=placed.part,
        device_memory_mib=floor(placed.part * placed.devices[0].memory_mib)
        if placed.part < 1
        else 0,
        instance=_instance(gang, placed),
        vendor=placed.vendor or "",
        memory_mib=placed.allocation.memory_mib if placed.allocation else 0,
        node_address=placed.node_address,
        taken=_taken(gang, way, private),
    )


def _instance(gang: GangSpec, placed: PlacedRank) -> str:
    """Return the profile of the MIG instance that the agent makes on the rank's slices, or ""."""
    instance = split_instance(gang.offer.accelerator or "")
    return instance[1] if instance and placed.devices and placed.devices[0].profiles else ""


def _taken(gang: GangSpec, way: AgentRoute, private: str) -> ReclaimSignal | None:
    if not way.taken_by:
        return None
    # The supervisor writes this file when Cavvy removes the gang.
    removal = f"{private.rpartition('/')[0]}/removing.json"
    return ReclaimSignal(unless=removal, seconds=gang.grace.total_seconds(), source=way.taken_by)


def place_ranks(gang: GangSpec, known: Mapping[str, KnownHost]) -> Sequence[PlacedRank]:
    """Determine the host of each rank: from the rank's allocation or, without one, from the offer.
    Raises NoCapacity.
    """
    names = {(each.provider, each.entry.group) for each in known.values()}
    if (gang.offer.provider, gang.offer.region) not in names:
        raise NoCapacity(f"{gang.offer.key}: these hosts do not have this offer")
    allocations = {allocation.rank: allocation for allocation in gang.allocations}
    return [_place(gang, rank, allocations.get(rank), known) for rank in range(gang.nodes)]


def _place(
    gang: GangSpec, rank: int, allocation: Allocation | None, known: Mapping[str, KnownHost]
) -> PlacedRank:
    name = (
        allocation.host.removeprefix(f"{gang.offer.provider}/")
        if allocation is not None
        else gang.offer.zone or ""
    )
    if name not in known:
        raise NoCapacity(f"{gang.offer.key}: the host {name!r} is not known")
    host = known[name]
    address = host.entry.node_address or host.facts.address or "127.0.0.1"
    return hold_devices(rank, allocation, host.machine, name, address)


def hold_devices(
    rank: int, allocation: Allocation | None, machine: ThisMachine, host: str, node_address: str
) -> PlacedRank:
    """Place a rank on the devices of its allocation. Raises NoCapacity if the machine no longer has
    one of the devices.
    """
    known = {device.id: device for device in machine.devices}
    wanted = allocation.devices if allocation else ()
    if missing := [each for each in wanted if each not in known]:
        raise NoCapacity(f"{', '.join(missing)}: {host} no longer has this accelerator")
    devices = [known[each] for each in wanted]
    return PlacedRank(
        rank=rank,
        host=host,
        node_address=node_address,
        allocation=allocation,
        devices=devices,
        vendor=next((device.vendor for device in devices or machine.devices), None),
    )
