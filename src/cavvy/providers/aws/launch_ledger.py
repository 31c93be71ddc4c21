"""The launch ledger's record of a gang on EC2."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

KEPT = timedelta(days=2)  # after its end


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsInstance:
    """One node as it was last seen."""

    id: str
    rank: int
    started_at: datetime
    ended_at: datetime | None = None
    unseen: bool = False  # EC2 did not report the end; it was gone by `ended_at`
    address: str | None = None
    reason: str = ""
    preempted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsDisk:
    """One named volume of a gang of one node."""

    name: str  # as the task calls it
    path: str  # where it is mounted
    device: str  # as it is attached
    id: str = ""  # "": it is still to be made
    made: bool = False  # for this gang
    ours: bool = (
        False  # made by this installation, for whichever gang: perhaps no node has formatted it yet
    )
    keep: bool = True
    read_only: bool = False
    size_gib: int = 0  # with `made`
    type: str = ""
    attached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsGangRecord:
    """One gang. What is chosen is written before it is asked for, so that asking again asks for
    the same.
    """

    name: str
    region: str
    zone: str | None
    type: str
    spot: bool
    nodes: int
    intended_at: datetime
    image: str
    root: str
    disk_gib: int
    subnet: str | None = None
    reservation: str | None = None
    block: bool = False
    ends_at: datetime | None = None  # EC2 takes the nodes back, as was known beforehand
    makes_group: bool = False  # a security group of its own
    group: str | None = None  # its id, once it is made
    makes_placement: bool = False
    launched: bool = False  # EC2 said so
    removed: bool = False  # it is to go, or is gone: whatever shows of it is ended
    instances: Sequence[AwsInstance] = ()
    disks: tuple[AwsDisk, ...] = ()
    ended_at: datetime | None = None
    tidy: bool = False  # nothing made for it is left
    rates: Sequence[
        tuple[datetime, int]
    ] = ()  # of spot instances, micro-dollars per hour, since when
