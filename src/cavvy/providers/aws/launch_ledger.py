"""The launch ledger's record of a gang on EC2."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

KEPT = timedelta(days=2)  # after the gang's end


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsInstance:
    """The last known state of one node."""

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
    """A named volume of a gang of one node."""

    name: str  # the task's name for the volume
    path: str  # its mount path
    device: str  # the device as which it is attached
    id: str = ""  # "" until the volume exists
    made: bool = False  # created for this gang
    ours: bool = False  # created by this installation for any gang: it may be unformatted
    keep: bool = True
    read_only: bool = False
    size_gib: int = 0  # size of a volume to be created for this gang
    type: str = ""
    attached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsGangRecord:
    """A gang. Its choices are recorded before the request to EC2, so that a repeated request is
    identical.
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
    ends_at: datetime | None = None  # when EC2 reclaims the nodes, if known beforehand
    makes_group: bool = False  # uses its own security group
    group: str | None = None  # the group's id, once it exists
    makes_placement: bool = False
    launched: bool = False  # EC2 confirmed the launch
    removed: bool = False  # the gang is being removed: instances that appear later are terminated
    instances: Sequence[AwsInstance] = ()
    disks: tuple[AwsDisk, ...] = ()
    ended_at: datetime | None = None
    tidy: bool = False  # nothing created for the gang is left
    rates: Sequence[
        tuple[datetime, int]
    ] = ()  # spot prices in micro-dollars per hour, with their start times
