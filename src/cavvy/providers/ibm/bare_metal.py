"""Facts about bare metal servers for VPC, and the two calls that differ from the calls for
instances.

According to IBM, a server starts within 10 minutes
(https://cloud.ibm.com/docs/vpc?topic=vpc-about-bare-metal-servers, of 2025-06-09). IBM bills by the
hour from provision to cancellation, also while a server is powered off
(https://cloud.ibm.com/docs/vpc?topic=vpc-bare-metal-server-faq, of 2024-11-05;
https://www.ibm.com/sa-ar/products/bare-metal-servers/pricing, of 2025-12-18). IBM states no minimum
and does not say how it rounds a part of an hour. Cavvy assumes that the first hour is billed in
full, so that estimates are too high rather than too low.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from cavvy.domain.offers import Offer
from cavvy.domain.values import replace
from cavvy.providers.base import Refused
from cavvy.providers.ibm.api import IbmApi
from cavvy.providers.vm.cloud import CloudFault, MachineRequest
from cavvy.providers.vm.rest import Json

BOOT = timedelta(minutes=10)
MINIMUM_CHARGE = timedelta(hours=1)
PATH = "bare_metal_servers"

# virtual CPUs of a core (https://cloud.ibm.com/docs/vpc?topic=vpc-bare-metal-servers-profile)
_THREADS = 2
_OFF = ("stopped", "failed", "deleting")
_COMING = ("pending", "starting")
_NOT_YET = 409


def is_bare_metal(profile: str) -> bool:
    """Return whether a name belongs to a profile of bare metal servers: the names of these profiles
    contain the part "metal".
    """
    return "metal" in profile.split("-")


def to_instance_profile(told: Json) -> Json:
    """Convert the profile of a bare metal server to the form of an instance's profile. The
    disk size in the result is the size of the smallest disk, which is the boot disk. The
    profile of a bare metal server has no GPUs in IBM's Python package ibm-vpc 0.36.0.
    """
    disks = [_read_default(each["size"]) for each in told.get("disks") or []]
    return {
        "name": told["name"],
        "vcpu_count": {"value": _read_default(told["cpu_core_count"]) * _THREADS},
        "vcpu_architecture": told["cpu_architecture"],
        "memory": {"value": _read_default(told["memory"])},
        "bandwidth": {"value": _read_default(told.get("bandwidth"))},
        "disk_gib": min(filter(None, disks), default=0) * 10**9 // 2**30,
        "zones": told["zones"],
    }


def to_server(offer: Offer, profile: Json) -> Offer:
    """Return the offer of a bare metal server. `offer` was made from the server's profile as if the
    profile were that of an instance.
    """
    return replace(
        offer, disk_gib=profile["disk_gib"] or None, minimum_charge=MINIMUM_CHARGE, boot=BOOT
    )


def make_body(request: MachineRequest, image: str, network: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of the request that creates one server."""
    if request.gang.disk_type:
        raise Refused(
            f"disk type {request.gang.disk_type}: {request.offer.instance_type} is a bare metal "
            "server, whose disks are fixed; omit the type, or choose an instance"
        )
    return {
        "name": request.names[0],
        "zone": {"name": request.offer.zone},
        "profile": {"name": request.offer.instance_type},
        "primary_network_interface": network,
        "initialization": {"image": {"id": image}, "user_data": request.user_data[0]},
    }


async def delete_server(api: IbmApi, region: str, path: str) -> None:
    """Stop a server immediately, then delete the server, because IBM deletes only servers that are
    powered off. If the server is not powered off yet, raise a fault that makes the caller try
    again.
    """
    status = await _read_status(api, region, path)
    try:
        if status not in (*_OFF, *_COMING):
            await api.send(region, "POST", f"{path}/stop", {"type": "hard"})
            status = await _read_status(api, region, path)
            if status not in _OFF:
                text = "the server is being stopped, and will be deleted once it is off"
                raise CloudFault(_NOT_YET, status, text)
        await api.send(region, "DELETE", path)
    except CloudFault as fault:
        if fault.status == 400:  # IBM does not document how it refuses a request that must wait
            raise CloudFault(_NOT_YET, fault.code, f"{status}: {fault.message}") from fault
        raise


async def _read_status(api: IbmApi, region: str, path: str) -> str:
    """Return the status of a server, or "pending" if the API does not return the server yet. The
    result is also "pending" for a deleted server, because the API's replies for the two cases are
    the same; only a request to delete the server shows that it no longer exists.
    """
    try:
        return str((await api.get(region, path))["status"])
    except CloudFault as fault:
        if fault.status == 404:
            return "pending"
        raise


def _read_default(field: Json | None) -> int:
    """Return the value of a profile's field. If the field has several values, return the default
    value; if it has no value, return 0.
    """
    found = field or {}
    return int(found.get("value") or found.get("default") or 0)
