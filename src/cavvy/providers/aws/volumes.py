"""Manages the EBS volumes of tasks: finds or creates them before a launch, attaches them to the
running node, and deletes the volumes that need not be kept.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from cavvy.domain.allocations import VolumeLocation
from cavvy.domain.tasks import Volume, VolumeKind
from cavvy.domain.values import replace
from cavvy.domain.volumes import KeptVolume
from cavvy.providers.aws.account import AwsAccount, AwsFault, Json, translate
from cavvy.providers.aws.launch_ledger import AwsDisk, AwsGangRecord
from cavvy.providers.aws.network import GANG, filters, make_tags, read_tag
from cavvy.providers.aws.policy import TAG
from cavvy.providers.base import GangSpec, NoCapacity, NotFound, Refused, TryAgain
from cavvy.providers.hosts.userdata import NodeDisk
from cavvy.providers.ledger import LaunchLedger

# The device names that AWS recommends for EBS volumes:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/device_naming.html
_DEVICES = tuple(f"/dev/sd{letter}" for letter in "fghijklmnop")
MOST = len(_DEVICES)
_GONE = frozenset({"deleting", "deleted", "error"})
_NOT_YET = frozenset({"VolumeInUse", "IncorrectState", "IncorrectInstanceState"})


class GangVolumes:
    """Manages the volumes of one installation's gangs. The ledger records which volumes were
    created for each gang.
    """

    def __init__(self, account: AwsAccount, ledger: LaunchLedger[AwsGangRecord], mark: str) -> None:
        self._account, self._ledger, self._mark = account, ledger, mark

    async def places(self, regions: Sequence[str]) -> Sequence[VolumeLocation]:
        """Return the locations of the account's volumes, except volumes that EC2 deletes with their
        instances. Raises TryAgain, Refused.
        """
        found = []
        for region in regions:
            for told in await self._account.items(region, "describe_volumes"):
                going = any(each.get("DeleteOnTermination") for each in told.get("Attachments", []))
                if told.get("State") not in _GONE and not going:
                    names = (
                        str(told["VolumeId"]),
                        *([name] if (name := read_tag(told, "Name")) else []),
                    )
                    zone = str(told["AvailabilityZone"])
                    found.append(
                        VolumeLocation(provider="aws", names=names, region=region, zone=zone)
                    )
        return found

    async def list_kept(self, regions: Sequence[str]) -> Sequence[KeptVolume]:
        """Return the volumes of this installation that outlive their gangs. The result contains no
        prices. Raises TryAgain, Refused.
        """
        users: dict[str, list[str]] = {}
        for record in self._ledger.records.values():
            for disk in record.disks:
                users.setdefault(disk.id, []).append(record.name)
        found = []
        for region in regions:
            for told in await self._account.items(region, "describe_volumes", filters(self._mark)):
                going = any(each.get("DeleteOnTermination") for each in told.get("Attachments", []))
                if told.get("State") in _GONE or going:
                    continue
                volume = str(told["VolumeId"])
                found.append(
                    KeptVolume(
                        id=volume,
                        name=read_tag(told, "Name") or volume,
                        region=region,
                        zone=str(told["AvailabilityZone"]),
                        type=str(told["VolumeType"]),
                        size_gib=int(told["Size"]),
                        created_at=told["CreateTime"],
                        made_for=read_tag(told, GANG),
                        project=read_tag(told, "project"),
                        used_by=tuple(sorted(users.get(volume, ()))),
                    )
                )
        return found

    async def plan(self, gang: GangSpec) -> tuple[tuple[AwsDisk, ...], str | None]:
        """Return the gang's disks, and the zone that the disks require (None if the disks require
        no zone). Raises NoCapacity, Refused, TryAgain.
        """
        region, zone, by = gang.offer.region, gang.offer.zone, ""
        disks: list[AwsDisk] = []
        for volume, device in zip(_named(gang), _DEVICES, strict=False):
            told = await self._find(region, volume.source, gang.name) if volume.keep else None
            if told is None and volume.size_gib is None:
                raise Refused(
                    f"volumes: the volume {volume.source} does not exist in {region}; add a "
                    "`size` to create it"
                )
            if told is not None:
                there = str(told["AvailabilityZone"])
                if zone not in (None, there):
                    text = (
                        f"the volume {volume.source} is in the zone {there}, but "
                        f"{by or gang.offer.key} is in the zone {zone}"
                    )
                    raise Refused(f"volumes: {text}") if by else NoCapacity(text)
                self._check_free(volume.source, told, gang.name)
                zone, by = (
                    there,
                    by or f"the volume {volume.source}" if gang.offer.zone is None else "",
                )
            disks.append(self._plan(volume, device, told))
        return tuple(disks), zone

    async def make(self, record: AwsGangRecord, labels: Mapping[str, str]) -> AwsGangRecord:
        """Create the missing volumes, and record each one. Raises NoCapacity, TryAgain, Refused."""
        for disk in record.disks:
            if disk.id:
                continue
            tags = [
                each for each in make_tags(self._mark, record.name, labels) if each["Key"] != "Name"
            ]
            tags.append({"Key": "Name", "Value": disk.name})
            kind = disk.type or "gp3"  # records of older versions may have no type
            try:
                told = await self._account.call(
                    record.region,
                    "create_volume",
                    AvailabilityZone=record.zone,
                    Size=disk.size_gib,
                    VolumeType=kind,
                    ClientToken=hashlib.sha256(
                        f"{self._mark}/{record.name}/{disk.path}".encode()
                    ).hexdigest(),
                    TagSpecifications=[{"ResourceType": "volume", "Tags": tags}],
                )
            except AwsFault as fault:
                what = (
                    f"CreateVolume of {disk.name}, {disk.size_gib} GiB of {kind} in {record.zone}"
                )
                raise translate(fault, what, making=True) from fault
            made = replace(disk, id=str(told["VolumeId"]))
            record = replace(
                record, disks=tuple(made if each is disk else each for each in record.disks)
            )
            await self._ledger.put(record)
        return record

    async def attach(self, record: AwsGangRecord) -> None:
        """Attach the gang's unattached disks to the running node. If EC2 cannot attach a disk yet,
        the next call tries again. Raises TryAgain, Refused.
        """
        instance = next((each.id for each in record.instances if each.ended_at is None), None)
        for disk in record.disks if instance else ():
            if disk.attached:
                continue
            which: dict[str, Any] = {"InstanceId": instance, "VolumeId": disk.id}
            try:
                await self._account.call(
                    record.region, "attach_volume", Device=disk.device, **which
                )
            except AwsFault as fault:
                if fault.code not in _NOT_YET:
                    raise translate(fault, f"AttachVolume in {record.region}") from fault
                if not await self._is_attached(record.region, disk.id, instance):
                    continue
            # DeleteOnTermination: EC2 deletes the volume with the instance, even while no server
            # runs
            if not disk.keep:
                going = {
                    "DeviceName": disk.device,
                    "Ebs": {"VolumeId": disk.id, "DeleteOnTermination": True},
                }
                await self._account.ask(
                    record.region,
                    "modify_instance_attribute",
                    InstanceId=instance,
                    BlockDeviceMappings=[going],
                )
            record = self._ledger.get(record.name) or record  # a poll may have changed the record
            done = tuple(
                replace(each, attached=True) if each.id == disk.id else each
                for each in record.disks
            )
            await self._ledger.put(replace(record, disks=done))

    async def remove_made(self, record: AwsGangRecord) -> bool:
        """Delete the volumes that were created for this gang. If the gang was launched, do not
        delete the volumes whose `keep` is True. Returns False while one of the volumes to delete is
        still in use. Raises TryAgain, Refused.
        """
        unused = not record.launched
        ids = {
            disk.id for disk in record.disks if disk.made and disk.id and (unused or not disk.keep)
        }
        if any(
            disk.made and not disk.id for disk in record.disks
        ):  # the volume may have been created although the reply was lost
            query = filters(self._mark, record.name)
            told = await self._account.items(record.region, "describe_volumes", query)
            mine = {disk.name for disk in record.disks if disk.made and (unused or not disk.keep)}
            ids |= {
                str(each["VolumeId"])
                for each in told
                if read_tag(each, "Name") in mine and each["State"] == "available"
            }
        gone = True
        for each in sorted(ids):
            try:
                await self._account.call(record.region, "delete_volume", VolumeId=each)
            except AwsFault as fault:
                if fault.code in _NOT_YET:
                    gone = False
                    continue
                with suppress(NotFound):
                    raise translate(fault, f"DeleteVolume in {record.region}") from fault
        return gone

    async def _find(self, region: str, name: str, gang: str) -> Json | None:
        """Return the volume with this id or name for a gang, or None if no such volume exists.

        Raises Refused if the name is ambiguous, TryAgain if EC2 does not list the volume yet, and
        NoCapacity while the volume is being created for another gang.
        """
        key = "volume-id" if name.startswith("vol-") else "tag:Name"
        told = await self._account.items(region, "describe_volumes", {key: name})
        found = [each for each in told if each.get("State") not in _GONE]
        if len(found) > 1:
            ids = ", ".join(sorted(str(each["VolumeId"]) for each in found))
            raise Refused(
                f"volumes: several volumes in {region} are called {name}; use the id of one: {ids}"
            )
        if found:
            return found[0]
        for record in list(self._ledger.records.values()):
            for disk in record.disks:
                if (
                    record.region == region
                    and disk.name == name
                    and disk.made
                    and disk.keep
                    and record.name != gang
                ):
                    if not record.launched and record.ended_at is not None:
                        continue  # the volume has been deleted
                    if not disk.id:
                        raise NoCapacity(f"the volume {name} is being created for {record.name}")
                    if await self._account.items(
                        region, "describe_volumes", {"volume-id": disk.id}
                    ):
                        raise TryAgain(
                            f"the volume {name} exists in {region} but EC2 does not list it by "
                            "its name yet"
                        )
        return None

    def _plan(self, volume: Volume, device: str, told: Json | None) -> AwsDisk:
        return AwsDisk(
            name=volume.source,
            path=volume.path,
            device=device,
            id=str(told["VolumeId"]) if told else "",
            made=told is None,
            ours=told is None or read_tag(told, TAG) == self._mark,
            keep=volume.keep,
            read_only=volume.read_only,
            size_gib=int(told["Size"]) if told else volume.size_gib or 0,
            type=str(told["VolumeType"]) if told else volume.type or "gp3",
        )

    def _check_free(self, name: str, told: Json, gang: str) -> None:
        """Raise NoCapacity if another gang or instance uses the volume. Instances of gangs that are
        ending are ignored, because these instances will soon release the volume.
        """
        leaving = set()
        for record in self._ledger.records.values():
            ends = record.removed or record.ended_at is not None
            if record.name != gang and any(disk.id == told["VolumeId"] for disk in record.disks):
                if not ends:
                    raise NoCapacity(f"the volume {name} is in use by {record.name}")
                leaving |= {each.id for each in record.instances}
        users = {str(each["InstanceId"]) for each in told.get("Attachments", [])} - leaving
        if users:
            raise NoCapacity(f"the volume {name} is in use by {', '.join(sorted(users))}")

    async def _is_attached(self, region: str, volume: str, instance: str | None) -> bool:
        told = await self._account.items(region, "describe_volumes", {"volume-id": volume})
        return any(
            each.get("InstanceId") == instance
            for found in told
            for each in found.get("Attachments", [])
        )


def list_node_disks(record: AwsGangRecord) -> Sequence[NodeDisk]:
    """Return the disks. Each disk has two possible device paths on the node: a path with the id of
    the NVMe disk, and a path with the device name.
    """
    return [
        NodeDisk(
            devices=(
                f"/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_{disk.id.replace('-', '')}",
                disk.device.replace("/dev/sd", "/dev/xvd"),
            ),
            path=disk.path,
            read_only=disk.read_only,
            make=disk.ours,
        )
        for disk in record.disks
    ]


def _named(gang: GangSpec) -> Sequence[Volume]:
    return [each for each in gang.volumes if each.kind is VolumeKind.NAMED]
