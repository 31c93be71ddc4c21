"""Gangs as their providers report them, and the documents that a provider stores in the
installation's database, so that all servers see the same state.
"""

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum

from cavvy.domain.events import ChargeKind
from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct


class GangState(StrEnum):
    """The state of a gang, as its provider reports it."""

    # waits in the provider's own queue; the gang is not lost although it has no nodes
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"


class NodeExtra(Struct, frozen=True, kw_only=True):
    """A disk or public addresses that a node has in addition to its machine: one disk of `units`
    GiB, or `units` public addresses. `name` is the name of the `ExtraPrice` that applies.
    """

    kind: ChargeKind
    name: str = ""
    units: int = 1


def list_extras(
    offer: Offer, disk_gib: int | None = None, disk_type: str | None = None
) -> tuple[NodeExtra, ...]:
    """Return the extras that a new node of the offer is expected to have. `disk_gib` and
    `disk_type` describe the disk that the node's task requests, if any.
    """
    found: dict[ChargeKind, NodeExtra] = {}
    for each in offer.extras:
        if each.usual and each.kind not in found:
            name, units = each.name, each.usual
            if each.kind is ChargeKind.DISK:
                name, units = disk_type or name, max(disk_gib or units, each.least)
            found[each.kind] = NodeExtra(kind=each.kind, name=name, units=units)
    return tuple(found.values())


class NodeSeen(Struct, frozen=True, kw_only=True):
    """One node as the provider reports it. The node is billed from `started_at` to `ended_at`.

    `unseen` means that the provider did not record when the node ended. The node ended between the
    time when it was last seen and `ended_at`, so its cost is known only as a range. `started_by` is
    set if the provider did not record when the bill began. The bill then began between `started_at`
    and `started_by`. If the node ended before `started_at`, no bill began.

    If the provider's answer is older than the poll, `seen_at` is the time at which the provider
    last saw the node run. `seen_at` is None if the answer is as new as the poll.
    """

    rank: int
    engine_id: str
    started_at: datetime | None = None
    started_by: datetime | None = None
    ended_at: datetime | None = None
    unseen: bool = False
    seen_at: datetime | None = None
    address: str | None = None
    extras: tuple[NodeExtra, ...] = ()  # billed at the prices in `Offer.extras`


class GangSeen(Struct, frozen=True, kw_only=True):
    """One gang of this installation, running or ended, as the provider reports it."""

    name: str
    state: GangState
    engine_id: str = ""
    reason: str = ""  # for users: the reason why the gang waits, or why it ended
    preempted: bool = False  # whether the provider reclaimed the gang or one of its nodes
    # whether the provider accepted the launch, but then found no capacity for one of the nodes
    no_capacity: bool = False
    cancelled: bool = False  # whether a person ended the gang with the provider's own tools
    exit_code: int | None = None
    eta: datetime | None = None
    nodes: Sequence[NodeSeen] = ()
    # machines from failed launches of the gang, and duplicates; they are billed, but were never
    # nodes of the gang, and none of them runs after the gang has ended
    rolled_back: Sequence[NodeSeen] = ()
    # nodes that were lost and replaced by others of the same rank
    replaced: Sequence[NodeSeen] = ()
    rates: Sequence[
        tuple[datetime, HourlyRate]
        # prices of one node, each with the time from which it applies; () if only the offer's rate
        # applies
    ] = ()

    @classmethod
    def make_ended(
        cls, name: str, reason: str, exit_code: int | None, nodes: Sequence[NodeSeen]
    ) -> "GangSeen":
        return cls(
            name=name, state=GangState.ENDED, reason=reason, exit_code=exit_code, nodes=nodes
        )


class ProviderDocument(Struct, frozen=True, kw_only=True):
    """One JSON document of a provider, such as the record of a launch."""

    collection: str  # such as "gangs" or "machines"
    name: str  # unique in its collection
    body: str  # JSON
    version: int = 1  # the version: 1 at creation; each write adds 1
