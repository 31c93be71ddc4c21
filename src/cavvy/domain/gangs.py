"""Gangs as their providers report them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from cavvy.domain.units import HourlyRate


class GangState(StrEnum):
    """The state of a gang, as its provider reports it."""

    QUEUED = "queued"  # accepted by the provider's own queue; not lost
    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeen:
    """One node as the provider itself sees it. It is billed from `started_at` to `ended_at`.

    `unseen`: the provider did not record the end; the node was gone by `ended_at`, and its bill is
    a range that begins with the last sighting.
    """

    rank: int
    engine_id: str
    started_at: datetime | None = None
    ended_at: datetime | None = None
    unseen: bool = False
    address: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GangSeen:
    """One gang of this installation as the provider sees it now, or remembers it."""

    name: str
    state: GangState
    engine_id: str = ""
    reason: str = ""  # why it waits or ended, for people
    preempted: bool = False  # ended because the provider reclaimed it
    exit_code: int | None = None
    eta: datetime | None = None
    nodes: Sequence[NodeSeen] = ()
    rates: Sequence[
        tuple[datetime, HourlyRate]
    ] = ()  # price of one node and its start time; () means the offer's rate throughout
