"""The launch ledger's records of gangs on EC2."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from cavvy.domain.values import Struct

KEPT = timedelta(days=2)  # how long a record is kept after the gang's end


class AwsInstance(Struct, frozen=True, kw_only=True):
    """The last known state of one instance, which is a node of a gang."""

    id: str
    rank: int
    started_at: datetime
    ended_at: datetime | None = None
    # True: EC2 did not report when the node ended; the node was already gone at `ended_at`
    unseen: bool = False
    address: str | None = None
    reason: str = ""
    preempted: bool = False
    ran: bool = False  # EC2 has listed it in a state other than `pending`
    public: bool = False  # EC2 has listed it with a public address, which is billed separately
    failure: str = ""  # EC2's code if the instance never ran; such instances cost nothing

    @property
    def billed_from(self) -> datetime | None:
        """The launch time, or None if EC2 charges nothing because the instance has not run."""
        waits = not self.ran and self.ended_at is None
        return None if waits or self.failure else self.started_at


class AwsDisk(Struct, frozen=True, kw_only=True):
    """A named volume, attached to a gang of one node."""

    name: str  # the volume's name in the task
    path: str  # the volume's mount path
    device: str  # the device name while the volume is attached
    id: str = ""  # "" until the volume exists
    made: bool = False  # created for this gang
    # created by this installation, for this gang or an earlier one; it may be unformatted
    ours: bool = False
    keep: bool = True
    read_only: bool = False
    size_gib: int = 0
    type: str = ""
    attached: bool = False


class AwsGangRecord(Struct, frozen=True, kw_only=True):
    """The record of a gang. The choices for the gang's launch are stored before the request to EC2,
    so that a repeated request is identical to the first request.
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
    disk_type: str = ""  # the type of the root disk
    subnet: str | None = None
    # subnets in other zones, tried next if the zone of `subnet` has no capacity
    others: Sequence[str] = ()
    public: bool = False  # whether EC2 gives the nodes public addresses
    moved: bool = False  # True: `subnet` is one of the earlier `others`
    reservation: str | None = None
    block: bool = False
    ends_at: datetime | None = None  # when EC2 will reclaim the nodes, if this is known in advance
    makes_group: bool = False  # True: the gang gets its own security group
    group: str | None = None  # the security group's id, once it exists
    makes_placement: bool = False
    launched: bool = False  # True: EC2 confirmed the launch
    # True: the gang is being removed; instances that appear later are terminated
    removed: bool = False
    instances: Sequence[AwsInstance] = ()
    disks: tuple[AwsDisk, ...] = ()
    ended_at: datetime | None = None
    tidy: bool = False  # True: all objects that were created for the gang have been removed
    rates: Sequence[
        tuple[datetime, int]
    ] = ()  # pairs of (start time, spot price in micro-dollars per hour)


def is_over(record: AwsGangRecord) -> bool:
    """Return True if all instances of the gang have ended, or if the gang was removed before any
    instance existed.
    """
    return record.ended_at is not None or (record.removed and not record.instances)
