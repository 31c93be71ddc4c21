"""Apple's GPU, which is part of the chip and shares the machine's memory."""

from cavvy.providers.hosts.devices import Device, Found, Sources


def find_apple(sources: Sources) -> Found:
    """One GPU where the chip is Apple's own; its memory is the machine's."""
    if sources.system != "Darwin":
        return Found()
    try:
        chip = sources.sysctl("machdep.cpu.brand_string")
        memory_mib = int(sources.sysctl("hw.memsize")) >> 20
    except (OSError, ValueError) as error:
        return Found(notes=[f"Apple: sysctl does not answer, no GPU is offered ({error})"])
    if not chip.startswith("Apple"):
        return Found()
    return Found(
        devices=[Device(id="apple-0", index=0, vendor="apple", product=chip, memory_mib=memory_mib)]
    )
