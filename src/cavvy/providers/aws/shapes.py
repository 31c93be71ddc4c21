"""Parses EC2's instance types into shapes (`InstanceShape`)."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from cavvy.catalog.accelerators import KnownAccelerator, identify
from cavvy.domain.offers import NodeHardware
from cavvy.providers.aws.account import Json

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
