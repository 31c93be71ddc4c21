"""Reads the prices of Google's machines with GPUs from the Cloud Billing Catalog API: on demand,
spot, and with commitments of one and three years.

Google lists the prices of parts: one vCPU, one GiB of memory, one GPU, one GiB of local SSD. The
price of a machine is the sum of the prices of its parts. A commitment covers a fixed set of parts
for its whole term:
https://cloud.google.com/compute/docs/instances/committed-use-discounts-overview.

Also reads the prices of disks and external addresses, and the live prices of machines with GPUs,
for the offers of the provider. Google bills disks by GiB and month:
https://cloud.google.com/compute/disks-image-pricing. Google bills each external address by the
hour, at a different price for spot machines:
https://cloud.google.com/vpc/network-pricing#ipaddress.
Hyperdisk's IOPS and throughput above each disk's included amount are not part of the prices.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from decimal import Decimal, InvalidOperation
from urllib.parse import urlencode

from cavvy.domain.events import ChargeKind
from cavvy.domain.offers import ExtraPrice, Offer, Purchase
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import parse_rate, parse_usd
from cavvy.domain.values import Struct, field, replace
from cavvy.http_client import HttpClient
from cavvy.providers.base import Refused
from cavvy.providers.gcp.credentials import GoogleCredentials
from cavvy.providers.gcp.instance import find_disk_type, find_shape
from cavvy.providers.prices import (
    NeedsLogin,
    PageRefused,
    PriceError,
    PriceQuery,
    PriceSource,
    ProviderPrices,
    read_page,
)
from cavvy.providers.vm.cloud import CloudFault

_KEY = "GOOGLE_API_KEY"
_COMPUTE_ENGINE = "6F81-5844-456A"  # the id of Compute Engine in the list of services
_MOST_PAGES = 500  # the list has about ten pages; an endless one must not block the refresh
HOURS_PER_MONTH = 730  # https://cloud.google.com/compute/disks-image-pricing

# The way of paying -> purchase option and months
_USAGES = {
    "OnDemand": (Purchase.ON_DEMAND, 0),
    "Preemptible": (Purchase.SPOT, 0),
    "Commit1Yr": (Purchase.RESERVED, 12),
    "Commit3Yr": (Purchase.RESERVED, 36),
}
# Google's names of GPUs in its list -> (the catalog's name, memory in GiB)
_GPUS = {
    "Nvidia Tesla A100 80GB": ("A100", 80),
    "Nvidia Tesla A100": ("A100", 40),
    "Nvidia Tesla T4": ("T4", 16),
    "Nvidia Tesla V100": ("V100", 16),
    "Nvidia L4": ("L4", 24),
    "Nvidia H100 80GB": ("H100", 80),
    "RTX 6000 96GB": ("RTX-PRO-6000", 96),
}
_SERIES = ("A2", "A3", "G2", "G4", "N1 Predefined")
_PART = re.compile(
    rf"(?:Spot Preemptible )?(?P<series>{'|'.join(_SERIES)}) Instance (?P<part>Core|Ram) running in"
    r".*"
)
_COMMITTED_PART = re.compile(r"Commitment v1: (?:(?P<series>\w+) )?(?P<part>Cpu|Ram) in .*")
_GPU = re.compile(
    rf"(?:Commitment v1: )?(?P<gpu>{'|'.join(_GPUS)})(?: GPU)?(?: attached to Spot Preemptible "
    r"VMs)?(?: running)? in .*"
)
_SSD = re.compile(
    r"(?:SSD backed Local Storage|Commitment v1: Local SSD)(?: attached to Spot Preemptible VMs?)?"
    r"(?: (?:running )?in .*)?"
)
# GiB of local SSD that belong to each machine: https://cloud.google.com/compute/docs/
# accelerator-optimized-machines. Each GPU of A2 Ultra has one SSD, and each of A3 High two.
_SSD_GIB_OF_GPU = {"a2-ultragpu": 375, "a3-highgpu": 750}

Sku = Mapping[str, object]
_Part = tuple[str, str]  # such as ("A2", "core"), ("gpu", "A100 80") or ("ssd", "")
# prices of parts in US dollars per hour, by region and way of paying
Rates = dict[tuple[str, Purchase, int], dict[_Part, Decimal]]


class GcpPrices(Struct, frozen=True, kw_only=True):
    """Reads Google's price list page by page. Requests a page again after a temporary error."""

    provider: str = "gcp"
    title: str = "Google's Cloud Billing Catalog API, with $GOOGLE_API_KEY or your Google login"
    base: str = "https://cloudbilling.googleapis.com"
    timeout_s: float = 60
    tries: int = 5
    credentials: GoogleCredentials = field(default_factory=lambda: GoogleCredentials({}))

    def fetch(self, query: PriceQuery) -> ProviderPrices:
        rates: Rates = {}
        for sku in self.list_skus(query):
            add_rate(rates, sku)
        offers = [
            offer
            for machine in query.machines.values()
            for offer in price_machine(machine, rates, query.today)
        ]
        if not offers:
            raise PriceError(
                f"{self.base} answered, but with no price of a known machine; nothing was changed"
            )
        return ProviderPrices(offers=offers, complete=False)

    def list_skus(self, query: PriceQuery) -> Iterator[Sku]:
        token, seen = "", 0
        for page in range(1, _MOST_PAGES + 1):
            told = self._page(token, query)
            skus = told.get("skus") or []
            if not isinstance(skus, list):
                raise PriceError(
                    f"page {page} of {self.base} is not in the documented form; nothing was changed"
                )
            yield from skus
            seen += len(skus)
            query.progress(f"{self.title}: {seen:,} prices in {page} pages")
            token = str(told.get("nextPageToken") or "")
            if not token:
                return
        raise PriceError(
            f"the list of {self.base} has more than {_MOST_PAGES} pages; nothing was changed"
        )

    def _page(self, token: str, query: PriceQuery) -> Mapping[str, object]:
        """Return a page of the list. Raises PriceError."""
        asked = {"pageSize": "5000", "currencyCode": "USD"} | (
            {"pageToken": token} if token else {}
        )
        url = f"{self.base}/v1/services/{_COMPUTE_ENGINE}/skus?{urlencode(asked)}"
        client, headers = HttpClient(idle_s=self.timeout_s), self._make_headers()
        try:
            return read_page(
                client, url, query.pause, tries=self.tries, name=self.base, headers=headers
            )
        except PageRefused as error:
            if error.status not in (400, 401, 403):
                raise
            raise NeedsLogin(_explain_refusal(error.status)) from error

    def _make_headers(self) -> Mapping[str, str]:
        """Return the header with the credentials: an API key is not part of the URL, because URLs
        are often logged. Raises NeedsLogin if no credentials exist.
        """
        key = os.environ.get(_KEY)
        if key:
            return {"X-Goog-Api-Key": key}
        try:
            return {"Authorization": f"Bearer {self.credentials.token()}"}
        except Refused as error:
            raise NeedsLogin(f"{error}; or set ${_KEY} to an API key") from error
        except CloudFault as error:
            raise PriceError(f"{error}; nothing was changed") from error


def _explain_refusal(status: int) -> str:
    return (
        f"Google refused the request for prices (HTTP {status}); check ${_KEY}, or run `gcloud "
        "services enable cloudbilling.googleapis.com` in the project of your credentials"
    )


def add_rate(rates: Rates, sku: Sku) -> None:
    """Store the price of one part, in US dollars per hour. Other SKUs are ignored."""
    category, description = sku.get("category"), str(sku.get("description") or "")
    told = _USAGES.get(str(category.get("usageType"))) if isinstance(category, dict) else None
    if told == _USAGES["OnDemand"] and "Spot Preemptible" in description:
        told = _USAGES["Preemptible"]  # the category of local SSDs of spot machines is on demand
    part = _read_part(description, committed=bool(told and told[1]))
    if told is None or part is None:
        return
    price = read_price(sku)
    rate = price / HOURS_PER_MONTH if price and read_unit(sku).endswith(".mo") else price
    regions = sku.get("serviceRegions")
    for region in regions if rate and isinstance(regions, list) else ():
        rates.setdefault((str(region), *told), {})[part] = rate or Decimal(0)


def _read_part(description: str, *, committed: bool) -> _Part | None:
    """Return the machine part whose price the SKU states (GPU, SSD, core or memory), or None for
    licences and other services.
    """
    found = _GPU.fullmatch(description)
    if found:
        name, gib = _GPUS[found["gpu"]]
        return "gpu", f"{name} {gib}"
    if _SSD.fullmatch(description):
        return "ssd", ""
    found = (_COMMITTED_PART if committed else _PART).fullmatch(description)
    if found is None:
        return None
    series = (found["series"] or "N1").removesuffix(" Predefined")
    return series, "ram" if found["part"] == "Ram" else "core"


def read_price(sku: Sku) -> Decimal | None:
    """Return a SKU's newest price in US dollars per unit, or None if the SKU has no price. If the
    price has several tiers, return the price of the highest tier. Raises KeyError or TypeError if
    Google has changed the format of the list.
    """
    expression = sku["pricingInfo"][-1]["pricingExpression"]  # type: ignore[index] # JSON
    tiers = expression["tieredRates"]
    if not tiers:
        return None
    price = tiers[-1]["unitPrice"]
    try:
        dollars = Decimal(str(price.get("units") or 0)) + Decimal(price.get("nanos") or 0) / 10**9
    except InvalidOperation as error:
        raise TypeError(f"{price} is not a price") from error
    if not dollars.is_finite() or dollars < 0:
        raise TypeError(f"{price} is not a price")
    return dollars


def read_unit(sku: Sku) -> str:
    """Return the unit of a SKU's newest price, such as "h" or "GiBy.mo". Raises KeyError or
    TypeError."""
    expression = sku["pricingInfo"][-1]["pricingExpression"]  # type: ignore[index] # JSON
    return str(expression["usageUnit"])


def price_machine(machine: Offer, rates: Rates, today: date) -> Iterator[Offer]:
    """Yield the offers of one machine type in the regions where the list prices all parts of the
    machine.
    """
    parts = _list_parts(machine)
    for (region, purchase, months), known in rates.items():
        if not parts or any(part not in known for part in parts):
            continue
        dollars = sum((known[part] * count for part, count in parts.items()), Decimal(0))
        if dollars <= 0:
            continue
        term = f", commitment of {months // 12} years" if months > 12 else ", commitment of 1 year"
        yield replace(
            machine,
            region=region,
            zone=None,
            purchase=purchase,
            term_months=months,
            rate=parse_rate(dollars),
            capacity=None,
            source="Google's Cloud Billing Catalog API" + (term if months else ""),
            as_of=today,
        )


def _list_parts(machine: Offer) -> Mapping[_Part, Decimal]:
    """Return a map from each part of a machine with GPUs to its quantity. Return {} for machines
    without GPUs, and for machines whose parts Google's list does not name clearly (A3 Mega, A4).
    """
    name = machine.instance_type
    shape = find_shape(name)
    series = (shape.machine_type if shape else name).partition("-")[0].upper()
    gpu = f"{machine.accelerator} {machine.accelerator_memory_mib // 1024}"
    listed = {f"{gpu} {gib}" for gpu, gib in _GPUS.values()}
    if not machine.accelerator_count or gpu not in listed or "mega" in name.partition("gpu")[0]:
        return {}
    if series not in {each.partition(" ")[0] for each in _SERIES}:
        return {}
    parts: dict[_Part, Decimal] = {
        (series, "core"): Decimal(str(machine.vcpus)),
        (series, "ram"): Decimal(machine.memory_mib) / 1024,
        ("gpu", gpu): Decimal(machine.accelerator_count),
    }
    gib = _SSD_GIB_OF_GPU.get(name.rpartition("-")[0])
    if gib:
        parts["ssd", ""] = Decimal(gib * machine.accelerator_count)
    return parts


_LISTED_BY = "Google's Cloud Billing Catalog API"
_DISK = re.compile(
    r"(?P<name>Balanced PD|SSD backed PD|Storage PD|Hyperdisk Balanced) Capacity(?: in .*)?"
)
_DISKS = {
    "Balanced PD": "pd-balanced",
    "SSD backed PD": "pd-ssd",
    "Storage PD": "pd-standard",
    "Hyperdisk Balanced": "hyperdisk-balanced",
}
_ADDRESS = re.compile(
    r"External IP Charge on a (?P<kind>Standard|Spot Preemptible|Preemptible) VM(?: in .*)?"
)
# unit of a price -> how often it is billed for a GiB in an average month, or for an address in 1 h
_DISK_UNITS: Mapping[str, int] = {"GiBy.mo": 1, "GiBy.h": HOURS_PER_MONTH}
_ADDRESS_UNITS: Mapping[str, int] = {"h": 1}
_EVERYWHERE = "global"  # Google's name of the region of prices that are the same in all regions

# (region, way of paying, name of the type of disk or "")
_Key = tuple[str, ChargeKind, str]


class LivePrices(Struct):
    """Prices from Google's price list. `extras` contains the prices of disks and addresses by
    region. The price of each address is stored under the purchase option of the machine that uses
    the address.
    """

    today: date
    rates: dict[tuple[str, Purchase, int], dict[tuple[str, str], Decimal]] = field(
        default_factory=dict
    )
    extras: dict[_Key, ExtraPrice] = field(default_factory=dict)

    def price(self, offers: Iterable[Offer]) -> list[Offer]:
        """Return the offers with Google's live prices. Offers without a price in the list are
        unchanged.
        """
        found: dict[tuple[str, str, Purchase], Offer] = {}
        rows = list(offers)
        for machine in {each.instance_type: each for each in rows}.values():
            for offer in price_machine(machine, self.rates, self.today):
                if not offer.term_months:
                    found[offer.instance_type, offer.region, offer.purchase] = offer
        return [
            replace(each, rate=live.rate, source=live.source, as_of=live.as_of)
            if (live := found.get((each.instance_type, each.region, each.purchase)))
            else each
            for each in rows
        ]

    def list_extras(self, offer: Offer, settings: Mapping[str, Scalar]) -> tuple[ExtraPrice, ...]:
        """Return the items that Google bills in addition to the machine, with the usual amounts for
        a node.
        """
        usual = find_disk_type(offer, settings)
        found = []
        for name in _DISKS.values():
            price = self._find(offer.region, ChargeKind.DISK, name)
            if price is not None:
                gib = int(settings["disk_gib"]) if name == usual else 0
                found.append(replace(price, usual=gib))
        kind = Purchase.SPOT if offer.purchase is Purchase.SPOT else Purchase.ON_DEMAND
        address = self._find(offer.region, ChargeKind.ADDRESS, kind)
        if address is not None and settings["external_address"]:
            found.append(replace(address, name="", usual=1))
        return tuple(found)

    def _find(self, region: str, kind: ChargeKind, name: str) -> ExtraPrice | None:
        return self.extras.get((region, kind, name)) or self.extras.get((_EVERYWHERE, kind, name))


def read_live(skus: Iterable[Sku], today: date) -> LivePrices:
    """Read the prices of SKUs. Raises KeyError or TypeError if Google has changed the format of the
    list."""
    found = LivePrices(today)
    for sku in skus:
        add_rate(found.rates, sku)
        extra = _read_extra(sku)
        if extra is None:
            continue
        extra = replace(extra, source=_LISTED_BY, as_of=today)
        regions = sku.get("serviceRegions")
        for region in regions if isinstance(regions, list) else ():
            found.extras[str(region), extra.kind, extra.name] = extra
    return found


def _read_extra(sku: Sku) -> ExtraPrice | None:
    """Return the price of a disk or an address, or None if the SKU has a different purpose or an
    unknown unit.
    """
    description, category = str(sku.get("description") or ""), sku.get("category")
    usage = category.get("usageType") if isinstance(category, dict) else ""
    disk, address = _DISK.fullmatch(description), _ADDRESS.fullmatch(description)
    if usage not in ("OnDemand", "Preemptible") or not (disk or address):
        return None
    dollars = read_price(sku)
    times = (_DISK_UNITS if disk else _ADDRESS_UNITS).get(read_unit(sku))
    if not dollars or times is None:
        return None
    price = parse_usd(dollars * times)
    if disk:
        return ExtraPrice(kind=ChargeKind.DISK, name=_DISKS[disk["name"]], price=price)
    assert address is not None
    kind = Purchase.ON_DEMAND if address["kind"] == "Standard" else Purchase.SPOT
    return ExtraPrice(kind=ChargeKind.ADDRESS, name=str(kind), price=price)


SOURCE: PriceSource = GcpPrices()
