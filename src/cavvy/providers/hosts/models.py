"""What a host's accelerators are called in offers: one kind for each model and memory size."""

from collections.abc import Mapping
from dataclasses import dataclass

from cavvy.catalog.accelerators import identify
from cavvy.providers.hosts.devices import HostDevice
from cavvy.providers.hosts.machine import ThisMachine

NO_DEVICE = "cpu"  # the instance type of an offer without accelerators


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """What a device is called in the catalog; unknown ones keep the driver's words."""

    name: str
    memory_mib: int  # nominal, as the product is sold


def model_of(device: HostDevice) -> DeviceModel:
    known = identify(device.product, device.memory_mib or None)
    if known is None:
        return DeviceModel(name=device.product.replace(" ", "-"), memory_mib=device.memory_mib)
    return DeviceModel(
        name=known.accelerator.name, memory_mib=known.memory_mib or device.memory_mib
    )


def count_models(machine: ThisMachine) -> Mapping[DeviceModel, int]:
    """How many accelerators of each model a machine has, in the order of its devices."""
    groups: dict[DeviceModel, int] = {}
    for device in machine.devices:
        model = model_of(device)
        groups[model] = groups.get(model, 0) + 1
    return groups


def instance_type(model: DeviceModel | None) -> str:
    """Tells the models of one machine apart: "H100-80GB", or "cpu" where no accelerator is held."""
    return f"{model.name}-{model.memory_mib // 1024}GB" if model else NO_DEVICE


def say_models(machine: ThisMachine) -> str:
    """The accelerators for people: "8 x H100"."""
    return (
        ", ".join(f"{count} x {model.name}" for model, count in count_models(machine).items())
        or "none"
    )
