"""Names a host's accelerators in offers, by model and memory size."""

from collections.abc import Mapping
from fractions import Fraction

from cavvy.catalog.accelerators import (
    MIG,
    VGPU,
    identify,
    instance_memory_mib,
    name_instance,
    split_instance,
    virtual_profile,
)
from cavvy.catalog.mig import MigProfile
from cavvy.domain.values import Struct, replace
from cavvy.providers.hosts.devices import HostDevice
from cavvy.providers.hosts.machine import ThisMachine

SLICE = "slice"  # in place of the profile, in the kind of slices of GPUs
NO_DEVICE = "cpu"  # the instance type of offers without accelerators


class DeviceModel(Struct, frozen=True, kw_only=True):
    """A device's name in the catalog. Unknown devices keep the driver's name."""

    name: str
    memory_mib: int  # the nominal memory size
    part: Fraction = Fraction(1)  # of a MIG instance: its part of the GPU's memory
    virtual: str = ""  # of a virtual GPU: its profile, such as 10C


def model_of_instance(device: HostDevice, profile: MigProfile) -> DeviceModel:
    """Return the model of an instance that agents can make on this slice of a GPU."""
    return model_of(replace(device, profile=profile.name, profiles=()))


def model_of(device: HostDevice) -> DeviceModel:
    if device.profiles:
        known = identify(device.product)
        family = known.accelerator.family if known else device.product.replace(" ", "-")
        return DeviceModel(name=name_instance(family, SLICE), memory_mib=0)
    known = identify(device.product, device.memory_mib or None)
    if device.profile:
        family = known.accelerator.family if known else device.product.replace(" ", "-")
        memory_mib = instance_memory_mib(device.profile)
        whole = (known and known.memory_mib) or device.memory_mib
        part = min(Fraction(1), Fraction(memory_mib, whole)) if whole else Fraction(1)
        return DeviceModel(
            name=name_instance(family, device.profile), memory_mib=memory_mib, part=part
        )
    if known is None:
        return DeviceModel(name=device.product.replace(" ", "-"), memory_mib=device.memory_mib)
    return DeviceModel(
        name=known.accelerator.name,
        memory_mib=known.memory_mib or device.memory_mib,
        virtual=virtual_profile(device.product),
    )


def is_slice(model: DeviceModel) -> bool:
    """Return whether the devices of this model are slices, which no job gets as such."""
    return model.name.endswith(f"{MIG}{SLICE}")


def count_models(machine: ThisMachine) -> Mapping[DeviceModel, int]:
    """Return the number of accelerators of each model, in the order of the machine's devices."""
    groups: dict[DeviceModel, int] = {}
    for device in machine.devices:
        model = model_of(device)
        groups[model] = groups.get(model, 0) + 1
    return groups


def instance_type(model: DeviceModel | None) -> str:
    """Return the instance type for a model, such as "H100-80GB", or "cpu" if the model is None."""
    if model is None:
        return NO_DEVICE
    if split_instance(model.name):
        return model.name
    if model.virtual:
        return f"{model.name}{VGPU}{model.virtual}"
    return f"{model.name}-{model.memory_mib // 1024}GB"


def say_models(machine: ThisMachine) -> str:
    """Describe the machine's accelerators for users, such as "8 x H100"."""
    return (
        ", ".join(f"{count} x {model.name}" for model, count in count_models(machine).items())
        or "none"
    )
