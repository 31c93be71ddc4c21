"""Defines the script of a fake cloud: the events to simulate and their times. A script can be read
from a TOML file.

All times are in seconds. The times in `prices`, `storms` and `blackouts` are relative to the
cloud's start; the times in an entry of `launches` are relative to the launch that the entry
describes.
"""

import tomllib
from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum
from pathlib import Path

import msgspec

from cavvy.domain.allocations import Host
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate, parse_rate
from cavvy.domain.values import Struct, field
from cavvy.providers.base import Refused


class CallOutcome(StrEnum):
    """The answer that the caller of a simulated launch or removal receives."""

    OK = "ok"
    NO_CAPACITY = "no-capacity"  # nothing was started
    REFUSED = "refused"  # nothing was started
    TRY_AGAIN = "try-again"  # nothing was done
    LOST = "lost"  # the call takes effect, but the caller gets TryAgain


class FaultScript(Struct, frozen=True, kw_only=True):
    """The faults of one launch. A fault whose time is None never happens."""

    reply: CallOutcome = CallOutcome.OK
    latency_s: float = 0.5  # the duration of a call; the call takes effect after half of it
    hidden_s: float = (
        0.0  # the gang is missing in gangs() for this long; at most `visibility_delay`
    )
    queue_s: float = 0.0  # time in the provider's own queue, before billing starts
    boot_s: float = 30.0  # time from a node's start to its agent's start
    boots: bool = True
    told_late_s: float = 0.0  # delay after which gangs() reports that a node has started
    preempted_after_s: float | None = None  # time from the nodes' start
    notice_s: float = 0.0  # how long before the preemption the agents get notice
    advised_after_s: float | None = (
        None  # time from the nodes' start to the warning that a preemption is likely
    )
    lost_rank: int | None = None  # if set, only the node of this rank dies
    lost_after_s: float = 60.0
    mute_after_s: float | None = None  # agents lose their connection, but the work continues
    dead_after_s: float | None = None  # agents and their work die, but the nodes stay
    twins: bool = False  # two agents start on each node
    garbled: bool = False  # messages arrive twice and out of order
    spot_only: bool = (
        False  # True: for spot launches only; an on-demand launch uses the next script in the list
    )
    storage_fails: bool = False  # checkpoints are lost, and agents report none


class RemovalScript(Struct, frozen=True, kw_only=True):
    """The faults of one call that removes a gang."""

    reply: CallOutcome = CallOutcome.OK
    latency_s: float = 0.2
    takes_s: float = 5.0  # time until the nodes are gone and no longer billed


class PriceChange(Struct, frozen=True, kw_only=True):
    """A price change. From `at_s` on, one node of the offer costs `rate`."""

    offer: str  # the offer's key
    at_s: float
    rate: HourlyRate


class TimeSpan(Struct, frozen=True, kw_only=True):
    """A time range that starts at `at_s` and lasts `for_s`."""

    at_s: float
    for_s: float


class RecordScript(Struct, frozen=True, kw_only=True):
    """Settings that make the reports of `gangs` differ from the cloud's bills."""

    remembers_s: float = 86_400.0  # how long an ended gang is listed
    start_late_s: float = 0.0  # while a node runs, its start is reported this many seconds too late
    jitter_s: float = 0.0  # each poll shifts each reported start by up to this many seconds
    ends_unseen: bool = False  # an end is reported with the time of the first poll after it


class CloudScript(Struct, frozen=True, kw_only=True):
    """The whole script. Launches and removals that are not listed are like `launch` and `removal`,
    which have no faults by default."""

    offers: tuple[Offer, ...] = ()
    hosts: tuple[Host, ...] = ()  # the shared hosts
    launches: tuple[FaultScript, ...] = ()
    launch: FaultScript = FaultScript()
    removals: tuple[RemovalScript, ...] = ()
    removal: RemovalScript = RemovalScript()
    prices: tuple[PriceChange, ...] = ()
    storms: tuple[TimeSpan, ...] = ()  # every call raises TryAgain
    blackouts: tuple[
        TimeSpan, ...
    ] = ()  # gangs() lists no running gang; shorter than `visibility_delay`
    records: RecordScript = RecordScript()
    # why the cloud cannot replace single nodes, such as a batch system; "" if it can
    no_repair: str = ""


class _OfferTable(Struct, frozen=True, kw_only=True):
    """One `[[offers]]` table of the script file."""

    instance_type: str
    region: str = "somewhere"
    zone: str | None = None
    accelerator: str | None = None
    accelerators: int = 0
    accelerator_memory_gib: int = 0
    cpus: float = 8
    memory_gib: int = 32
    purchase: Purchase = Purchase.ON_DEMAND
    price_usd_hr: float = 1.0
    minimum_charge_s: float = 0
    capacity: int | None = None
    shared: bool = False  # of the hosts whose group is the region

    def offer(self) -> Offer:
        return Offer(
            provider="fake",
            region=self.region,
            zone=self.zone,
            instance_type=self.instance_type,
            accelerator=self.accelerator,
            accelerator_count=self.accelerators,
            accelerator_memory_mib=self.accelerator_memory_gib * 1024,
            vcpus=self.cpus,
            memory_mib=self.memory_gib * 1024,
            purchase=self.purchase,
            rate=parse_rate(self.price_usd_hr),
            minimum_charge=timedelta(seconds=self.minimum_charge_s),
            capacity=self.capacity,
            shared=self.shared,
            source="made up",
        )


class _HostTable(Struct, frozen=True, kw_only=True):
    """One `[[hosts]]` table of the script file: a shared host of a group."""

    name: str
    group: str
    cpus: float = 8
    memory_gib: int = 32
    accelerators: int = 0
    instance_type: str = ""  # of the offers of its accelerators
    labels: Mapping[str, str] = field(default_factory=dict)

    def host(self) -> Host:
        devices = tuple(f"{self.name}-{number}" for number in range(self.accelerators))
        return Host(
            name=f"fake/{self.name}",
            group=f"fake/{self.group}",
            cpus=self.cpus,
            memory_mib=self.memory_gib * 1024,
            devices=devices,
            kinds=(self.instance_type,) * len(devices),
            labels=tuple(sorted(self.labels.items())),
        )


class _PriceTable(Struct, frozen=True, kw_only=True):
    """One `[[prices]]` table of the script file."""

    offer: str
    at_s: float
    price_usd_hr: float

    def change(self) -> PriceChange:
        return PriceChange(offer=self.offer, at_s=self.at_s, rate=parse_rate(self.price_usd_hr))


class _ScriptFile(Struct, frozen=True, kw_only=True):
    offers: tuple[_OfferTable, ...]
    hosts: tuple[_HostTable, ...] = ()
    launches: tuple[FaultScript, ...] = ()
    launch: FaultScript = FaultScript()
    removals: tuple[RemovalScript, ...] = ()
    removal: RemovalScript = RemovalScript()
    prices: tuple[_PriceTable, ...] = ()
    storms: tuple[TimeSpan, ...] = ()
    blackouts: tuple[TimeSpan, ...] = ()


DEFAULT = CloudScript(
    offers=(
        _OfferTable(
            instance_type="h100x8",
            accelerator="H100",
            accelerators=8,
            accelerator_memory_gib=80,
            cpus=192,
            memory_gib=2048,
            price_usd_hr=19.92,
        ).offer(),
        _OfferTable(
            instance_type="h100x1",
            accelerator="H100",
            accelerators=1,
            accelerator_memory_gib=80,
            cpus=24,
            memory_gib=256,
            purchase=Purchase.SPOT,
            price_usd_hr=1.19,
        ).offer(),
        _OfferTable(instance_type="cpu8", price_usd_hr=0.40).offer(),
    )
)


def read_script(path: Path) -> CloudScript:
    """Read a script. Raises Refused if the file is missing or invalid; the message states the
    position of an error.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        found = msgspec.convert(table, _ScriptFile, strict=False)
    except OSError as error:
        raise Refused(
            f"[providers.fake] script: {path} cannot be read: {error.strerror}"
        ) from error
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise Refused(f"[providers.fake] script: {path}: {error}") from error
    return CloudScript(
        offers=tuple(table.offer() for table in found.offers),
        hosts=tuple(table.host() for table in found.hosts),
        launches=found.launches,
        launch=found.launch,
        removals=found.removals,
        removal=found.removal,
        prices=tuple(table.change() for table in found.prices),
        storms=found.storms,
        blackouts=found.blackouts,
    )
