"""An EC2 that behaves, over moto: what moto grants without asking is asked for here, and what it fakes is done.

moto keeps instances, networks, volumes, tags and images and writes most answers. Here: client tokens, unknown types,
capacity, quotas, IAM, throttling, lost replies, what is not shown yet, states that take their time, spot prices and
interruptions, placement groups, reservations, price list and quotas' service. A machine may be booted behind each id.
"""

import hashlib
import threading
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol

from moto.ec2.models import ec2_backends
from moto.ec2.models import instances as moto_instances
from moto.ec2.models.instances import StateReason
from tests.ec2.rules import TYPES, Answer, Hours, Rules, class_of, real_prices

ACCOUNT = "123456789012"
_FORGOTTEN = timedelta(hours=1)


class Machines(Protocol):
    """Who boots something behind instance ids."""

    def boot(self, life: "Life") -> None: ...
    def kill(self, life: "Life") -> None: ...
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
        moto_instances.utcnow = lambda: self.hours.now().replace(tzinfo=None)  # launch times in its answers
        self.regions = tuple(regions)
        self.machines: Machines | None = None
        self.lives: dict[str, Life] = {}
        self.history: list[Life] = []  # every instance that ever was
        self.tokens: dict[tuple[str, str], tuple[str, bytes]] = {}
        self.placements: dict[tuple[str, str], dict[str, str]] = {}  # (region, name): tags
        self.calls: list[tuple[str, str]] = []
        ids: dict[str, str] = {}
        zones: dict[str, list[str]] = {}
        for region in self.regions:
            backend = self.backend(region)
            backend.reservations.clear()
            for groups in backend.groups.values():
                for group in [each for each in groups.values() if each.name != "default"]:
                    del groups[group.id]
            backend.volumes.clear()
            for zone in backend.describe_availability_zones():
                zones.setdefault(region, []).append(zone.name)
                ids[zone.zone_id] = zone.name
            backend.tags.clear()
            backend.describe_instances = self._shown(backend, type(backend).describe_instances)
            backend.describe_tags = _quick_tags(backend, type(backend).describe_tags)
        self.rules = Rules(zones=zones)
        real_prices(self.rules, ids, self.hours.now() - timedelta(days=1))

    def backend(self, region: str) -> Any:
        return ec2_backends[ACCOUNT][region]

    def _shown(self, backend: Any, describe: Any) -> Any:
        """DescribeInstances without what was launched a moment ago."""

        def shown(filters: Any = None) -> list[Any]:
            filters, now, found = dict(filters or {}), self.hours.now(), []
            gang, ours = filters.pop("tag:remuda:gang", None), filters.pop("tag:remuda:installation", None)
            wanted = {
                life.id
                for life in self.lives.values()
                if life.visible_at <= now
                and (gang is None or life.gang in gang)
                and (ours is None or life.installation in ours)
            }
            known = describe(backend, filters=filters) if filters else list(backend.reservations.values())
            for reservation in known if wanted else ():
                visible = copy(reservation)
                visible.instances = [each for each in reservation.instances if each.id in wanted]
                if visible.instances:
                    found.append(visible)
            return found

        return shown

    def tick(self) -> None:
        """Let happen what is due."""
        with self.lock:
            now = self.hours.now()
            for life in list(self.lives.values()):
                if life.state == "pending" and now >= life.launched_at + self.rules.boot:
                    life.set_state("running", 16)
                if life.lives and life.taken_at is not None and now >= life.taken_at:
                    self.end(life, "Server.SpotInstanceTermination", "Spot instance termination")
                if life.state == "shutting-down" and life.shut_at and now >= life.shut_at + self.rules.shutting_down:
                    life.set_state("terminated", 48)
                if life.state == "terminated" and life.shut_at and now >= life.shut_at + _FORGOTTEN:
                    self._forget(life)

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
            life.instance._reason = f"{'User initiated' if user else code} ({now:%Y-%m-%d %H:%M:%S} GMT)"
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
        found: dict[str, list[str]] = {"instances": [life.id for life in self.lives.values() if life.lives]}
        found["placement groups"] = [name for _, name in self.placements]
        for region in self.regions:
            backend = self.backend(region)
            groups = [group for each in backend.groups.values() for group in each.values() if group.name != "default"]
            found.setdefault("security groups", []).extend(group.name for group in groups)
            found.setdefault("volumes", []).extend(backend.volumes)
            found.setdefault("key pairs", []).extend(backend.key_pairs)
        return {kind: names for kind, names in found.items() if names}

    # RunInstances

    def check_token(self, region: str, params: Mapping[str, str]) -> bytes | None:
        """The answer to the same request before."""
        token = params.get("ClientToken", "")
        known = self.tokens.get((region, token)) if token else None
        if known is None:
            return None
        if known[0] != _digest(params):
            raise Answer("IdempotentParameterMismatch", f"Client token {token} was used with other parameters")
        return known[1]

    def check_launch(self, region: str, params: dict[str, str]) -> None:
        """Refuse as EC2 would; chooses the zone where the request names none. Raises Answer."""
        kind, count = params.get("InstanceType", ""), int(params.get("MaxCount", "1"))
        if kind not in TYPES:
            raise Answer("InvalidParameterValue", f"Invalid value '{kind}' for InstanceType.")
        if len(params.get("UserData", "")) > 16384 * 4 // 3 + 4:
            raise Answer("InvalidParameterValue", "User data is limited to 16384 bytes")
        image = params.get("ImageId", "")
        if not self.backend(region).describe_images(filters={"image-id": [image]}):
            raise Answer("InvalidAMIID.NotFound", f"The image id '[{image}]' does not exist")
        market = _market(params)
        zone = params.get("Placement.AvailabilityZone") or self._zone_of_subnet(region, params)
        if zone and zone not in self.rules.zones[region]:
            raise Answer("InvalidParameterValue", f"Invalid availability zone: [{zone}]")
        group = params.get("Placement.GroupName")
        if group and (region, group) not in self.placements:
            raise Answer("InvalidPlacementGroup.Unknown", f"The Placement Group '{group}' is unknown.")
        self._check_quota(kind, count, market)
        reservation = params.get("CapacityReservationSpecification.CapacityReservationTarget.CapacityReservationId")
        if reservation:
            self._check_reservation(reservation, kind, count)
        zones = [zone] if zone else list(self.rules.zones[region])
        if market == "spot":
            zones = [each for each in zones if any(p.zone == each and p.type == kind for p in self.rules.spot)]
        rich = [
            each for each in zones if self.rules.room(kind, each, market) - self.living(kind, each, market) >= count
        ]
        if not rich:
            where = zone or "any zone of the region"
            raise Answer("InsufficientInstanceCapacity", f"We do not have sufficient {kind} capacity in {where}.", 500)
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
                "VcpuLimitExceeded", f"You have requested more vCPU capacity than your limit of {limit} allows"
            )

    def _check_reservation(self, reservation: str, kind: str, count: int) -> None:
        found = next((each for each in self.rules.reserved if each.id == reservation), None)
        if found is None or found.type != kind:
            raise Answer("InvalidCapacityReservationId.NotFound", f"{reservation} does not exist for {kind}")
        if found.total - self.reserved_used(found.id) < count:
            raise Answer("ReservationCapacityExceeded", f"{reservation} has not enough instances")

    def reserved_used(self, reservation: str) -> int:
        return sum(
            1 for life in self.lives.values() if life.lives and getattr(life.instance, "reserved", "") == reservation
        )

    def living(self, kind: str, zone: str, market: str) -> int:
        return sum(
            1 for each in self.lives.values()
            if each.lives and each.instance.instance_type == kind and each.zone == zone and each.market == market
        )  # fmt: skip

    def vcpus(self, kind: str) -> int:
        found = next(each for each in self.backend(self.regions[0]).instance_types if each["InstanceType"] == kind)
        return int(found["VCpuInfo"]["DefaultVCpus"])

    def launched(self, region: str, params: Mapping[str, str], before: Mapping[str, str], user_data: bytes) -> None:
        """moto has made the instances of this request: let their lives begin."""
        now = self.hours.now()
        reservation = next(reversed(self.backend(region).reservations.values()))
        market = _market(params)
        for instance in reservation.instances:
            tags = {tag["Key"]: tag["Value"] for tag in _tags(instance)}
            life = Life(
                region=region,
                instance=instance,
                index=instance.ami_launch_index,
                gang=tags.get("remuda:gang", ""),
                installation=tags.get("remuda:installation", ""),
                market=market,
                launched_at=now,
                visible_at=now + self.rules.hidden,
                user_data=user_data,
            )
            instance.launch_time = now.replace(tzinfo=None)
            instance.lifecycle = "spot" if market == "spot" else None
            instance.reserved = params.get(
                "CapacityReservationSpecification.CapacityReservationTarget.CapacityReservationId", ""
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
        for life in self.lives.values():
            if life.state != "terminated":
                ids = {each.id for each in life.instance.security_groups}
                ids |= {each.id for nic in life.instance.nics.values() for each in nic.group_set}
                if group in ids:
                    return True
        return False

    def placement_in_use(self, region: str, name: str) -> bool:
        return any(
            life.state != "terminated" and life.region == region and life.gang == name for life in self.lives.values()
        )


def _quick_tags(backend: Any, describe: Any) -> Any:
    """moto looks through the tags of everything for those of one thing; what it asks mostly is answered at once."""

    def quick(filters: Any = None) -> Any:
        if not filters or set(filters) != {"resource-id"} or any("*" in each for each in filters["resource-id"]):
            return describe(backend, filters)
        return [
            {"resource_id": each, "key": key, "value": value, "resource_type": "instance"}
            for each in filters["resource-id"]
            for key, value in backend.tags.get(each, {}).items()
        ]

    return quick


def _market(params: Mapping[str, str]) -> str:
    return params.get("InstanceMarketOptions.MarketType") or "on-demand"


def _digest(params: Mapping[str, str]) -> str:
    return hashlib.sha256(repr(sorted(params.items())).encode()).hexdigest()


def _tags(instance: Any) -> list[dict[str, str]]:
    return [
        {"Key": str(t.get("Key", t.get("key"))), "Value": str(t.get("Value", t.get("value")))}
        for t in instance.get_tags()
    ]
