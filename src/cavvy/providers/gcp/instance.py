"""Builds the request for a virtual machine: image, disk, network interface and scheduling. Knows
the catalog's machines that are not plain machine types of Compute Engine: N1 machines with attached
GPUs, and TPU slices of one host.
"""

import re
from collections.abc import Mapping, Sequence

from cavvy.catalog.accelerators import Vendor, find_accelerator
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Scalar
from cavvy.domain.values import Struct
from cavvy.providers.base import Refused
from cavvy.providers.vm.cloud import MachineRequest
from cavvy.providers.vm.rest import Json

_IMAGES = "projects/{}/global/images/family/{}"
_PLAIN = _IMAGES.format("ubuntu-os-cloud", "ubuntu-2404-lts-{}")
# Deep Learning VM with driver 580, Docker and NVIDIA's container toolkit:
# https://cloud.google.com/deep-learning-vm/docs/images
_DEEP_LEARNING = _IMAGES.format(
    "deeplearning-platform-release", "common-cu129-ubuntu-2204-nvidia-580"
)
# Ubuntu with driver 580 for A4, A4X, G4 and A3 with 8 GPUs:
# https://cloud.google.com/compute/docs/images/os-details
_ACCELERATOR = _IMAGES.format(
    "ubuntu-os-accelerator-images", "ubuntu-accelerator-2404-{}-with-nvidia-580"
)
# Ubuntu with the runtime of TPUs, without Docker:
# https://cloud.google.com/tpu/docs/create-instance-compute
_TPU = _IMAGES.format("ubuntu-os-accelerator-images", "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e")
_NEWEST = ("a4-", "a4x-", "g4-", "a3-ultragpu-", "a3-megagpu-", "a3-edgegpu-", "a3-highgpu-8g")
# The images have NVIDIA's open kernel modules, which need a GPU of the Turing generation (2018) or
# newer: https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/
_OLDEST_GPU = 2018
# These machine series accept Hyperdisk only, and no Persistent Disk:
# https://cloud.google.com/compute/docs/disks/hyperdisks and, for TPUs,
# https://cloud.google.com/tpu/docs/setup-persistent-disk
_HYPERDISK = (
    *("a4-", "a4x-", "g4-", "a3-ultragpu-", "c4-", "c4a-", "c4d-", "n4-", "n4a-", "n4d-"),
    "ct6e-",
)
# These series need Google's virtual network interface:
# https://cloud.google.com/compute/docs/networking/using-gvnic
_GVNIC = (*_HYPERDISK, "a3-", "c3-", "c3d-", "ct5p-", "h3-", "z3-")
_N1 = re.compile(r"(n1-[a-z]+-\d+)-([a-z]+\d+)x(\d+)")
# https://cloud.google.com/compute/docs/gpus#gpu-models
_GPUS = {"t4": "nvidia-tesla-t4", "v100": "nvidia-tesla-v100"}
# Compute Engine has machine types for slices of v5p and v6e only. Slices of older TPUs, and slices
# of several hosts, need other APIs: https://cloud.google.com/compute/docs/tpus/tpu-machines
_TPUS = {
    "tpu-v5p-8": "ct5p-hightpu-4t",
    "tpu-v6e-1": "ct6e-standard-1t",
    "tpu-v6e-4": "ct6e-standard-4t",
    "tpu-v6e-8": "ct6e-standard-8t",
}


class MachineShape(Struct, frozen=True):
    """A machine type, and the GPUs to attach to it. `gpu` is Google's name of the GPU type, or ""
    if no GPU is attached.
    """

    machine_type: str
    gpu: str = ""
    gpus: int = 0


def make_instances(
    request: MachineRequest, settings: Mapping[str, Scalar], more: Sequence[Json] = ()
) -> Sequence[Json]:
    """Return the bodies of the `instances.insert` requests, one for each machine. `more` are the
    network interfaces besides the first one. Raises Refused if Google maintains no image for the
    GPU.
    """
    offer, gang = request.offer, request.gang
    prefix = f"zones/{offer.zone}"
    shape = find_shape(offer.instance_type) or MachineShape(offer.instance_type)
    image = gang.options.get("image") or settings.get("image") or find_default(offer)
    disk_type = gang.disk_type or find_disk_type(offer, settings)
    accounts = []
    if settings.get("service_account"):
        scopes = ["https://www.googleapis.com/auth/cloud-platform"]
        accounts = [{"email": settings["service_account"], "scopes": scopes}]
    shared = {
        "machineType": f"{prefix}/machineTypes/{shape.machine_type}",
        "labels": dict(request.tags),
        "disks": [
            {
                "boot": True,
                "autoDelete": True,
                "initializeParams": {
                    "sourceImage": str(image),
                    "diskType": f"{prefix}/diskTypes/{disk_type}",
                    "diskSizeGb": str(gang.disk_gib or settings["disk_gib"]),
                },
            }
        ],
        "networkInterfaces": [_make_interface(offer.region, shape, settings), *more],
        "scheduling": _make_scheduling(offer),
        **_make_affinity(request),
        "serviceAccounts": accounts,
    }
    if shape.gpu:
        gpu = f"{prefix}/acceleratorTypes/{shape.gpu}"
        shared["guestAccelerators"] = [{"acceleratorType": gpu, "acceleratorCount": shape.gpus}]
    return [
        {
            **shared,
            "name": name,
            "metadata": {"items": [{"key": "startup-script", "value": user_data}]},
        }
        for name, user_data in zip(request.names, request.user_data, strict=True)
    ]


def _make_interface(region: str, shape: MachineShape, settings: Mapping[str, Scalar]) -> Json:
    interface: dict[str, object] = {"network": f"global/networks/{settings['network']}"}
    if settings.get("subnetwork"):
        interface["subnetwork"] = f"regions/{region}/subnetworks/{settings['subnetwork']}"
    if settings["external_address"]:
        interface["accessConfigs"] = [{"type": "ONE_TO_ONE_NAT", "name": "External NAT"}]
    if shape.machine_type.startswith(_GVNIC):
        interface["nicType"] = "GVNIC"
    return interface


def _make_scheduling(offer: Offer) -> Json:
    """Return the scheduling options. Machines with accelerators cannot migrate. Automatic restarts
    are off, because the server restarts the job.
    """
    spot = offer.purchase is Purchase.SPOT
    fixed = spot or offer.accelerator is not None
    scheduling = {
        "provisioningModel": "SPOT" if spot else "STANDARD",
        "onHostMaintenance": "TERMINATE" if fixed else "MIGRATE",
        "automaticRestart": False,
    }
    return {**scheduling, "instanceTerminationAction": "DELETE"} if spot else scheduling


def _make_affinity(request: MachineRequest) -> Json:
    """Return the field that restricts the machines to the task's reservation. If the task names no
    reservation, Google may use any open reservation. Raises Refused if the machine cannot use
    reservations: https://cloud.google.com/compute/docs/instances/reservations-consume#limitations
    """
    offer, reservation = request.offer, str(request.gang.options.get("reservation") or "")
    if not reservation:
        return {}
    if offer.purchase is Purchase.SPOT:
        raise Refused(
            f"resources.options: gcp: reservation: the spot machine {offer.instance_type} cannot "
            "use the reservation "
            f"{reservation}; set `spot: never`"
        )
    affinity = {
        "consumeReservationType": "SPECIFIC_RESERVATION",
        "key": "compute.googleapis.com/reservation-name",
        "values": [reservation],
    }
    return {"reservationAffinity": affinity}


def find_disk_type(offer: Offer, settings: Mapping[str, Scalar]) -> str:
    """Return the default type of a machine's boot disk; a task can name another type."""
    if settings.get("disk_type"):
        return str(settings["disk_type"])
    shape = find_shape(offer.instance_type) or MachineShape(offer.instance_type)
    return "hyperdisk-balanced" if shape.machine_type.startswith(_HYPERDISK) else "pd-balanced"


def find_default(offer: Offer) -> str:
    """Return Google's image with drivers for the offer. Raises Refused if no such image exists."""
    arch = "arm64" if offer.architecture == "arm64" else "amd64"
    known = find_accelerator(offer.accelerator or "")
    if known is None:
        return _PLAIN.format(arch)
    chip = known.accelerator
    if chip.vendor is Vendor.GOOGLE:
        return _TPU
    if chip.vendor is Vendor.NVIDIA and (chip.year or _OLDEST_GPU) >= _OLDEST_GPU:
        newest = offer.instance_type.startswith(_NEWEST) or arch == "arm64"
        return _ACCELERATOR.format(arch) if newest else _DEEP_LEARNING
    raise Refused(
        f"image: Google maintains no machine image with a driver for {chip.name} "
        f"({offer.instance_type}); name an image in the setting `image`, or in `resources.options` "
        "as `{gcp: {image: projects/PROJECT/global/images/NAME}}`"
    )


def find_shape(name: str) -> MachineShape | None:
    """Return the shape for a catalog name such as n1-standard-8-t4x1 or tpu-v6e-8, which is not a
    Compute Engine machine type. Returns None for a Compute Engine machine type.
    """
    if name in _TPUS:
        return MachineShape(_TPUS[name])
    found = _N1.fullmatch(name)
    if found is None or found[2] not in _GPUS:
        return None
    return MachineShape(found[1], _GPUS[found[2]], int(found[3]))
