"""Builds the API's requests for virtual machines, and parses the API's descriptions of machines.
Nodes boot the image that the task or the settings name or, without one, Azure's own image with
drivers for the size.
"""

import base64
import re
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

from cavvy.catalog.accelerators import AcceleratorKind, Vendor, find_accelerator
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Scalar
from cavvy.domain.values import replace
from cavvy.providers.base import GangSpec, Refused
from cavvy.providers.vm.cloud import CloudMachine, MachineRequest, MachineState
from cavvy.providers.vm.rest import Json

MACHINES = "Microsoft.Compute/virtualMachines"
_USER = "cavvy"
_SPOT_MARK = "@spot"
_DELETE = {"deleteOption": "Delete"}  # makes Azure delete a part together with its machine
# The version of the network API that Azure uses to make a machine's interface and address.
_NETWORK_API = "2022-11-01"
_STATES = {"Creating": MachineState.STARTING, "Deleting": MachineState.ENDED}
_OFF = frozenset({"PowerState/stopped", "PowerState/deallocated", "PowerState/deallocating"})
_ON = frozenset({"PowerState/starting", "PowerState/running"})
# The start of the failure codes of machines whose system did not report that it has booted:
# https://learn.microsoft.com/azure/virtual-machines/states-billing
_NO_BOOT = "OSProvisioning"
_FAILED = re.compile(r"ProvisioningState/failed/(\w+)")
# https://learn.microsoft.com/azure/virtual-machines/azure-hpc-vm-images, and its releases at
# https://github.com/Azure/azhpc-images/releases
_NVIDIA = "microsoft-dsvm:ubuntu-hpc:2204:latest"
_AMD = "microsoft-dsvm:ubuntu-hpc:2204-rocm:latest"
# https://documentation.ubuntu.com/azure/azure-how-to/instances/find-ubuntu-images/
_PLAIN = {
    "x86_64": "Canonical:ubuntu-24_04-lts:server:latest",
    "arm64": "Canonical:ubuntu-24_04-lts:server-arm64:latest",
}
# Sizes with NVIDIA's vGPUs need the GRID driver, but the HPC image has the driver for whole GPUs:
# https://learn.microsoft.com/azure/virtual-machines/sizes/gpu-accelerated/nvadsa10v5-series
_VGPU = "Standard_NV"
_PARTS = ("publisher", "offer", "sku", "version")


def make_id(name: str, *, spot: bool) -> str:
    """Return the id of a machine, which consists of the machine's name and, for a spot machine, a
    mark. Azure does not list evicted machines; the id shows whether a missing machine was a spot
    machine, which Azure may have evicted.
    """
    return f"{name}{_SPOT_MARK}" if spot else name


def read_id(machine: str) -> tuple[str, bool]:
    """Return the name of a machine, and whether it is a spot machine."""
    return machine.removesuffix(_SPOT_MARK), machine.endswith(_SPOT_MARK)


def make_public_key() -> str:
    """Generate an SSH key pair, discard the private key, and return the public key. Azure requires
    a key for each machine even if no person logs in.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).public_key()
    encoding, form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return key.public_bytes(encoding, form).decode()


def make_machine(
    request: MachineRequest,
    settings: Mapping[str, Scalar],
    *,
    image: Mapping[str, str],
    key: str,
    subnet: str,
) -> dict[str, Any]:
    """Return the body of the request for a machine. Azure creates the disk, the interface and the
    address together with the machine, and deletes them with the machine.
    """
    offer, name = request.offer, request.names[0]
    login = {"path": f"/home/{_USER}/.ssh/authorized_keys", "keyData": key}
    properties: dict[str, Any] = {
        "hardwareProfile": {"vmSize": offer.instance_type},
        "storageProfile": {
            "imageReference": dict(image),
            "osDisk": _make_disk(request.gang, settings),
        },
        "osProfile": {
            "computerName": name,
            "adminUsername": _USER,
            "customData": base64.b64encode(request.user_data[0].encode()).decode(),
            "linuxConfiguration": {
                "disablePasswordAuthentication": True,
                "ssh": {"publicKeys": [login]},
            },
        },
        "networkProfile": {
            "networkApiVersion": _NETWORK_API,
            "networkInterfaceConfigurations": [_make_interface(request, settings, subnet)],
        },
    }
    if offer.purchase is Purchase.SPOT:
        properties |= {
            "priority": "Spot",
            "evictionPolicy": "Delete",
            # -1: the spot machine may cost up to the on-demand price
            "billingProfile": {"maxPrice": -1},
        }
    body = {"location": offer.region, "tags": dict(request.tags), "properties": properties}
    if identity := settings.get("identity"):
        body["identity"] = {"type": "UserAssigned", "userAssignedIdentities": {str(identity): {}}}
    return body


def _make_disk(gang: GangSpec, settings: Mapping[str, Scalar]) -> Mapping[str, Any]:
    return {
        "createOption": "FromImage",
        "diskSizeGB": max(gang.disk_gib or 0, int(settings["disk_gib"])),
        "managedDisk": {"storageAccountType": gang.disk_type or settings["disk_type"]},
        **_DELETE,
    }


def _make_interface(
    request: MachineRequest, settings: Mapping[str, Scalar], subnet: str
) -> Mapping[str, Any]:
    """Return the network interface of a machine. The tags of the interface and of its address
    identify the installation, because a failed creation of the machine may leave the interface and
    the address behind.
    """
    mark = {"name": request.names[0], "tags": dict(request.tags)}
    address: dict[str, Any] = {"primary": True, "subnet": {"id": subnet}}
    if settings["public_ip"]:
        address["publicIPAddressConfiguration"] = {
            **mark,
            "sku": {"name": "Standard"},
            "properties": {"publicIPAllocationMethod": "Static", **_DELETE},
        }
    return {
        **mark,
        "properties": {
            "primary": True,
            "ipConfigurations": [{"name": "nodes", "properties": address}],
            **_DELETE,
        },
    }


def read_machine(told: Json, power: MachineState | None) -> CloudMachine:
    """Parse a machine in the API's list. `power` is the machine's power state, or None if the power
    state is unknown. Azure itself deletes an evicted spot machine.
    """
    properties, name = told["properties"], str(told["name"])
    spot = properties.get("priority") == "Spot"
    machine = make_id(name, spot=spot)
    status = str(properties.get("provisioningState"))
    state = _STATES.get(status, power or MachineState.RUNNING)
    if state is MachineState.STARTING and power is MachineState.RUNNING:
        state = power  # Azure bills a machine that is on, although its creation is not complete
    ends = state is MachineState.ENDED and spot
    reason = "Azure reports: off" if state is MachineState.STOPPED else ""
    created = properties.get("timeCreated")
    return CloudMachine(
        id=machine,
        name=name,
        state=state,
        tags={str(key): str(value) for key, value in (told.get("tags") or {}).items()},
        created_at=datetime.fromisoformat(created) if created else None,
        preempted_or_deleted=ends,
        reason="the spot machine was evicted or deleted" if ends else reason,
    )


def read_failure(machine: CloudMachine, view: Json | None, full: Collection[str]) -> CloudMachine:
    """Return `machine` with the state and the reason that follow from the failure of the machine's
    last operation. `view` contains the cause of the failure; `full` is the set of error codes that
    mean missing capacity. If the machine runs and its system has booted, the machine counts as
    running although an operation failed. The failed operation may have been unimportant, such as
    the installation of an extension by a policy of the subscription.
    """
    codes = [str(each.get("code")) for each in _statuses(view)]
    causes = [found[1] for each in codes if (found := _FAILED.fullmatch(each))]
    no_capacity = any(each in full for each in causes)
    boots = not any(each.startswith(_NO_BOOT) for each in causes)
    if boots and not no_capacity and any(each in _ON for each in codes):
        return replace(machine, state=MachineState.RUNNING, reason="")
    reason = f"Azure could not start the machine: {', '.join(causes) or 'unknown cause'}"
    return replace(machine, state=MachineState.STOPPED, no_capacity=no_capacity, reason=reason)


def read_power(told: Json) -> MachineState | None:
    """Return the power state in the field `instanceView` of a machine's entry, or None if the entry
    contains no power state.
    """
    codes = {each.get("code") for each in _statuses(told)}
    if codes & _OFF:
        return MachineState.STOPPED
    return MachineState.RUNNING if codes & _ON else None


def _statuses(view: Json | None) -> list[Json]:
    properties = (view or {}).get("properties") or {}
    return list((properties.get("instanceView") or {}).get("statuses") or ())


def choose_image(offer: Offer, named: str) -> Mapping[str, str]:
    """Return the image reference for Azure's API, parsed from `named`. If `named` is "", return the
    reference to Azure's image for the offer. Raises Refused.
    """
    text = named or find_default(offer)
    if text.startswith("/"):
        return {"id": text}
    parts = text.split(":")
    if len(parts) != len(_PARTS) or not all(parts):
        raise Refused(f"image: {text!r} is neither publisher:offer:sku:version nor a resource id")
    return dict(zip(_PARTS, parts, strict=True))


def find_default(offer: Offer) -> str:
    """Return Azure's image with drivers for the offer. Raises Refused if no such image exists."""
    known = find_accelerator(offer.accelerator or "")
    if known is None:
        return _PLAIN[offer.architecture or "x86_64"]
    chip, vgpu = known.accelerator, offer.instance_type.startswith(_VGPU)
    if chip.kind is AcceleratorKind.GPU and offer.architecture != "arm64" and not vgpu:
        if chip.vendor is Vendor.NVIDIA:
            return _NVIDIA
        if chip.vendor is Vendor.AMD:
            return _AMD
    raise Refused(
        f"image: Azure has no image with a driver for {offer.accelerator} "
        f"({offer.instance_type}); name an image in the setting `image`, or in "
        "`resources.options` as `{azure: {image: publisher:offer:sku:version}}`"
    )
