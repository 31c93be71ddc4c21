"""Chooses the machine image that nodes boot: the image that the task or the settings name or,
without one, Azure's own image with drivers for the size.
"""

from collections.abc import Mapping

from cavvy.catalog.accelerators import AcceleratorKind, Vendor, find_accelerator
from cavvy.domain.offers import Offer
from cavvy.providers.base import Refused

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
