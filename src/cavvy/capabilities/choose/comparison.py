"""Compares the accelerators of several providers: the lowest price of each purchase option, and
what a TFLOP/s, a GiB of memory and a GB/s of memory bandwidth cost.

A price is that of one accelerator: the price of an offer divided by its accelerators. It includes
the CPUs, the memory and the disks of the offer. Rates are the peaks of the data sheet, which no
program reaches; `cavvy estimate` and `cavvy bench` predict and measure programs.
"""

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import date

from cavvy.catalog.accelerators import AcceleratorModel, find_accelerator
from cavvy.domain.facts import Fact
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.values import Struct

# the last day on which `catalog/accelerators.csv` was compared with the data sheets
DATA_SHEETS_READ = date(2026, 11, 21)
_TERA = 1e12
# the purchase options of a comparison, with the months of the commitment
OPTIONS = (
    (Purchase.ON_DEMAND, 0),
    (Purchase.SPOT, 0),
    (Purchase.RESERVED, 12),
    (Purchase.RESERVED, 36),
)


class ComparedAccelerator(Struct, frozen=True, kw_only=True):
    """An accelerator of one memory size at one provider.

    `cheapest` holds the offer with the lowest price of one accelerator, by purchase option and
    months of commitment. `types` are the instance types. `fastest` is the offer with the fastest
    known network, or None. `regions` are the regions with an offer on demand or on spot. `quota` is
    the highest number of nodes that a quota of the account allows, or None if no provider told one.
    """

    provider: str
    accelerator: str
    memory_mib: int
    cheapest: Mapping[tuple[Purchase, int], Offer]
    types: frozenset[str]
    fastest: Offer | None
    regions: Sequence[str]
    quota: int | None = None

    @property
    def model(self) -> AcceleratorModel | None:
        known = find_accelerator(self.accelerator)
        return known.accelerator if known else None

    def price(self, purchase: Purchase, months: int = 0) -> float | None:
        """Return the lowest price of one accelerator in US dollars per hour, or None."""
        offer = self.cheapest.get((purchase, months))
        return None if offer is None else price_each(offer)

    @property
    def lowest(self) -> tuple[Purchase, int] | None:
        """The option without a commitment with the lowest price; None if all have one."""
        free = [key for key in self.cheapest if not key[1]]
        return min(free, key=lambda key: (price_each(self.cheapest[key]), key), default=None)


# What the name of an instance type says besides its family: its size, as a rule. Other providers,
# such as marketplaces, have no families.
_SIZES = {
    "aws": r"\.[a-z0-9-]+$",
    "azure": r"^Standard_(?P<kept>[A-Z]+)\d+[a-z]*",
    "coreweave": r"-\d+-gpu$",
    "do": r"x\d+-\d+gb$",
    "gcp": r"-\d+g?(-[a-z0-9]+x\d+)?$",
    "ibm": r"-[0-9x]+[a-z][a-z0-9]*$",
    "lambda": r"(?<=gpu_)\d+x_",
    "nebius": r"_\d+gpu.*$",
    "oci": r"\.\d+$",
    "tpu": r"-\d+$",
}


def name_family(provider: str, instance_type: str) -> str:
    """Return the family of an instance type, such as p5 for p5.48xlarge, or "" at a provider that
    has no families."""
    sizes = _SIZES.get(provider)
    if sizes is None:
        return ""
    return re.sub(sizes, lambda found: found.groupdict().get("kept", ""), instance_type)


def price_each(offer: Offer) -> float:
    """Return the price of one accelerator in US dollars per hour."""
    return float(offer.rate.usd) / (offer.accelerator_count * offer.accelerator_part)


def compare_offers(offers: Iterable[Offer]) -> list[ComparedAccelerator]:
    """Return a row for each provider, accelerator and memory size, the lowest price on demand (or,
    without one, the lowest price) first. Offers without accelerators, own machines and offers
    without a price are left out.
    """
    groups: dict[tuple[str, str, int], list[Offer]] = {}
    for offer in offers:
        is_rented = offer.rate.micros_per_hour and not offer.owned
        if offer.accelerator and offer.accelerator_count and is_rented:
            key = offer.provider, offer.accelerator, offer.accelerator_memory_mib
            groups.setdefault(key, []).append(offer)
    rows = [_compare(*key, group) for key, group in groups.items()]
    return sorted(rows, key=_order)


def take_evenly(
    rows: Sequence[ComparedAccelerator], groups: Sequence[Container[str]], limit: int
) -> Sequence[ComparedAccelerator]:
    """Return at most `limit` of the rows, in their order: the first row of each group of
    accelerators, then the second of each, and so on. Without groups, return the first rows."""
    turns: list[tuple[int, int]] = []
    counts = [0] * (len(groups) + 1)
    for index, row in enumerate(rows):
        group = next((at for at, each in enumerate(groups) if row.accelerator in each), -1)
        turns.append((counts[group], index))
        counts[group] += 1
    return [rows[index] for index in sorted(index for _, index in sorted(turns)[:limit])]


def _compare(
    provider: str, accelerator: str, memory_mib: int, offers: Sequence[Offer]
) -> ComparedAccelerator:
    cheapest: dict[tuple[Purchase, int], Offer] = {}
    for offer in sorted(offers, key=lambda each: (price_each(each), each.key)):
        cheapest.setdefault((offer.purchase, offer.term_months), offer)
    networked = [each for each in offers if each.network_mbps]
    quotas = [each.quota_nodes for each in offers if each.quota_nodes is not None]
    return ComparedAccelerator(
        provider=provider,
        accelerator=accelerator,
        memory_mib=memory_mib,
        cheapest=cheapest,
        types=frozenset(each.instance_type for each in offers),
        fastest=max(networked, key=lambda each: (each.network_mbps or 0, each.key), default=None),
        regions=sorted({each.region for each in offers if not each.term_months}),
        quota=max(quotas, default=None),
    )


def _order(row: ComparedAccelerator) -> tuple[float, str, str, int]:
    prices = [price_each(offer) for offer in row.cheapest.values()]
    usual = row.price(Purchase.ON_DEMAND)
    return (
        min(prices) if usual is None else usual,
        row.accelerator,
        row.provider,
        row.memory_mib,
    )


def list_facts(row: ComparedAccelerator) -> list[Fact]:
    """Return all figures of a row. The names of the figures are the names of the columns of
    `cavvy compare -o json`.
    """
    facts = [
        Fact(
            name=name_price(*key),
            value=round(price_each(offer), 6),
            unit="USD per accelerator and hour",
            source=f"{offer.source}: {offer.key}",
            as_of=offer.as_of,
            formula=_divided(offer),
        )
        for key, offer in sorted(row.cheapest.items())
    ]
    facts.append(_fact(row, "memory_gib", row.memory_mib / 1024, "GiB"))
    if row.fastest is not None:
        facts.append(
            Fact(
                name="network_gbps",
                value=(row.fastest.network_mbps or 0) / 1000,
                unit="Gbit/s per node",
                source=f"{row.fastest.source}: {row.fastest.key}; tables of the catalog",
                as_of=row.fastest.as_of,
            )
        )
    newest = max((each.as_of for each in row.cheapest.values() if each.as_of), default=None)
    counts = {"regions": float(len(row.regions)), "quota_nodes": row.quota}
    facts += [
        Fact(
            name=name,
            value=count,
            unit=name,
            source="the account" if name == "quota_nodes" else f"the offers of {row.provider}",
            as_of=newest,
            formula="" if name == "quota_nodes" else "places with an offer on demand or on spot",
        )
        for name, count in counts.items()
        if count is not None
    ]
    return facts + _list_model_facts(row)


def name_price(purchase: Purchase, months: int) -> str:
    """Return the name of a price, such as on_demand_usd_hr or reserved_12m_usd_hr."""
    term = f"_{months}m" if months else ""
    return f"{purchase.replace('-', '_')}{term}_usd_hr"


def _divided(offer: Offer) -> str:
    devices = offer.accelerator_count * offer.accelerator_part
    return "" if devices == 1 else f"{offer.rate.usd} USD / {devices:g} accelerators"


def _list_model_facts(row: ComparedAccelerator) -> list[Fact]:
    """Return the values of the data sheet, and what they cost at the lowest price."""
    model = row.model
    if model is None:
        return []
    facts = []
    bandwidth = model.bandwidth(row.memory_mib)
    if bandwidth is not None:
        facts.append(_fact(row, "bandwidth_gb_s", bandwidth, "GB/s"))
    facts += [
        _fact(row, f"{precision}_tflops", rate / _TERA, "TFLOP/s, dense")
        for precision, rate in model.peak.items()
    ]
    if model.tdp_w is not None:
        facts.append(_fact(row, "tdp_w", model.tdp_w, "W"))
    if row.lowest is None:
        return facts
    offer = row.cheapest[row.lowest]
    price = price_each(offer)
    what = [("memory_gib", row.memory_mib / 1024), ("bandwidth_gb_s", bandwidth)]
    what += [(f"{precision}_tflops", rate / _TERA) for precision, rate in model.peak.items()]
    return facts + [
        Fact(
            name=f"usd_hr_per_{name}",
            value=round(price / value, 6),
            unit="USD per hour",
            source=f"{offer.source}: {offer.key}; {model.source}",
            as_of=offer.as_of,
            formula=f"{name_price(*row.lowest)} / {name}",
        )
        for name, value in what
        if value
    ]


def _fact(row: ComparedAccelerator, name: str, value: float, unit: str) -> Fact:
    source = row.model.source if row.model else "the provider's list"
    return Fact(name=name, value=value, unit=unit, source=source, as_of=DATA_SHEETS_READ)
