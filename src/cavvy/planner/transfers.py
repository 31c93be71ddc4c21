"""The expected time and price of copying a task's inputs and outputs, for those of known size."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

from cavvy.catalog.residency import BUCKET_PROVIDERS
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Task, Transfer
from cavvy.domain.units import Money, format_duration, format_memory, format_usd

# The assumed speed of copies between a storage and a node, unless the node's network is slower. It
# is an assumption and not a measurement; a note of the plan states it.
TRANSFER_MBPS = 1000
_MIB, _GB = 1 << 20, 10**9


@dataclass(frozen=True, slots=True)
class TransferEstimate:
    """The copies of one offer. `time` is for one start of a gang, whose nodes copy at the same
    time, and `cost` is for all nodes and starts. `unpriced` is whether the price of some copy is
    unknown and not in `cost`.
    """

    input_mib: int
    output_mib: int
    time: timedelta
    cost: Money
    unpriced: bool

    def notes(self) -> tuple[str, ...]:
        parts = [
            f"{format_memory(mib)} of {what}"
            for mib, what in ((self.input_mib, "inputs"), (self.output_mib, "outputs"))
            if mib
        ]
        price = f"costs {format_usd(self.cost)}" if self.cost.micros else "costs nothing"
        if self.unpriced:
            price = f"has an unknown price (at least {format_usd(self.cost)} is included)"
        return (
            f"copying {' and '.join(parts)} takes {format_duration(self.time)} for each start "
            f"(assumes at most {TRANSFER_MBPS / 1000:g} Gbit/s) and {price}",
        )


def estimate_transfers(
    task: Task, offer: Offer, egress: Mapping[str, Money], starts: float
) -> TransferEstimate | None:
    """The copies of the task's inputs and outputs whose size is known; None if there are none.

    Each node copies each input at each of the expected `starts`; the outputs are copied once. A
    copy within one provider is free if the bucket's region is unknown or that of the offer. Other
    copies cost the egress price (`egress`, per GB, by "provider/region" or provider) of the place
    that the data leaves. Streamed inputs take no time of their own.
    """
    copies = list(_list_copies(task, starts))
    if not copies:
        return None
    prices = [(each, _price(each, offer, egress)) for each in copies]
    cost = sum((price or 0) * each.size_mib * each.times for each, price in prices)
    mbps = min(offer.network_mbps or TRANSFER_MBPS, TRANSFER_MBPS)
    waited = sum(each.size_mib for each in copies if not each.transfer.stream)
    return TransferEstimate(
        input_mib=sum(each.size_mib for each in copies if not each.sent),
        output_mib=sum(each.size_mib for each in copies if each.sent),
        time=timedelta(seconds=waited * _MIB * 8 / (mbps * 1e6)),
        cost=Money(round(cost * _MIB / _GB)),
        unpriced=any(price is None for _, price in prices),
    )


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy from or to a URL. `sent` is whether the data leaves the nodes; `times` is how often
    all nodes together copy it.
    """

    transfer: Transfer
    url: str
    size_mib: int
    times: float
    sent: bool


def _list_copies(task: Task, starts: float) -> Iterator[_Copy]:
    for each in task.inputs:
        if each.size_mib and "://" in each.source:
            yield _Copy(each, each.source, each.size_mib, task.nodes * starts, sent=False)
    for each in task.outputs:
        if each.size_mib and "://" in each.target:
            yield _Copy(each, each.target, each.size_mib, 1, sent=True)


def _price(copy: _Copy, offer: Offer, egress: Mapping[str, Money]) -> int | None:
    """The price of a copy in micro-dollars per GB; None if unknown."""
    home, region = BUCKET_PROVIDERS.get(urlsplit(copy.url).scheme), copy.transfer.region
    if home == offer.provider:
        return 0 if region in (None, offer.region) else None
    if offer.shared and copy.sent:
        return 0
    provider, region = (offer.provider, offer.region) if copy.sent else (home, region)
    if provider is None:
        return None
    found = egress.get(f"{provider}/{region}", egress.get(provider))
    return None if found is None else found.micros
