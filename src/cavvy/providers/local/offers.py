"""This machine's offers: one for each number of accelerators of a kind, none included."""

from collections.abc import Sequence

from cavvy.domain.allocations import Host
from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate
from cavvy.providers.hosts.machine import ThisMachine
from cavvy.providers.hosts.models import DeviceModel, count_models, instance_type, model_of

PROVIDER = "local"


def list_offers(machine: ThisMachine, price: HourlyRate) -> Sequence[Offer]:
    """Offers by model and count. `price` is of one accelerator held, or of the node where it holds
    none.

    CPUs and memory are the whole machine's: a job holds the part that it asks for.
    """
    offers = [_offer(machine, None, 0, price)]
    for model, total in count_models(machine).items():
        offers += [_offer(machine, model, count, price) for count in range(1, total + 1)]
    return offers


def make_host(machine: ThisMachine) -> Host:
    """The host that all these offers are on."""
    return Host(
        name=f"{PROVIDER}/{machine.hostname}",
        cpus=machine.cpus,
        memory_mib=machine.memory_mib,
        devices=tuple(device.id for device in machine.devices),
        kinds=tuple(instance_type(model_of(device)) for device in machine.devices),
    )


def _offer(machine: ThisMachine, model: DeviceModel | None, count: int, price: HourlyRate) -> Offer:
    return Offer(
        provider=PROVIDER,
        region=machine.hostname,
        instance_type=instance_type(model),
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
