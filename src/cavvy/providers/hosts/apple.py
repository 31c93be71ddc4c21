"""Finds Apple's GPU, which is part of the chip and uses the machine's memory."""

from cavvy.providers.hosts.devices import DeviceReading, HostDevice, MachineSources


def find_apple(sources: MachineSources) -> DeviceReading:
    """Return one GPU if Apple made the chip, otherwise return no GPU."""
    if sources.system != "Darwin":
        return DeviceReading()
    try:
        chip = sources.sysctl("machdep.cpu.brand_string")
        memory_mib = int(sources.sysctl("hw.memsize")) >> 20
    except (OSError, ValueError) as error:
        return DeviceReading(
            notes=[f"Apple: sysctl does not answer, so no GPU is offered ({error})"]
        )
    if not chip.startswith("Apple"):
        return DeviceReading()
    return DeviceReading(
        devices=[
            HostDevice(id="apple-0", index=0, vendor="apple", product=chip, memory_mib=memory_mib)
        ]
    )
