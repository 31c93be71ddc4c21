"""Parses EC2's instance types into shapes (`InstanceShape`), and chooses the machine image that
nodes boot: the image that the task or the settings name or, without one, AWS's newest image for the
instance type.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from fnmatch import fnmatchcase

from cavvy.catalog.accelerators import KnownAccelerator, Vendor, find_accelerator, identify
from cavvy.domain.offers import NodeHardware
from cavvy.domain.tasks import Scalar
from cavvy.domain.values import Struct
from cavvy.providers.aws.account import AwsAccount, Json
from cavvy.providers.base import NotFound, Refused

GENERAL = (
    "c7i.*",
    "m7i.*",
    "r7i.*",
    "t3.*",
)  # families that are offered by default, in addition to all types with accelerators


class InstanceShape(NodeHardware, frozen=True, kw_only=True):
    """An instance type of EC2, with the properties that Cavvy uses."""

    type: str
    # the maximum number of Elastic Fabric Adapters, one per network card
    efa: int = 0
    # the first network card with an adapter; if it is card 1, card 0 has the node's address only
    efa_card: int = 0
    cluster: bool = False  # supports cluster placement groups
    spot: bool = True
    on_demand: bool = True


def list_unknown(told: Json) -> Sequence[str]:
    """Return the names of the type's GPUs, Neuron devices and FPGAs that are not in the catalog's
    table of accelerators. For a type with an unknown device, `read_shape` returns None.
    """
    names = {str(each.get("Name", "")) for each in _list_devices(told)}
    return sorted(name for name in names if name and identify(name) is None)


_OTHERS = ("InferenceAcceleratorInfo", "MediaAcceleratorInfo")


def read_shape(told: Json) -> InstanceShape | None:
    """Parse an entry of DescribeInstanceTypes. Returns None if the type's accelerators are not in
    the catalog, or if the type has only a fraction of an accelerator.
    """
    devices = _list_devices(told)
    found = _read_accelerators(told, devices)
    if found is None:
        return None
    known, count, memory = found
    network = told.get("NetworkInfo") or {}
    fabric = _list_fabric(network)
    classes = told.get("SupportedUsageClasses") or ("on-demand",)
    architectures = (told.get("ProcessorInfo") or {}).get("SupportedArchitectures") or ("x86_64",)
    return InstanceShape(
        type=str(told["InstanceType"]),
        vcpus=int(told["VCpuInfo"]["DefaultVCpus"]),
        memory_mib=int(told["MemoryInfo"]["SizeInMiB"]),
        accelerator=known.accelerator.name if known else None,
        accelerator_count=count,
        accelerator_memory_mib=(known.memory_mib or memory) if known else 0,
        network_mbps=_bandwidth(network),
        efa=len(fabric),
        efa_card=min(fabric, default=0),
        cluster="cluster" in (told.get("PlacementGroupInfo") or {}).get("SupportedStrategies", ()),
        architecture="arm64" if "arm64" in architectures else "x86_64",
        spot="spot" in classes,
        on_demand="on-demand" in classes,
    )


def _read_accelerators(
    told: Json, devices: Sequence[Json]
) -> tuple[KnownAccelerator | None, int, int] | None:
    """Return the accelerator, the number of accelerators, and the memory of each in MiB, or None if
    the type cannot be offered.
    """
    if any(each.get("GpuPartitionSize", 1) < 1 for each in devices):
        return None
    count = sum(int(each.get("Count", 0)) for each in devices)
    last = devices[-1] if devices else {}
    memory = int(last.get("MemoryInfo", {}).get("SizeInMiB", 0))
    known = identify(str(last.get("Name", "")), memory or None) if count else None
    if (known is None) if count else any(told.get(each) for each in _OTHERS):
        return None
    return known, count, memory


def _list_devices(told: Json) -> Sequence[Json]:
    """Return the type's accelerators: GPUs, then Neuron devices, then FPGAs."""
    fields = (("GpuInfo", "Gpus"), ("NeuronInfo", "NeuronDevices"), ("FpgaInfo", "Fpgas"))
    return [each for info, field in fields for each in (told.get(info) or {}).get(field, [])]


def _bandwidth(network: Json) -> int | None:
    """Return the total bandwidth of all network cards in Mbit/s, or None if EC2 does not report
    it."""
    cards = [card.get("BaselineBandwidthInGbps") for card in network.get("NetworkCards", [])]
    return round(sum(cards) * 1000) if cards and all(cards) else None


def _list_fabric(network: Json) -> Sequence[int]:
    """Return the indices of the network cards that support an Elastic Fabric Adapter. The list is
    cut off at the number of these adapters that the instance type supports.
    """
    if not network.get("EfaSupported"):
        return ()
    most = int((network.get("EfaInfo") or {}).get("MaximumEfaInterfaces", 0))
    cards = network.get("NetworkCards", [])
    return [
        int(card.get("NetworkCardIndex", place))
        for place, card in enumerate(cards)
        if "efa" in card.get("InterfaceTypes", ("efa",))  # older responses lack this field
    ][:most]


def split_patterns(text: str) -> Sequence[str]:
    """Split a comma-separated setting."""
    return [word.strip() for word in text.split(",") if word.strip()]


def is_sold(shape: InstanceShape, patterns: Sequence[str]) -> bool:
    """Return whether one of the patterns in the settings selects this type."""
    if patterns:
        return any(fnmatchcase(shape.type, pattern) for pattern in patterns)
    return shape.accelerator_count > 0 or any(
        fnmatchcase(shape.type, pattern) for pattern in GENERAL
    )


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
