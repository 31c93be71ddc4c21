"""This machine's offers: one for each number of accelerators of a kind, none included."""

from collections.abc import Sequence
from dataclasses import dataclass

from remuda.catalog.accelerators import identify
from remuda.domain.offers import Offer
from remuda.domain.places import Host
from remuda.domain.units import HourlyRate
from remuda.providers.local.hardware.devices import Device
from remuda.providers.local.hardware.machine import Machine

PROVIDER = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a device is called in the catalog; unknown ones keep the driver's words."""

    name: str
    memory_mib: int  # nominal, as the product is sold


def model_of(device: Device) -> Model:
    known = identify(device.product, device.memory_mib or None)
    if known is None:
        return Model(name=device.product.replace(" ", "-"), memory_mib=device.memory_mib)
    return Model(name=known.accelerator.name, memory_mib=known.memory_mib or device.memory_mib)


def list_offers(machine: Machine, price: HourlyRate) -> Sequence[Offer]:
    """Offers by model and count. `price` is of one accelerator held, or of the node where it holds none.

    CPUs and memory are the whole machine's: a job holds the part that it asks for.
    """
    groups: dict[Model, int] = {}
    for device in machine.devices:
        model = model_of(device)
        groups[model] = groups.get(model, 0) + 1
    offers = [_offer(machine, None, 0, price)]
    for model, total in groups.items():
        offers += [_offer(machine, model, count, price) for count in range(1, total + 1)]
    return offers


def make_host(machine: Machine) -> Host:
    """The host that all these offers are on."""
    return Host(
        name=f"{PROVIDER}/{machine.hostname}",
        cpus=machine.cpus,
        memory_mib=machine.memory_mib,
        devices=tuple(device.id for device in machine.devices),
        kinds=tuple(_instance_type(model_of(device)) for device in machine.devices),
    )


def _offer(machine: Machine, model: Model | None, count: int, price: HourlyRate) -> Offer:
    return Offer(
        provider=PROVIDER,
        region=machine.hostname,
        instance_type=_instance_type(model),
        accelerator=model.name if model else None,
        accelerator_count=count,
        accelerator_memory_mib=model.memory_mib if model else 0,
        vcpus=machine.cpus,
        memory_mib=machine.memory_mib,
        disk_gib=machine.disk_gib,
        rate=price.times(max(1, count)),
        shared=True,
        source="this machine",
    )


def _instance_type(model: Model | None) -> str:
    """Tells the models of one machine apart: "H100-80GB", or "cpu" where no accelerator is held."""
    return f"{model.name}-{model.memory_mib // 1024}GB" if model else "cpu"
