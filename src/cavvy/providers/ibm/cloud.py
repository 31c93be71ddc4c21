"""Implements `Cloud` for IBM Cloud. One machine is one virtual server instance in a VPC."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Scalar
from cavvy.providers.base import Refused
from cavvy.providers.ibm.api import IbmApi
from cavvy.providers.ibm.iam import IamTokens
from cavvy.providers.ibm.manifest import KEYS
from cavvy.providers.ibm.market import IbmMarket, ListPrices
from cavvy.providers.ibm.places import NO_SUBNET, IbmPlaces, check_default_image
from cavvy.providers.required_images import require_images
from cavvy.providers.vm.account import keep_ours
from cavvy.providers.vm.cloud import (
    CloudFault,
    CloudMachine,
    CloudTraits,
    MachineRequest,
    MachineState,
    SshTarget,
)
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.regions import ask_regions, list_regions
from cavvy.providers.vm.rest import Json

# The enumerations of `Instance.status` and `InstanceStatusReason.code` in the Python package
# ibm-vpc 0.36.0. An instance that is "stopping" counts as running: it may not have its reason yet,
# and a deletion would hide that it was preempted.
_STATES = {
    "pending": MachineState.STARTING,
    "starting": MachineState.STARTING,
    "stopped": MachineState.STOPPED,
    "failed": MachineState.STOPPED,
    "deleting": MachineState.ENDED,
}
_NO_CAPACITY = frozenset({"cannot_start_capacity", "cannot_start_placement_group"})
_PREEMPTED = "stopped_by_preemption"
_QUOTA = "over_quota"
# https://cloud.ibm.com/docs/vpc-on-classic?topic=vpc-on-classic-rias-error-messages: the name of
# the instance is in use, because an earlier request for it succeeded without a reply
_NAME_USED = "validation_unique_failed"
_NO_ADDRESS = "0.0.0.0"  # what the API reports until an address was chosen
_DISK_TYPE = "general-purpose"
_LEAST_DISK_GIB = 100  # of IBM's own images: `VolumePrototypeInstanceByImageContext.capacity`


class IbmCloud:
    """Implements `Cloud`."""

    # Names of instances are unique in a region. IBM documents the size of user data as 64 K bytes
    # (https://cloud.ibm.com/docs/vpc?topic=vpc-user-data), and bills each second without a minimum
    # (https://cloud.ibm.com/docs/vpc?topic=vpc-suspend-billing). The listing lag is an assumption.
    traits = CloudTraits(
        name_limit=63,
        list_lag=timedelta(minutes=1),
        user_data_limit=64_000,
        quota_codes=frozenset({_QUOTA}),
    )

    def __init__(
        self,
        settings: Mapping[str, Scalar],
        list_prices: ListPrices,
        now: Callable[[], datetime],
    ) -> None:
        self._settings = settings
        self._api = IbmApi(settings, IamTokens(settings, now))
        self._market = IbmMarket(self._api, settings, list_prices, now)
        self._places = IbmPlaces(self._api, settings, now)
        self._silent: Sequence[str] = ()  # the regions that did not list their subnets

    def close(self) -> None:
        self._api.close()
        self._market.close()

    def identity(self) -> Sequence[tuple[str, str]]:
        """Facts for `cavvy check`. Call `offers` first, which finds profiles without a price."""
        unpriced = ", ".join(self._market.unpriced)
        facts = KEYS.facts(self._settings, self._market.unknown)
        return [*facts, *([("GPU profiles without a known price", unpriced)] if unpriced else [])]

    async def offers(self) -> Sequence[Offer]:
        offers = await self._market.offers()
        answered = sorted({each.region for each in offers})
        usable, self._silent = await ask_regions(answered, self._places.zones)
        if answered and not usable and not self.silent():
            regions = ", ".join(self._market.regions)
            raise Refused(
                f"[providers.ibm] subnet: no zone of {regions} has a fitting subnet; {NO_SUBNET}"
            )
        offers = [each for each in offers if each.zone in usable]
        return require_images(offers, self._settings.get("image"), check_default_image)

    def silent(self) -> Sequence[str]:
        """See `HasParts.silent`."""
        return [*self._market.silent, *self._silent]

    async def create(self, request: MachineRequest) -> Sequence[str]:
        region = request.offer.region
        body = await self._make_body(request)
        try:
            told = await self._api.send(region, "POST", "/instances", body)
        except CloudFault as fault:
            if fault.status in (400, 404):
                self._places.forget()
            raise _name(fault) from fault
        return [f"{region}/{told['id']}"]

    async def list(self) -> Sequence[CloudMachine]:
        """All instances whose names begin like Cavvy's, of the regions that answer."""

        async def read(region: str) -> Sequence[CloudMachine]:
            told = await self._api.list(region, "/instances", "instances")
            return [_read(region, each) for each in keep_ours(told)]

        return await list_regions(self._market.regions, read)

    async def get(self, machine: str) -> CloudMachine | None:
        region, _, instance = machine.partition("/")
        return _read(region, await self._api.get(region, f"/instances/{instance}"))

    async def delete(self, machine: str) -> None:
        """Delete the instance; its boot volume is deleted too."""
        region, _, instance = machine.partition("/")
        await self._api.send(region, "DELETE", f"/instances/{instance}")

    def is_full(self, fault: CloudFault) -> bool:
        return "capacity" in fault.code

    async def _make_body(self, request: MachineRequest) -> Mapping[str, Any]:
        offer, gang = request.offer, request.gang
        network: dict[str, Any] = {"subnet": {"id": (await self._places.subnet(offer))["id"]}}
        if groups := list_setting(self._settings, "security_groups"):
            network["security_groups"] = [{"id": each} for each in groups]
        size = max(_LEAST_DISK_GIB, int(gang.disk_gib or str(self._settings["disk_gib"])))
        body: dict[str, Any] = {
            "name": request.names[0],
            "zone": {"name": offer.zone},
            "profile": {"name": offer.instance_type},
            "image": {"id": await self._places.image(gang)},
            "primary_network_interface": network,
            "boot_volume_attachment": {
                "delete_volume_on_instance_delete": True,
                "volume": {"capacity": size, "profile": {"name": gang.disk_type or _DISK_TYPE}},
            },
            # the server restarts the job, not IBM
            "availability_policy": {"host_failure": "stop"},
            "user_data": request.user_data[0],
        }
        if group := self._settings.get("resource_group"):
            body["resource_group"] = {"id": group}
        if offer.purchase is Purchase.SPOT:
            body["availability"] = {"class": "spot"}
            # a deleted instance would not tell that it was preempted
            body["availability_policy"]["preemption"] = "stop"
            body["reservation_affinity"] = {"policy": "disabled"}
        return body


def _read(region: str, told: Json) -> CloudMachine:
    status = str(told["status"])
    reasons = {str(each["code"]): str(each["message"]) for each in told["status_reasons"]}
    state = _STATES.get(status, MachineState.RUNNING)  # others may be billed, too
    interface = told.get("primary_network_interface") or {}
    address = str((interface.get("primary_ip") or {}).get("address") or _NO_ADDRESS)
    known = address != _NO_ADDRESS
    quiet = state in (MachineState.STARTING, MachineState.RUNNING, MachineState.ENDED)
    details = ", ".join([status, *(f"{code}: {text}" for code, text in reasons.items())])
    return CloudMachine(
        id=f"{region}/{told['id']}",
        name=str(told["name"]),
        state=state,
        address=address if known else None,
        ssh=SshTarget(address=address) if known else None,
        created_at=datetime.fromisoformat(told["created_at"]),
        preempted=_PREEMPTED in reasons,
        no_capacity=bool(_NO_CAPACITY & reasons.keys()),
        reason="" if quiet else f"IBM reports: {details}",
    )


def _name(fault: CloudFault) -> CloudFault:
    """The fault of a creation, with a code and a status that tell what to do next."""
    if fault.code == _NAME_USED:
        return CloudFault(409, fault.code, fault.message)
    if "quota" in fault.code:
        return CloudFault(fault.status, _QUOTA, f"{fault.code}: {fault.message}")
    return fault
