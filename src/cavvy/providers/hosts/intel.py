"""Finds Intel's discrete GPUs through the kernel's graphics drivers (`/sys/class/drm`). GPUs that
are integrated in a CPU are omitted.
"""

from pathlib import Path

from cavvy.providers.hosts.devices import DeviceReading, HostDevice, MachineSources, read_number

_INTEL = 0x8086
# Products by PCI device id, from the PCI ID repository.
_PRODUCTS = {
    0x0BD5: "Data Center GPU Max 1550",
    0x0BDA: "Data Center GPU Max 1100",
    0x56C0: "Data Center GPU Flex 170",
    0x56C1: "Data Center GPU Flex 140",
    0x56A0: "Arc A770",
    0x56A1: "Arc A750",
    0xE20B: "Arc B580",
}
# The files in which drivers report the size of a card's own memory: one per tile for the driver xe,
# and at most one for i915.
_MEMORY_FILES = ("device/tile*/physical_vram_size_bytes", "lmem_total_bytes")


def find_intel(sources: MachineSources) -> DeviceReading:
    """Return the cards that have their own memory or are a known discrete product, in numerical
    order."""
    drm = sources.root / "sys/class/drm"
    try:
        cards = [
            path
            for path in drm.iterdir()
            if path.name.startswith("card") and path.name[4:].isdigit()
        ]
    except OSError:
        return DeviceReading()
    devices: list[HostDevice] = []
    for card in sorted(cards, key=lambda path: int(path.name[4:])):
        number = read_number(card / "device/device")
        memory = _memory_mib(card)
        if read_number(card / "device/vendor") != _INTEL or (
            number not in _PRODUCTS and not memory
        ):
            continue
        product = _PRODUCTS.get(number or 0, f"Intel GPU {number or 0:#06x}")
        name = f"intel-{(card / 'device').resolve().name}"  # the PCI address
        devices.append(
            HostDevice(
                id=name, index=len(devices), vendor="intel", product=product, memory_mib=memory
            )
        )
    return DeviceReading(devices=devices)


def _memory_mib(card: Path) -> int:
    return (
        sum(read_number(path) or 0 for pattern in _MEMORY_FILES for path in card.glob(pattern))
        >> 20
    )
