"""Builds this machine's offers: one for each model and number of accelerators, and one without
accelerators.
"""

from collections.abc import Sequence

from cavvy.domain.allocations import Host
from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate
from cavvy.providers.hosts.fleet import machines
from cavvy.providers.hosts.machine import ThisMachine

PROVIDER = "local"


def list_offers(machine: ThisMachine, price: HourlyRate) -> Sequence[Offer]:
    """Return one offer for each accelerator model and number of accelerators. `price` is for one
    accelerator, or for a node without accelerators.
    """
    return [
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


def make_host(machine: ThisMachine) -> Host:
    """Return this machine as the host to which its offers belong."""
    return machines.make_host(f"{PROVIDER}/{machine.hostname}", machine)
