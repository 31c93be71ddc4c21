"""EBS: volumes in zones, attached to one running instance of their zone; what goes with an
instance, and what stays.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html has the codes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Protocol
from xml.sax.saxutils import escape

from tests.ec2.rules import Answer

TYPES = ("standard", "gp2", "gp3", "io1", "io2", "st1", "sc1")
CREATING = timedelta(seconds=1)


class Host(Protocol):
    """An instance, as far as disks go."""

    @property
    def id(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def zone(self) -> str: ...


@dataclass(slots=True, kw_only=True)
class Disk:
    """One volume."""

    id: str
    region: str
    zone: str
    size_gib: int
    type: str
    tags: dict[str, str]
    made_at: datetime
    host: Host | None = None
    users: list[str] = field(default_factory=list)  # instances that it was attached to
    device: str = ""
    goes: bool = False  # with its instance

    def state(self, now: datetime) -> str:
        return (
            "in-use" if self.host else "creating" if now < self.made_at + CREATING else "available"
        )


@dataclass(slots=True, kw_only=True)
class Disks:
    """Every volume of an account but for root disks."""

    zones: Mapping[str, Sequence[str]]
    now: Callable[[], datetime]
    plug: Callable[[Host, Disk], None]
    unplug: Callable[[Host, Disk], None]
    known: dict[str, Disk] = field(default_factory=dict)
    tokens: dict[str, tuple[Mapping[str, str], str]] = field(default_factory=dict)
    ever: list[Disk] = field(default_factory=list)

    def make(self, region: str, params: Mapping[str, str], tags: Mapping[str, str]) -> Disk:
        token = params.get("ClientToken", "")
        if token in self.tokens:
            asked, made = self.tokens[token]
            if asked != params:
                raise Answer(
                    "IdempotentParameterMismatch",
                    f"Client token {token} was used with other parameters",
                )
            return next(each for each in self.ever if each.id == made)
        if params["AvailabilityZone"] not in self.zones[region]:
            raise Answer(
                "InvalidZone.NotFound", f"The zone '{params['AvailabilityZone']}' does not exist."
            )
        if params.get("VolumeType", "gp2") not in TYPES:
            raise Answer(
                "InvalidParameterValue",
                f"Value ({params['VolumeType']}) for parameter volumeType is invalid.",
            )
        disk = Disk(
            id=f"vol-{len(self.ever) + 0xD15C0000:017x}",
            region=region,
            zone=params["AvailabilityZone"],
            size_gib=int(params["Size"]),
            type=params.get("VolumeType", "gp2"),
            tags=dict(tags),
            made_at=self.now(),
        )
        self.known[disk.id] = disk
        self.ever.append(disk)
        if token:
            self.tokens[token] = (dict(params), disk.id)
        return disk

    def attach(self, volume: str, host: Host | None, device: str) -> Disk:
        disk = self.get(volume)
        if host is None:
            raise Answer("InvalidInstanceID.NotFound", "The instance ID does not exist")
        if disk.host is not None:
            raise Answer("VolumeInUse", f"{volume} is already attached to an instance")
        if disk.state(self.now()) != "available":
            raise Answer("IncorrectState", f"Volume '{volume}' is '{disk.state(self.now())}'.")
        if host.state != "running":
            raise Answer("IncorrectState", f"Instance '{host.id}' is not 'running'.")
        if disk.zone != host.zone:
            raise Answer(
                "InvalidVolume.ZoneMismatch",
                f"The volume '{volume}' is not in the same zone as instance.",
            )
        if not device.startswith("/dev/sd") or any(each.device == device for each in self.of(host)):
            raise Answer("InvalidParameterValue", f"Invalid value '{device}' for unixDevice.")
        disk.host, disk.device, disk.goes = host, device, False
        disk.users.append(host.id)
        self.plug(host, disk)
        return disk

    def delete(self, volume: str) -> None:
        disk = self.get(volume)
        if disk.host is not None:
            raise Answer("VolumeInUse", f"Volume {volume} is currently attached to {disk.host.id}")
        if disk.state(self.now()) == "creating":
            raise Answer("IncorrectState", f"Volume '{volume}' is 'creating'.")
        del self.known[volume]

    def get(self, volume: str) -> Disk:
        if volume not in self.known:
            raise Answer("InvalidVolume.NotFound", f"The volume '{volume}' does not exist.")
        return self.known[volume]

    def of(self, host: Host) -> Iterator[Disk]:
        return (each for each in list(self.known.values()) if each.host is host)

    def used_by(self, instance: str) -> list[Disk]:
        """The volumes that were ever attached to an instance."""
        return [each for each in self.ever if instance in each.users]

    def let_go(self, host: Host) -> None:
        """The instance is terminated."""
        for disk in self.of(host):
            self.unplug(host, disk)
            disk.host, disk.device = None, ""
            if disk.goes:
                del self.known[disk.id]

    def show(self, region: str, wanted: Mapping[str, Sequence[str]]) -> str:
        """DescribeVolumes' items."""
        return "".join(
            self._item(disk)
            for disk in self.known.values()
            if disk.region == region and _fits(disk, wanted)
        )

    def _item(self, disk: Disk) -> str:
        tags = "".join(
            f"<item><key>{escape(k)}</key><value>{escape(v)}</value></item>"
            for k, v in disk.tags.items()
        )
        attached = ""
        if disk.host is not None:
            attached = (
                f"<item><volumeId>{disk.id}</volumeId><instanceId>{disk.host.id}</instanceId>"
                f"<device>{disk.device}</device><status>attached</status>"
                f"<deleteOnTermination>{str(disk.goes).lower()}</deleteOnTermination></item>"
            )
        made = f"{disk.made_at:%Y-%m-%dT%H:%M:%S.000Z}"
        return (
            f"<item><volumeId>{disk.id}</volumeId><size>{disk.size_gib}</size>"
            f"<volumeType>{disk.type}</volumeType><createTime>{made}</createTime>"
            f"<availabilityZone>{disk.zone}</availabilityZone><status>{disk.state(self.now())}</status>"
            f"<attachmentSet>{attached}</attachmentSet><tagSet>{tags}</tagSet></item>"
        )


def _fits(disk: Disk, wanted: Mapping[str, Sequence[str]]) -> bool:
    for name, values in wanted.items():
        assert name == "volume-id" or name.startswith("tag:"), name
        if (
            disk.id if name == "volume-id" else disk.tags.get(name.removeprefix("tag:"))
        ) not in values:
            return False
    return True
