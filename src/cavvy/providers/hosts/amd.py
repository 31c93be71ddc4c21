"""Finds AMD GPUs through the kernel's compute driver (`/sys/class/kfd`), which needs neither ROCm
nor a Python package.

File names and properties are defined by the kernel's amdkfd topology
(drivers/gpu/drm/amd/amdkfd/kfd_topology.c).
"""

from collections import Counter
from pathlib import Path

from cavvy.domain.values import replace
from cavvy.providers.hosts.devices import (
    DeviceReading,
    HostDevice,
    MachineSources,
    read_number,
    read_text,
)

# Products by PCI device id, from the PCI ID repository: used if the driver reports no product name.
_PRODUCTS = {
    0x738C: "Instinct MI100",
    0x7408: "Instinct MI250X",
    0x740C: "Instinct MI250X",
    0x740F: "Instinct MI210",
    0x74A0: "Instinct MI300A",
    0x74A1: "Instinct MI300X",
    0x74A5: "Instinct MI325X",
    0x75A0: "Instinct MI350X",
    0x75A3: "Instinct MI355X",
}
_LOCATION = (1 << 28) - 1
_LOCAL_MEMORY = {1, 2}  # heap types: visible and invisible frame buffer


def find_amd(sources: MachineSources) -> DeviceReading:
    """Return the GPUs in the order of the topology's nodes, which is the order used by
    ROCR_VISIBLE_DEVICES.
    """
    topology = sources.root / "sys/class/kfd/kfd/topology/nodes"
    try:
        nodes = sorted(
            (path for path in topology.iterdir() if path.name.isdigit()),
            key=lambda path: int(path.name),
        )
    except OSError:
        return DeviceReading()
    devices = [device for node in nodes if (device := _read(sources.root, node)) is not None]
    devices = [replace(device, index=index) for index, device in enumerate(devices)]
    parts = Counter(device.id for device in devices)
    if devices and not sources.usable(sources.root / "dev/kfd"):
        return DeviceReading(
            notes=[
                "AMD: this user may not open /dev/kfd (add the user to the group `render`); no "
                "GPU is "
                "offered"
            ]
        )
    return DeviceReading(
        devices=[device for device in devices if parts[device.id] == 1],
        notes=[
            f"AMD: {gpu} is divided into {count} partitions, which Cavvy does not offer: "
            "`sudo amd-smi set --compute-partition SPX` makes it one GPU again while it is idle"
            for gpu, count in parts.items()
            if count > 1
        ],
    )


def _read(root: Path, node: Path) -> HostDevice | None:
    words = (line.split() for line in read_text(node / "properties").splitlines())
    facts = {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdigit()}
    if not facts.get("simd_count"):  # the node is a CPU
        return None
    minor = facts.get("drm_render_minor", 0)
    given = read_text(root / f"sys/class/drm/renderD{minor}/device/product_name")
    product = (
        given or _PRODUCTS.get(facts.get("device_id", 0)) or read_text(node / "name") or "AMD GPU"
    )
    # The partitions of a GPU (modes DPX, QPX and CPX) are nodes with the same ID, and with other
    # numbers in the highest bits of the location.
    unique = facts.get("unique_id", 0)
    name = (
        f"GPU-{unique:016x}"
        if unique
        else f"amd-{facts.get('domain', 0):x}-{facts.get('location_id', 0) & _LOCATION:x}"
    )
    return HostDevice(id=name, index=0, vendor="amd", product=product, memory_mib=_memory_mib(node))


def _memory_mib(node: Path) -> int:
    total = 0
    for bank in sorted((node / "mem_banks").glob("*/properties")):
        facts = dict(line.split(maxsplit=1) for line in read_text(bank).splitlines() if " " in line)
        if int(facts.get("heap_type", "0")) in _LOCAL_MEMORY:
            total += int(facts.get("size_in_bytes", "0"))
    if not total:
        total = read_number(node / "vram_size") or 0
    return total >> 20
