"""Builds this machine's offers: one for each model and number of accelerators, and one without
accelerators.
"""

from collections.abc import Sequence

from cavvy.domain.allocations import Host
from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.hosts.fleet import machines
from cavvy.providers.hosts.machine import ThisMachine

PROVIDER = "local"


def list_offers(machine: ThisMachine, price: HourlyRate) -> Sequence[Offer]:
    """Return one offer for each accelerator model and number of accelerators. `price` is for one
    accelerator, or for all nodes of a gang without accelerators.
    """
    offers = [
        machines.make_offer(
            [machine],
            shape,
            price,
            provider=PROVIDER,
            region=machine.hostname,
            source="this machine",
        )
        for shape in machines.list_shapes(machine)
    ]
    return [replace(each, payers=1 if each.accelerator_count else 0) for each in offers]


def make_host(machine: ThisMachine) -> Host:
    """Return this machine as the host to which its offers belong."""
    return machines.make_host(f"{PROVIDER}/{machine.hostname}", machine)
