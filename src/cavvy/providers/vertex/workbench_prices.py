"""Builds the offers of Workbench instances from the catalog's offers of Compute Engine.

Google bills a Workbench instance as a machine of Compute Engine, and adds a management fee for each
vCPU and each GPU. Google publishes the fees only on a web page, so the setting `fees` contains
them.
"""

import re
from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct, replace
from cavvy.providers.base import Refused
from cavvy.providers.formats.services.vertex import find_accelerator, is_custom_job_type
from cavvy.providers.vertex_workbench import PRICING

_FEE = re.compile(r"(?P<part>[A-Za-z0-9-]+)\s*=\s*(?P<usd>\d{1,3}(?:\.\d{1,9})?)")
_CPU = "vcpu"
_MICROS = 1_000_000
# accelerator types of the Notebooks API, version 2, that custom jobs have too
_GPUS = frozenset(
    {
        *("NVIDIA_TESLA_P4", "NVIDIA_TESLA_P100", "NVIDIA_TESLA_V100", "NVIDIA_TESLA_T4"),
        *("NVIDIA_TESLA_A100", "NVIDIA_A100_80GB", "NVIDIA_L4", "NVIDIA_H100_80GB"),
        *("NVIDIA_H100_MEGA_80GB", "NVIDIA_H200_141GB", "NVIDIA_B200"),
    }
)


class Fees(Struct, frozen=True, kw_only=True):
    """Management fees in US dollars an hour, keyed by the lower-case name of the component."""

    usd: Mapping[str, Decimal]

    def of(self, offer: Offer) -> int | None:
        """Return the fee of a machine in micro-dollars an hour, rounded half up, or None if the fee
        is unknown.
        """
        gpu = Decimal(0)
        if offer.accelerator is not None:
            known = self.usd.get(offer.accelerator.lower())
            if known is None:
                return None
            gpu = known * offer.accelerator_count
        whole = self.usd[_CPU] * Decimal(str(offer.vcpus)) + gpu
        return int((whole * _MICROS).to_integral_value(ROUND_HALF_UP))


def read_fees(text: str) -> Fees:
    """Parse the setting `fees`. Raises Refused."""
    found: dict[str, Decimal] = {}
    for each in filter(None, (part.strip() for part in text.split(","))):
        parts = _FEE.fullmatch(each)
        if parts is None:
            raise Refused(
                f"[providers.vertex-workbench] fees: {each!r} is not a fee such as `vCPU=0.01`"
            )
        found[parts["part"].lower()] = Decimal(parts["usd"])
    if _CPU not in found:
        raise Refused(
            "[providers.vertex-workbench] fees: the fee for a vCPU is not set; enter Google's "
            f"management fees from {PRICING}, such as `vCPU=0.01, T4=0.02`"
        )
    return Fees(usd=found)


def make_offers(known: Sequence[Offer], zones: Sequence[str], fees: Fees) -> Sequence[Offer]:
    """Return the offers in these zones, at prices that include the management fees. Machines with
    GPUs whose fee is unknown are omitted.
    """
    return [
        replace(
            each,
            provider="vertex-workbench",
            zone=zone,
            capacity=None,
            rate=HourlyRate(each.rate.micros_per_hour + fee),
            source=f"{each.source}, and the management fee of the setting `fees`",
        )
        for zone in zones
        for each in known
        if each.region == zone.rpartition("-")[0] and _is_sold(each)
        if (fee := fees.of(each)) is not None
    ]


def list_unpriced(known: Sequence[Offer], fees: Fees) -> Sequence[str]:
    """Return the GPUs whose fee is unknown."""
    without = [each for each in known if _is_sold(each) and fees.of(each) is None]
    return sorted({str(each.accelerator) for each in without})


def find_gpu(offer: Offer) -> str | None:
    """Return the name of the offer's accelerator type in the Notebooks API. Return None if the
    offer has no GPU, or if the API has no type for the offer's GPU.
    """
    if offer.accelerator is None:
        return None
    found = find_accelerator(offer.instance_type, offer.accelerator, offer.accelerator_memory_mib)
    return found if found in _GPUS else None


def _is_sold(offer: Offer) -> bool:
    """Return whether a Workbench instance can use the machine of this offer of Compute Engine."""
    whole = offer.purchase is Purchase.ON_DEMAND and offer.accelerator_part == 1
    if not whole or not is_custom_job_type(offer.instance_type):
        return False
    return offer.accelerator is None or find_gpu(offer) is not None
