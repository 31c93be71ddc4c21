"""Events in the history of a job, and charges for nodes."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from enum import StrEnum

from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import Struct


class Event(Struct, frozen=True, kw_only=True):
    """One entry in a job's history. The store sets `id`; later events have higher ids."""

    id: int = 0
    project: str
    job_id: str
    attempt: int = 0
    rank: int | None = None
    at: datetime
    kind: str  # e.g. "queued", "placed", "running", "preempted", "checkpoint", "done"
    fact: str | None = None  # a value for programs, see `wire.EventView`
    text: str


class Announcement(Struct, frozen=True, kw_only=True):
    """Something that people may want to be notified of, and that is no event of a job. It concerns
    a project or, if `project` is "", a user in all projects.
    """

    event: str  # "budget", or one of a capability's `events`
    project: str
    user: str = ""  # the user that it concerns; "": everyone in the project
    text: str
    at: datetime


class ChargeKind(StrEnum):
    NODE = "node"  # a period of a node at one rate
    KEPT = "kept"  # a period in which the node was kept for the project's next job
    MINIMUM = "minimum"  # the difference to the provider's minimum charge
    ROLLED_BACK = "rolled back"  # a machine of a launch that failed, or a duplicate of the node
    DISK = "disk"  # the node's disks, if the provider bills them separately
    ADDRESS = "address"  # the node's public addresses, if the provider bills them separately
    TRAFFIC = "traffic"  # checkpoints that the node sent out of its cloud

    @property
    def is_extra(self) -> bool:
        """Whether a charge of this kind is billed in addition to the charge for the machine."""
        return self in (ChargeKind.DISK, ChargeKind.ADDRESS)

    @property
    def is_machine(self) -> bool:
        """Whether a charge of this kind pays for the machine's running time."""
        return not self.is_extra and self is not ChargeKind.TRAFFIC


class Charge(Struct, frozen=True, kw_only=True):
    """The cost of one node in the half-open period [since, until), at one rate. TRAFFIC is billed
    by size: its rate is 0, and `bytes` is the amount of data that was sent at a known price.

    No two charges have the same attempt, rank, kind and `since`. A write replaces all charges of a
    rank.
    """

    project: str
    job_id: str
    attempt_id: str
    rank: int
    kind: ChargeKind = ChargeKind.NODE
    since: datetime
    until: datetime
    rate: HourlyRate
    amount: Money
    bytes: int = 0


def replace_charges(earlier: Iterable[Charge], later: Sequence[Charge]) -> list[Charge]:
    """Return the charges after `later` is written: for each rank in `later`, the new charges
    replace all earlier charges of the rank."""
    billed = {(charge.attempt_id, charge.rank) for charge in later}
    return [each for each in earlier if (each.attempt_id, each.rank) not in billed] + list(later)
