"""Chooses the machine image that nodes boot: the image that the task or the settings name or,
without one, AWS's newest image for the instance type.
"""

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta

from cavvy.catalog.accelerators import Vendor, find_accelerator
from cavvy.domain.tasks import Scalar
from cavvy.domain.values import Struct
from cavvy.providers.aws.account import AwsAccount
from cavvy.providers.aws.shapes import InstanceShape
from cavvy.providers.base import NotFound, Refused

# Public Systems Manager parameters, maintained by AWS:
# https://docs.aws.amazon.com/dlami/latest/devguide/find-dlami-id.html
_DEEP_LEARNING = (
    "/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
)
# This image has NVIDIA's open kernel modules, which need a GPU of Turing (2018) or newer:
# https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/
_OLDEST_GPU = 2018
# This image has the proprietary modules of driver R570. R570 supports P3 (V100), and G3 (M60)
# except g3.16xlarge, according to the release notes "Deep Learning Base Proprietary Nvidia Driver
# AMI". R580 is the last driver branch for these GPUs.
_PROPRIETARY = (
    "/aws/service/deeplearning/ami/{arch}/base-proprietary-nvidia-driver-amazon-linux-2"
    "/latest/ami-id"
)
_NEEDS_PROPRIETARY = ("V100", "M60")
_NOT_IN_PROPRIETARY = "g3.16xlarge"
# The Neuron image has no driver for Inf1:
# https://awsdocs-neuron.readthedocs-hosted.com/en/latest/dlami/
_NEURON = "/aws/service/neuron/dlami/base/ubuntu-24.04/latest/image_id"
_NO_NEURON = ("Inferentia",)
# F2 needs no driver: AWS's tools that load an FPGA image are built on any Linux
# (https://awsdocs-fpga-f2.readthedocs-hosted.com/latest/sdk/README.html). The FPGA Developer AMI,
# which has Vivado and Vitis, needs a subscription in the Marketplace.
_NO_DRIVER = ("VU47P",)
# https://docs.aws.amazon.com/linux/al2023/ug/ec2.html
_PLAIN = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-{arch}"

_RESOLVED_AGE = timedelta(minutes=10)


class MachineImage(Struct, frozen=True, kw_only=True):
    """A machine image: its id, and the device and minimum size of its root disk."""

    id: str
    root: str
    size_gib: int


class MachineImages:
    """Looks up images. Parameter values are cached for ten minutes; images are cached without a
    time limit."""

    def __init__(
        self, account: AwsAccount, settings: Mapping[str, Scalar], now: Callable[[], datetime]
    ) -> None:
        self._account, self._settings = account, settings
        self._now = now
        self._known: dict[tuple[str, str], MachineImage] = {}
        self._resolved: dict[tuple[str, str], tuple[datetime, str]] = {}

    async def choose(self, region: str, shape: InstanceShape, wanted: str = "") -> MachineImage:
        """Return the image `wanted` that the task names, else the image in the settings, else AWS's
        own image with drivers for the type. Raises Refused if the image does not exist, and
        TryAgain after a temporary error.
        """
        named = wanted or str(self._settings.get("image") or "")
        named = named or find_default(shape)
        if not named.startswith("ami-"):
            named = await self._resolve(
                region, named.removeprefix("resolve:ssm:").removeprefix("ssm:")
            )
        if (region, named) not in self._known:
            self._known[region, named] = await self._describe(region, named)
        return self._known[region, named]

    async def _resolve(self, region: str, parameter: str) -> str:
        at, known = self._resolved.get((region, parameter), (None, ""))
        if at is not None and self._now() - at < _RESOLVED_AGE:
            return known
        try:
            told = await self._account.ask(region, "get_parameter", service="ssm", Name=parameter)
        except NotFound as error:
            raise Refused(
                f"image: Systems Manager in {region} has no parameter {parameter}"
            ) from error
        except Refused as error:
            raise Refused(
                f"image: the Systems Manager parameter {parameter} cannot be read: {error}"
            ) from error
        value = str(told["Parameter"]["Value"])
        self._resolved[region, parameter] = (self._now(), value)
        return value

    async def _describe(self, region: str, named: str) -> MachineImage:
        try:
            told = await self._account.ask(region, "describe_images", ImageIds=[named])
        except NotFound as error:
            raise Refused(f"image: {error}") from error
        if not told.get("Images"):
            raise Refused(
                f"image: {named} does not exist in {region}, or this account may not use it"
            )
        image = told["Images"][0]
        root = str(image.get("RootDeviceName") or "/dev/xvda")
        sizes = [
            int(each.get("Ebs", {}).get("VolumeSize", 0))
            for each in image.get("BlockDeviceMappings", [])
            if each.get("DeviceName") == root
        ]
        return MachineImage(id=named, root=root, size_gib=max(sizes, default=0))


def find_default(shape: InstanceShape) -> str:
    """Return the name of the Systems Manager parameter that contains the id of AWS's newest image
    with drivers for the instance type. Raises Refused if AWS maintains no such image.
    """
    known = find_accelerator(shape.accelerator or "")
    if known is None or known.accelerator.name in _NO_DRIVER:
        return _PLAIN.format(arch=shape.architecture)
    chip = known.accelerator
    if chip.vendor is Vendor.NVIDIA and (chip.year or _OLDEST_GPU) >= _OLDEST_GPU:
        return _DEEP_LEARNING.format(arch=shape.architecture)
    if chip.name in _NEEDS_PROPRIETARY and shape.type != _NOT_IN_PROPRIETARY:
        return _PROPRIETARY.format(arch=shape.architecture)
    if chip.vendor is Vendor.AWS and chip.name not in _NO_NEURON:
        return _NEURON
    raise Refused(
        f"image: AWS maintains no machine image with a driver for {chip.name} ({shape.type}); "
        "name an image in the setting `image`, or in `resources.options` as `{aws: {image: AMI}}`"
    )
