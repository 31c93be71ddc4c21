"""Estimates the time and price of copying the task's inputs and outputs whose size is known."""

from collections.abc import Callable, Iterator, Mapping
from datetime import date, timedelta
from typing import TypeVar
from urllib.parse import urlsplit

from cavvy.catalog.residency import BUCKET_PROVIDERS, find_cloud
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec, Transfer
from cavvy.domain.units import HourlyRate, Money, format_duration, format_memory, format_usd
from cavvy.domain.values import Struct

# The assumed speed of copies between a storage and a node, unless the node's network is slower. The
# value was not measured; a note of the plan states this.
TRANSFER_MBPS = 1000
_MIB, _GB = 1 << 20, 10**9
_T = TypeVar("_T")


class TransferEstimate(Struct, frozen=True):
    """The sizes, times and cost of copying a task's inputs and outputs on one offer. `input_time`
    is for one start of a gang, whose nodes copy at the same time; `output_time` is for the outputs,
    which are copied once. `cost` is the cost of all copies that all nodes make at all starts.
    `unpriced` is true if the price of a copy is unknown and `cost` therefore does not include the
    price. If the region of a bucket is unknown, the bucket is assumed to be in the offer's region,
    where copies are free. `assumed_region` is this region, or "" if no region was assumed.
    """

    input_mib: int
    output_mib: int
    input_time: timedelta
    output_time: timedelta
    cost: Money
    unpriced: bool
    assumed_region: str = ""

    @property
    def time(self) -> timedelta:
        """The time of all copies if the gang starts once."""
        return self.input_time + self.output_time

    def time_of(self, starts: float) -> timedelta:
        """Return the time of all copies if the gang is expected to start `starts` times."""
        return self.input_time * starts + self.output_time

    def notes(self) -> tuple[str, ...]:
        parts = [
            f"{format_memory(mib)} of {what}"
            for mib, what in ((self.input_mib, "inputs"), (self.output_mib, "outputs"))
            if mib
        ]
        price = f"costs {format_usd(self.cost)}" if self.cost.micros else "costs nothing"
        if self.unpriced:
            price = f"has an unknown price (at least {format_usd(self.cost)} is included)"
        if self.assumed_region:
            price += f", if the buckets of unknown region are in {self.assumed_region}"
        times = [format_duration(self.input_time) + " for each start"] if self.input_mib else []
        times += [format_duration(self.output_time) + " at the end"] if self.output_mib else []
        return (
            f"copying {' and '.join(parts)} takes {' and '.join(times)} "
            f"(assumes at most {TRANSFER_MBPS / 1000:g} Gbit/s) and {price}",
        )


def estimate_transfers(
    task: TaskSpec, offer: Offer, egress: Mapping[str, Money], starts: float
) -> TransferEstimate | None:
    """Return the copies of the task's inputs and outputs whose size is known, or None if there are
    no such copies.

    Each node copies each input at each of the expected `starts`; the outputs are copied once. A
    copy within one cloud is free if the bucket is in the offer's region or the bucket's region is
    unknown. For copies that are not free, the egress price of the data's source applies; `egress`
    maps "provider/region" or the provider to the price per GB. The time to stream or mount
    inputs is not counted, because these inputs are read while the work runs.
    """
    copies = list(_list_copies(task, starts))
    if not copies:
        return None
    prices = [(each, _price(each, offer, egress)) for each in copies]
    cost = sum((price or 0) * each.size_mib * each.times for each, price in prices)
    mbps = min(offer.network_mbps or TRANSFER_MBPS, TRANSFER_MBPS)
    sent, received = (
        sum(
            each.size_mib
            for each in copies
            if each.sent is way and not each.transfer.stream and each.transfer.mount is None
        )
        for way in (True, False)
    )
    per_mib = timedelta(seconds=_MIB * 8 / (mbps * 1e6))
    assumed = any(
        _home(each) == find_cloud(offer.provider) and not each.transfer.region for each in copies
    )
    return TransferEstimate(
        input_mib=sum(each.size_mib for each in copies if not each.sent),
        output_mib=sum(each.size_mib for each in copies if each.sent),
        input_time=received * per_mib,
        output_time=sent * per_mib,
        cost=Money(round(cost * _MIB / _GB)),
        unpriced=any(price is None for _, price in prices),
        assumed_region=offer.region if assumed else "",
    )


def group_places(
    task: TaskSpec, egress: Mapping[str, Money], *, sends: bool
) -> Callable[[str, str], tuple[object, ...]] | None:
    """Return a function that maps a provider and a region to a key. In places with equal keys, all
    copies have equal prices. With `sends`, results of any size leave the place at the end. Returns
    None if the place does not matter.
    """
    copies = list(_list_copies(task, 1))
    if not copies and not sends:
        return None

    def key(provider: str, region: str) -> tuple[object, ...]:
        there = Offer(provider=provider, region=region, instance_type="", rate=HourlyRate())
        prices = [_price(each, there, egress) for each in copies]
        return (*prices, find_egress(there, egress) if sends else None)

    return key


def find_egress(offer: Offer, egress: Mapping[str, Money]) -> Money | None:
    """Return the price of one GB (10^9 bytes) of egress from the offer's location, or None if the
    price is unknown.
    """
    return Money(0) if offer.shared else _find(offer, egress)


def find_egress_date(offer: Offer, dates: Mapping[str, date]) -> date | None:
    """Return the date of the egress price for the offer's location, or None if no date is known.
    `dates` has the same keys as the table of prices that `find_egress` uses.
    """
    return _find(offer, dates)


def price_upload(url: str | None, offer: Offer, egress: Mapping[str, Money]) -> Money | None:
    """Return the price of uploading one GB from a node of the offer to a bucket, or to the server
    if the URL is None. Return None if the price is unknown. A bucket of the offer's cloud is
    assumed to be in the offer's region. The server is assumed to be outside the cloud.
    """
    home = BUCKET_PROVIDERS.get(urlsplit(url).scheme) if url else None
    if home == find_cloud(offer.provider):
        return Money(0)
    return find_egress(offer, egress)


def _find(offer: Offer, table: Mapping[str, _T]) -> _T | None:
    """Return the table's entry for the offer's region, or else for its cloud."""
    cloud = find_cloud(offer.provider)
    return table.get(f"{cloud}/{offer.region}", table.get(cloud))


class _Copy(Struct, frozen=True):
    """A copy from or to a URL. `sent` is true if the data leaves the nodes. `times` is the number
    of copies that all nodes together make.
    """

    transfer: Transfer
    url: str
    size_mib: int
    times: float
    sent: bool


def _list_copies(task: TaskSpec, starts: float) -> Iterator[_Copy]:
    for each in task.inputs:
        if each.size_mib and "://" in each.source:
            yield _Copy(each, each.source, each.size_mib, task.nodes * starts, sent=False)
    for each in task.outputs:
        if each.size_mib and "://" in each.target:
            yield _Copy(each, each.target, each.size_mib, 1, sent=True)


def _home(copy: _Copy) -> str | None:
    """Return the provider of the bucket, or None if the URL does not name a bucket."""
    return BUCKET_PROVIDERS.get(urlsplit(copy.url).scheme)


def _price(copy: _Copy, offer: Offer, egress: Mapping[str, Money]) -> int | None:
    """Return the price of a copy in micro-dollars per GB, or None if unknown."""
    home, region = _home(copy), copy.transfer.region
    cloud = find_cloud(offer.provider)
    if home == cloud:
        return 0 if region in (None, offer.region) else None
    if copy.sent:
        found = find_egress(offer, egress)
    else:
        found = None if home is None else egress.get(f"{home}/{region}", egress.get(home))
    return None if found is None else found.micros
