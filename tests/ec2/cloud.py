"""An EC2 that behaves, over moto: what moto grants without asking is asked for here, and what it
fakes is done.

moto keeps instances, networks, volumes, tags and images and writes most answers. Here: client
tokens, unknown types, capacity, quotas, IAM, throttling, lost replies, what is not shown yet,
states that take their time, spot prices and interruptions, placement groups, reservations, price
list and quotas' service. A machine may be booted behind each id.
"""

import hashlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from moto.ec2.models import ec2_backends
from moto.ec2.models import instances as moto_instances
from moto.ec2.models.instances import StateReason
from tests.ec2.disks import Disk, Disks
from tests.ec2.groups import Groups
from tests.ec2.launches import check_request, list_groups, list_tagged
from tests.ec2.rules import Answer, Hours, Rules, class_of, real_prices

ACCOUNT = "123456789012"
_FORGOTTEN = timedelta(hours=1)


class Machines(Protocol):
    """Who boots something behind instance ids."""

    def boot(self, life: "Life") -> None: ...
    def kill(self, life: "Life") -> None: ...
    def plug(self, life: "Life", disk: Disk) -> None: ...
    def unplug(self, life: "Life", disk: Disk) -> None: ...
    def notice(self, life: "Life", at: datetime) -> None:
        """A spot interruption is announced on the machine itself."""


@dataclass(slots=True, kw_only=True)
class Life:
    """What is known of one instance beyond moto's own."""

    region: str
    instance: Any  # moto's
    index: int
    gang: str
    installation: str
    market: str
    launched_at: datetime
    visible_at: datetime
    user_data: bytes
    tags: Mapping[str, str]
    request: Mapping[str, str]  # as it was made
    reservation: str
    groups: Sequence[str]
    public: bool  # it was given a public address
    shut_at: datetime | None = None  # shutting down since
    taken_at: datetime | None = None  # will be interrupted

    @property
    def id(self) -> str:
        return str(self.instance.id)

    @property
    def state(self) -> str:
        return str(self.instance._state.name)

    @property
    def lives(self) -> bool:
        return self.state in ("pending", "running")

    @property
    def type(self) -> str:
        return str(self.instance.instance_type)

    @property
    def zone(self) -> str:
        return str(self.instance.placement.zone)

    def set_state(self, name: str, code: int) -> None:
        self.instance._state.name, self.instance._state.code = name, code


class Cloud:
    """One AWS account."""

    def __init__(self, hours: Hours | None = None, regions: Iterable[str] = ("us-east-1",)) -> None:
        self.hours = hours or Hours()
        self.lock = threading.RLock()
        moto_instances.utcnow = lambda: self.hours.now().replace(
            tzinfo=None
        )  # launch times in its answers
        self.regions = tuple(regions)
        self.machines: Machines | None = None
        self.lives: dict[str, Life] = {}
        self.history: list[Life] = []  # every instance that ever was
        self.tokens: dict[tuple[str, str], tuple[str, bytes]] = {}
        self.placements: dict[tuple[str, str], dict[str, str]] = {}  # (region, name): tags
        self.calls: list[tuple[str, str]] = []
        self.requests: list[tuple[str, Mapping[str, str]]] = []  # of EC2: action and parameters
        self.used: set[str] = set()  # IAM actions that were granted
        ids: dict[str, str] = {}
        self.zone_ids: dict[str, str] = {}
        zones: dict[str, list[str]] = {}
        for region in self.regions:
            backend = self.backend(region)
            backend.reservations.clear()
            backend.volumes.clear()
            for zone in backend.describe_availability_zones():
                zones.setdefault(region, []).append(zone.name)
                ids[zone.zone_id] = zone.name
                self.zone_ids[zone.name] = zone.zone_id
            backend.tags.clear()
        self.groups = Groups(vpcs=self.vpcs, default=self.default_vpc, used=self.group_in_use)
        self._images: dict[str, frozenset[str]] = {}
        self._facts: dict[str, Mapping[str, Any]] = {}
        self._forget_at = self.hours.now()
        self.rules = Rules(zones=zones)
        self.disks = Disks(zones=zones, now=self.hours.now, plug=self._plug, unplug=self._unplug)
        real_prices(self.rules, ids, self.hours.now() - timedelta(days=1))

    def backend(self, region: str) -> Any:
        return ec2_backends[ACCOUNT][region]

    def shown(self, region: str, wanted: Mapping[str, Sequence[str]]) -> list[Life]:
        """DescribeInstances, without what was launched a moment ago."""
        now = self.hours.now()
        return [
            life
            for life in self.lives.values()
            if life.region == region
            and life.visible_at <= now
            and all(
                (
                    life.state
                    if name == "instance-state-name"
                    else life.tags.get(name.removeprefix("tag:"))
                )
                in values
                for name, values in wanted.items()
            )
        ]

    def tick(self) -> None:
        """Let happen what is due."""
        with self.lock:
            now = self.hours.now()
            forget = now >= self._forget_at
            if forget:
                self._forget_at = now + timedelta(minutes=5)
            for life in list(self.lives.values()):
                if life.state == "terminated":
                    if forget and life.shut_at and now >= life.shut_at + _FORGOTTEN:
                        self._forget(life)
                    continue
                if life.state == "pending" and life.zone in self.rules.fails_late:
                    if now >= life.visible_at:
                        code = self.rules.fails_late[life.zone]
                        self.end(life, code, "The launch failed")
                    continue
                if life.state == "pending" and now >= life.launched_at + self.rules.boot:
                    life.set_state("running", 16)
                if life.lives and self._is_cleared(life, now):
                    self.end(
                        life, "Server.CapacityBlockExpired", "The capacity block is at its end"
                    )
                if life.lives and life.taken_at is not None and now >= life.taken_at:
                    self.end(life, "Server.SpotInstanceTermination", "Spot instance termination")
                if (
                    life.state == "shutting-down"
                    and life.shut_at
                    and now >= life.shut_at + self.rules.shutting_down
                ):
                    life.set_state("terminated", 48)
                    self.disks.let_go(life)

    def _is_cleared(self, life: Life, now: datetime) -> bool:
        """Whether it runs in a capacity block from which EC2 takes everything."""
        held = next(
            (
                each
                for each in self.rules.reserved
                if each.block and each.id == life.instance.reserved
            ),
            None,
        )
        return (
            held is not None
            and held.until is not None
            and now >= held.until - timedelta(minutes=30)
        )

    def end(self, life: Life, code: str, message: str) -> None:
        """The instance goes; its disk and interfaces with it."""
        with self.lock:
            if not life.lives:
                return
            disks = [disk.volume_id for _, disk in life.instance.get_block_device_mapping]
            life.instance.terminate()
            for each in disks:
                life.instance.ec2_backend.tags.pop(each, None)
            now = self.hours.now()
            life.shut_at = now
            life.set_state("shutting-down", 32)
            life.instance.state_reason = StateReason(f"{code}: {message}", code)
            user = code == "Client.UserInitiatedShutdown"
            life.instance._reason = (
                f"{'User initiated' if user else code} ({now:%Y-%m-%d %H:%M:%S} GMT)"
            )
        if self.machines is not None:
            self.machines.kill(life)

    def shut_down_itself(self, life: Life) -> None:
        """The guest was shut down, which terminates where the launch said so."""
        assert life.instance.instance_initiated_shutdown_behavior == "terminate"
        self.end(life, "Client.InstanceInitiatedShutdown", "Instance initiated shutdown")

    def interrupt(self, life: Life) -> datetime:
        """Announce a spot interruption; the time at which the instance goes."""
        assert life.market == "spot"
        life.taken_at = self.hours.now() + self.rules.notice
        if self.machines is not None:
            self.machines.notice(life, life.taken_at)
        return life.taken_at

    def of(self, gang: str) -> list[Life]:
        """Every instance that a gang ever had."""
        return [life for life in self.history if life.gang == gang]

    def left(self) -> dict[str, list[str]]:
        """Everything that is there now and was not there at first, by kind."""
        self.tick()
        found: dict[str, list[str]] = {
            "instances": [life.id for life in self.lives.values() if life.lives]
        }
        found["security groups"] = [group.name for group in self.groups.known.values()]
        found["placement groups"] = [name for _, name in self.placements]
        for region in self.regions:
            backend = self.backend(region)
            found.setdefault("volumes", []).extend(backend.volumes)
            found["volumes"] += [
                each.id for each in self.disks.known.values() if each.region == region
            ]
            found.setdefault("key pairs", []).extend(backend.key_pairs)
        return {kind: names for kind, names in found.items() if names}

    # RunInstances

    def check_token(self, region: str, params: Mapping[str, str]) -> bytes | None:
        """The answer to the same request before."""
        token = params.get("ClientToken", "")
        known = self.tokens.get((region, token)) if token else None
        if known is None:
            return None
        made = [each for each in self.history if each.request.get("ClientToken") == token]
        if made and all(each.state == "terminated" for each in made):
            text = f"The instance that client token {token} launched is terminated"
            raise Answer("IdempotentInstanceTerminated", text)
        if known[0] != _digest(params):
            raise Answer(
                "IdempotentParameterMismatch",
                f"Client token {token} was used with other parameters",
            )
        return known[1]

    def check_launch(self, region: str, params: dict[str, str]) -> None:
        """Refuse as EC2 would; chooses the zone where the request names none. Raises Answer."""
        check_request(self, region, params)
        kind, count = params["InstanceType"], int(params["MaxCount"])
        market = _market(params)
        zone = params.get("Placement.AvailabilityZone") or self._zone_of_subnet(region, params)
        if zone and zone not in self.rules.zones[region]:
            raise Answer("InvalidParameterValue", f"Invalid availability zone: [{zone}]")
        subnet = self._zone_of_subnet(region, params)
        if subnet and zone != subnet:
            raise Answer("InvalidParameterValue", f"The subnet is in {subnet}, not in {zone}")
        self._check_quota(kind, count, market)
        reservation = params.get(
            "CapacityReservationSpecification.CapacityReservationTarget.CapacityReservationId"
        )
        if reservation:
            self._check_reservation(reservation, kind, count, zone)
        if (kind, zone) in self.rules.missing:
            text = (
                f"Your requested instance type ({kind}) is not supported in your requested "
                f"Availability Zone ({zone})."
            )
            raise Answer("Unsupported", text)
        zones = [
            each
            for each in self.rules.zones[region]
            if zone in (None, each) and (kind, each) not in self.rules.missing
        ]
        if market == "spot":
            zones = [
                each
                for each in zones
                if any(p.zone == each and p.type == kind for p in self.rules.spot)
            ]
        if self.rules.picks is not None and not zone:
            zones = [self.rules.picks]
        rich = [
            each
            for each in zones
            if self.rules.room(kind, each, market) - self.living(kind, each, market) >= count
        ]
        if not rich:
            where = zone or "any zone of the region"
            raise Answer(
                "InsufficientInstanceCapacity",
                f"We do not have sufficient {kind} capacity in {where}.",
                500,
            )
        if not zone:
            params["Placement.AvailabilityZone"] = rich[0]

    def _check_quota(self, kind: str, count: int, market: str) -> None:
        name = class_of(kind)
        living = [each for each in self.lives.values() if each.lives and each.market == market]
        kinds = [str(each.instance.instance_type) for each in living]
        used = sum(self.vcpus(each) for each in kinds if class_of(each) == name)
        limit = self.rules.quota(name, market)
        if used + count * self.vcpus(kind) > limit:
            if market == "spot":
                raise Answer("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
            raise Answer(
                "VcpuLimitExceeded",
                f"You have requested more vCPU capacity than your limit of {limit} allows",
            )

    def _check_reservation(self, reservation: str, kind: str, count: int, zone: str | None) -> None:
        found = next((each for each in self.rules.reserved if each.id == reservation), None)
        if found is None or found.type != kind:
            raise Answer(
                "InvalidCapacityReservationId.NotFound", f"{reservation} does not exist for {kind}"
            )
        if found.state != "active" or found.platform != "Linux/UNIX":
            raise Answer(
                "InvalidCapacityReservationState.Unavailable", f"{reservation} is {found.state}"
            )
        if found.until and self.hours.now() >= found.until - timedelta(
            minutes=30 if found.block else 0
        ):
            raise Answer(
                "InvalidCapacityReservationState.Unavailable", f"{reservation} is at its end"
            )
        if zone not in (None, found.zone):
            raise Answer("InvalidParameterValue", f"{reservation} is not in {zone}")
        if found.total - self.reserved_used(found.id) < count:
            raise Answer("ReservationCapacityExceeded", f"{reservation} has not enough instances")

    def reserved_used(self, reservation: str) -> int:
        return sum(
            1
            for life in self.lives.values()
            if life.lives and getattr(life.instance, "reserved", "") == reservation
        )

    def living(self, kind: str, zone: str, market: str) -> int:
        return sum(
            1
            for each in self.lives.values()
            if each.lives
            and each.instance.instance_type == kind
            and each.zone == zone
            and each.market == market
        )

    def vcpus(self, kind: str) -> int:
        return int(self.facts(kind)["VCpuInfo"]["DefaultVCpus"])

    def facts(self, kind: str) -> Mapping[str, Any]:
        """What DescribeInstanceTypes says of a type."""
        if not self._facts:
            known = self.backend(self.regions[0]).instance_types
            self._facts = {each["InstanceType"]: each for each in known}
        return self._facts[kind]

    def images(self, region: str) -> frozenset[str]:
        """Machine images, as they were when somebody first asked."""
        if region not in self._images:
            self._images[region] = frozenset(
                each.id for each in self.backend(region).describe_images()
            )
        return self._images[region]

    def default_vpc(self, region: str) -> str:
        """The VPC of a request that names none. Raises Answer if the region has no default one."""
        default = [each.id for each in self.backend(region).describe_vpcs() if each.is_default]
        if not default:
            raise Answer("VPCIdNotSpecified", "No default VPC for this user.")
        return str(default[0])

    def vpcs(self, region: str) -> Sequence[str]:
        """The default one first."""
        found = self.backend(region).describe_vpcs()
        return [each.id for each in sorted(found, key=lambda each: not each.is_default)]

    def launched(
        self, region: str, params: Mapping[str, str], before: Mapping[str, str], user_data: bytes
    ) -> None:
        """moto has made the instances of this request: let their lives begin."""
        now = self.hours.now()
        reservation = next(reversed(self.backend(region).reservations.values()))
        market, tags = _market(params), dict(list_tagged(before)).get("instance", {})
        for instance in reservation.instances:
            life = Life(
                region=region,
                instance=instance,
                index=instance.ami_launch_index,
                gang=tags.get("cavvy:gang", ""),
                installation=tags.get("cavvy:installation", ""),
                market=market,
                launched_at=instance.launch_time.replace(
                    tzinfo=UTC
                ),  # as the answer says: it may be a second ago
                visible_at=now + self.rules.hidden,
                user_data=user_data,
                tags=tags,
                request=before,
                reservation=reservation.id,
                groups=list_groups(before),
                public=bool(instance.public_ip),
            )
            instance.lifecycle = "spot" if market == "spot" else None
            instance.reserved = params.get(
                "CapacityReservationSpecification.CapacityReservationTarget.CapacityReservationId",
                "",
            )
            life.set_state("pending", 0)
            self.lives[life.id] = life
            self.history.append(life)
        if self.machines is not None:
            for instance in reservation.instances:
                self.machines.boot(self.lives[instance.id])

    def remember(self, region: str, params: Mapping[str, str], body: bytes) -> None:
        if params.get("ClientToken"):
            self.tokens[region, params["ClientToken"]] = (_digest(params), body)

    def _zone_of_subnet(self, region: str, params: Mapping[str, str]) -> str | None:
        subnet = params.get("SubnetId") or params.get("NetworkInterface.1.SubnetId")
        return str(self.backend(region).get_subnet(subnet).availability_zone) if subnet else None

    def _plug(self, life: Any, disk: Disk) -> None:
        if self.machines is not None:
            self.machines.plug(life, disk)

    def _unplug(self, life: Any, disk: Disk) -> None:
        if self.machines is not None:
            self.machines.unplug(life, disk)

    def _forget(self, life: Life) -> None:
        for reservation in list(self.backend(life.region).reservations.values()):
            if life.instance in reservation.instances:
                reservation.instances.remove(life.instance)
            if not reservation.instances:
                del self.backend(life.region).reservations[reservation.id]
        del self.lives[life.id]
        self.backend(life.region).tags.pop(life.id, None)

    def group_in_use(self, group: str) -> bool:
        """Whether an instance that is not gone yet has this security group."""
        return any(
            group in life.groups for life in self.lives.values() if life.state != "terminated"
        )

    def placement_in_use(self, region: str, name: str) -> bool:
        return any(
            life.state != "terminated" and life.region == region and life.gang == name
            for life in self.lives.values()
        )


def _market(params: Mapping[str, str]) -> str:
    return params.get("InstanceMarketOptions.MarketType") or "on-demand"


def _digest(params: Mapping[str, str]) -> str:
    return hashlib.sha256(repr(sorted(params.items())).encode()).hexdigest()
