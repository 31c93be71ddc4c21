"""Finds offers whose price, memory or number of accelerators is far from all other offers of the
same accelerator, which usually means that a unit or a count was read wrongly.

The limits are wide, because real prices differ: in the shipped snapshot of November 2026, prices
per accelerator lie between 1/26 and 12.6 times the median of the other providers. A price per month
that is taken as a price per hour is 730 times as high.
"""

from collections.abc import Iterable, Sequence
from statistics import median

from cavvy.catalog.accelerators import find_accelerator
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.values import Struct, replace

# factors between a price per accelerator and the median of the other providers
_HIGHEST, _LOWEST = 16.0, 1 / 40
# Factors that are enough if the price is also so far beyond the extreme of the other providers.
_HIGH, _LOW, _BEYOND = 8.0, 1 / 8, 4.0
_FEW = 2.0  # the limits are so much wider if only one other provider sells the accelerator
# Memory sizes are sold as powers of two or of ten, and some providers subtract what is reserved.
_MEMORY_BAND = (0.8, 1.25)
# A machine that has one accelerator instead of eight has eight times the CPUs, memory and price for
# each accelerator. Machines with one accelerator and much memory exist, so all three must differ.
_MORE_CPUS, _MORE_PRICE = 2.0, 3.0


class _Sold(Struct, frozen=True, kw_only=True):
    """The offers of an accelerator by one provider, for each accelerator."""

    price: float  # the median, in micro-US-dollars per hour
    prices: tuple[float, float]  # the least and the most
    vcpus: tuple[float, float]  # the least and the most
    memory_mib: tuple[float, float]


class OfferJudge:
    """Judges offers by known offers, such as those of the catalog's snapshot."""

    def __init__(self, known: Iterable[Offer]) -> None:
        rented = [each for each in known if _is_rented(each)]
        self._counts: dict[tuple[str, str], set[int]] = {}
        by: dict[tuple[str, Purchase], dict[str, list[Offer]]] = {}
        for each in rented:
            kind = (each.provider, each.instance_type)
            self._counts.setdefault(kind, set()).add(each.accelerator_count)
            sold = by.setdefault((str(each.accelerator), each.purchase), {})
            sold.setdefault(each.provider, []).append(each)
        self._sold = {
            what: {provider: _summarize(offers) for provider, offers in sold.items()}
            for what, sold in by.items()
        }
        self._judged: dict[tuple[object, ...], str] = {}

    def doubt(self, offer: Offer) -> str:
        """Return why the offer is in doubt, as a sentence that says what to do, or ""."""
        if not _is_rented(offer):
            return ""
        count, part = offer.accelerator_count, offer.accelerator_part
        size = (offer.accelerator_memory_mib, offer.vcpus, offer.memory_mib)
        key = (offer.key, offer.rate, offer.accelerator, count, part, *size)
        if key not in self._judged:
            if len(self._judged) > 100_000:  # prices change; old ones are not asked for again
                self._judged.clear()
            wrong = self._judge(offer)
            self._judged[key] = wrong and (
                f"{offer.key}: {wrong}. Cavvy uses this offer only if the task names its machine "
                f"type (resources.instance). Compare it with {offer.provider}'s price page, and "
                "report a bug of the provider if the offer is wrong"
            )
        return self._judged[key]

    def _judge(self, offer: Offer) -> str:
        name, counts = offer.accelerator, self._counts.get((offer.provider, offer.instance_type))
        if counts and offer.accelerator_count not in counts:
            known = " or ".join(map(str, sorted(counts)))
            return (
                f"the offer has {offer.accelerator_count} {name}, but the catalog lists this "
                f"machine type with {known}"
            )
        if wrong := _judge_memory(offer):
            return wrong
        others = self._others(offer)
        if not others:
            return ""
        usual, price = median(each.price for each in others), _price(offer)
        if usual <= 0:
            return ""
        if counts is None and (wrong := _judge_count(offer, others, price / usual)):
            return wrong
        # on demand, some providers sell cheaper than others do on spot
        dear = replace(offer, purchase=Purchase.ON_DEMAND)
        least = min(each.prices[0] for each in [*others, *self._others(dear)])
        if not _is_far(price, usual, least, others):
            return ""
        return (
            f"the price is {_usd(price)} an hour for one {name}, but the median of "
            f"{len(others)} other provider{'s' if len(others) > 1 else ''} is {_usd(usual)}"
        )

    def _others(self, offer: Offer) -> Sequence[_Sold]:
        """Return what other providers sell of the accelerator: under the offer's purchase option
        or, if none does, on demand."""
        name = str(offer.accelerator)
        for purchase in (offer.purchase, Purchase.ON_DEMAND):
            sold = self._sold.get((name, purchase), {})
            if others := [each for provider, each in sold.items() if provider != offer.provider]:
                return others
        return ()


def _is_far(price: float, usual: float, least: float, others: Sequence[_Sold]) -> bool:
    """Return whether a price is far from the prices of the other providers, whose median is
    `usual` and whose lowest is `least`."""
    wide = _FEW if len(others) == 1 else 1.0
    most = max(each.prices[1] for each in others) * _BEYOND * wide
    factor = price / usual
    low = factor < _LOWEST / wide or (factor < _LOW / wide and price < least / (_BEYOND * wide))
    return low or factor > _HIGHEST * wide or (factor > _HIGH * wide and price > most)


def _is_rented(offer: Offer) -> bool:
    """Return whether the offer has a price that can be compared. Own machines and clusters have
    prices that users chose."""
    count = offer.accelerator_count * offer.accelerator_part
    return bool(offer.accelerator) and count > 0 and not offer.owned and not offer.shared


def _judge_memory(offer: Offer) -> str:
    name, told = offer.accelerator, offer.accelerator_memory_mib
    found = find_accelerator(str(name))
    memory = found.accelerator.memory if found else ()
    sizes = [each.mib * offer.accelerator_part for each in memory]
    if not told or not sizes:
        return ""
    least, most = _MEMORY_BAND
    if any(least <= told / size <= most for size in sizes):
        return ""
    shown = " or ".join(f"{size / 1024:g} GiB" for size in sizes)
    return f"the offer's {name} has {told / 1024:g} GiB of memory, but {name} has {shown}"


def _judge_count(offer: Offer, others: Sequence[_Sold], dearer: float) -> str:
    """Compare the CPUs, the memory and the price for each accelerator with all other providers."""
    count = offer.accelerator_count * offer.accelerator_part
    vcpus, memory = offer.vcpus / count, offer.memory_mib / count
    most_vcpus = max(each.vcpus[1] for each in others)
    most_memory = max(each.memory_mib[1] for each in others)
    known = most_vcpus > 0 and most_memory > 0
    many = vcpus > _MORE_CPUS * most_vcpus and memory > _MORE_CPUS * most_memory
    if not known or not many or dearer < _MORE_PRICE:
        return ""
    return (
        f"the machine has {vcpus:g} CPUs and {memory / 1024:.0f} GiB of memory for each "
        f"{offer.accelerator}, but other machines have at most {most_vcpus:g} and "
        f"{most_memory / 1024:.0f} GiB: it may have more than {offer.accelerator_count} "
        f"{offer.accelerator}"
    )


def _summarize(offers: Sequence[Offer]) -> _Sold:
    whole = [each for each in offers if each.accelerator_part == 1] or offers
    vcpus = [each.vcpus / each.accelerator_count for each in whole]
    memory = [each.memory_mib / each.accelerator_count for each in whole]
    prices = [_price(each) for each in offers]
    return _Sold(
        price=median(prices),
        prices=(min(prices), max(prices)),
        vcpus=(min(vcpus), max(vcpus)),
        memory_mib=(min(memory), max(memory)),
    )


def _price(offer: Offer) -> float:
    """Return the price of one accelerator in micro-US-dollars per hour."""
    return offer.rate.micros_per_hour / (offer.accelerator_count * offer.accelerator_part)


def _usd(micros: float) -> str:
    return f"${micros / 1e6:.4g}"
