"""Where each rank of a gang goes, and what its agent is started with. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cavvy.domain.places import Hold
from cavvy.providers.base import GangSpec, NoCapacity
from cavvy.providers.hosts.configs import AgentConfig
from cavvy.providers.hosts.devices import Device
from cavvy.providers.hosts.herd.machines import Known


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One rank and where it goes."""

    rank: int
    known: Known
    hold: Hold | None
    devices: Sequence[Device]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How one agent reaches the control plane, and what it shows there."""

    address: str
    token: str = field(repr=False)
    pin: str | None = None
    taken_by: str = ""  # who may end the agent by SIGTERM; "" where only we do


def make_config(gang: GangSpec, placed: Placed, way: Way, home: str, cache: str) -> AgentConfig:
    """The configuration of one rank's agent, which reports by `way` and works in `home`."""
    vendors = [device.vendor for device in (placed.devices or placed.known.machine.devices)]
    return AgentConfig(
        gang=gang.name,
        rank=placed.rank,
        address=way.address,
        token=way.token,
        pin=way.pin,
        home=home,
        cache=cache,
        lease_s=gang.lease.total_seconds(),
        grace_s=gang.grace.total_seconds(),
        devices=[device.id for device in placed.devices],
        device_indices=[device.index for device in placed.devices],
        vendor=vendors[0] if vendors else None,
        cpus=placed.hold.cpus if placed.hold else None,
        memory_mib=placed.hold.memory_mib if placed.hold else None,
        node_address=node_address(placed.known),
        taken=_taken(gang, way, home),
    )


def _taken(gang: GangSpec, way: Way, home: str) -> Mapping[str, str | float] | None:
    if not way.taken_by:
        return None
    # as the steward writes it when we remove the gang
    ours = f"{home.rpartition('/')[0]}/removing.json"
    return {"unless": ours, "seconds": gang.grace.total_seconds(), "source": way.taken_by}


def node_address(known: Known) -> str:
    """Where the other ranks of a gang find a host."""
    return known.entry.node_address or known.facts.address or "127.0.0.1"


def place_ranks(gang: GangSpec, known: Mapping[str, Known]) -> Sequence[Placed]:
    """Where each rank goes: as its hold says, or to the offer's host. Raises NoCapacity."""
    names = {(each.provider, each.entry.group) for each in known.values()}
    if (gang.offer.provider, gang.offer.region) not in names:
        raise NoCapacity(f"{gang.offer.key}: not an offer of these hosts")
    holds = {hold.rank: hold for hold in gang.holds}
    return [_place(gang, rank, holds.get(rank), known) for rank in range(gang.nodes)]


def _place(gang: GangSpec, rank: int, hold: Hold | None, known: Mapping[str, Known]) -> Placed:
    name = (
        hold.host.removeprefix(f"{gang.offer.provider}/")
        if hold is not None
        else gang.offer.zone or ""
    )
    if name not in known:
        raise NoCapacity(f"{gang.offer.key}: no host {name!r} that we know of")
    devices = {device.id: device for device in known[name].machine.devices}
    missing = [each for each in (hold.devices if hold else ()) if each not in devices]
    if missing:
        raise NoCapacity(f"{', '.join(missing)}: no such accelerator on {name} any more")
    return Placed(
        rank=rank,
        known=known[name],
        hold=hold,
        devices=[devices[each] for each in (hold.devices if hold else ())],
    )
