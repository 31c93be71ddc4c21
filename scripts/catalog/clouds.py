"""Turns the price tables in the folder of facts into offers. Rows that a rule leaves out are
counted by reason.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal, InvalidOperation
from pathlib import Path
from statistics import median

from azure_sizes import find_size
from facts import DISK_GIB, OCI_REGIONS, PARTS, find_network_gbits, gcp_memory_gib
from gcp_devices import GCP_SOURCE, GPU_PRICES, N1_MACHINES, TPU_PRICES
from more_prices import list_tables

from cavvy.catalog.accelerators import find_accelerator, nominal_memory
from cavvy.catalog.tables import find_retired
from cavvy.catalog.tpu_slices import list_slices
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate, parse_rate
from cavvy.domain.values import replace
from cavvy.providers.gcp.instance import find_shape

COLLECTED = date(2026, 11, 20)  # the date of tables that state no date themselves
# numbers of vCPUs for which flexible shapes are listed, in addition to those in the tables
_FLEXIBLE_VCPUS = (2, 4, 16, 64)
_COUNTRIES = {"USA": "us", "CANADA": "ca", "FINLAND": "fi"}


@dataclass(slots=True)
class Reader:
    """Reads the folder of facts, and counts the rows that are left out, by reason."""

    folder: Path
    left_out: Counter[str] = field(default_factory=Counter)
    aws_listed: set[str] = field(default_factory=set)

    def offers(self) -> Iterator[Offer]:
        """All trusted rows as offers. If two tables have the same offer, the one from the better
        source comes first.
        """
        yield from self._aws()
        yield from self._gcp()
        yield from self._gcp_devices()
        yield from self._azure()
        yield from self._nebius_and_verda()
        yield from self._aws_spot_by_zone()
        yield from self._more()
        yield from self._small()
        yield from self._shadeform()

    def _rows(self, name: str) -> Iterator[dict[str, str]]:
        with (self.folder / name).open(newline="", encoding="utf-8") as file:
            yield from csv.DictReader(file)

    def _aws(self) -> Iterator[Offer]:
        source = "aws/karpenter-provider-aws, price list"
        for row in self._rows("aws_vms.csv"):
            if row["Region"].startswith("cn-"):
                self.left_out["aws: prices in yuan"] += 1
                continue
            yield from self._sell(_machine("aws", row), row["Price"], "", source, date(2026, 7, 20))

    def _gcp(self) -> Iterator[Offer]:
        source = "cloudpilot-ai/karpenter-provider-gcp, price list"
        for row in self._rows("gcp_vms.csv"):
            machine = _machine("gcp", row)
            memory = _mib(gcp_memory_gib(machine.type, machine.vcpus))
            machine = replace(machine, memory_mib=memory)
            yield from self._sell(machine, row["Price"], row["SpotPrice"], source, date(2026, 8, 6))

    def _gcp_devices(self) -> Iterator[Offer]:
        """The hosts of TPU slices, and the N1 machines with GPUs. The price of the latter is that
        of the machine plus that of its GPUs.
        """
        for each in list_slices():
            kind = f"{each.accelerator} pod" if each.hosts > 1 else each.accelerator
            prices = TPU_PRICES.get(kind) or TPU_PRICES[each.accelerator]
            for region, price in prices.items():
                name, chips = f"tpu-{each.type}", each.chips // each.hosts
                machine = Machine(
                    # a slice without a machine type of Compute Engine needs the Cloud TPU API
                    provider="gcp" if find_shape(name) else "tpu",
                    type=name,
                    region=region,
                    accelerator=each.accelerator,
                    count=chips,
                    vcpus=each.vcpus / each.hosts,
                    memory_mib=_mib(each.memory_gib / each.hosts),
                    hosts=each.hosts,
                )
                on_demand, spot = (str(chip * chips) if chip else "" for chip in price)
                yield from self._sell(machine, on_demand, spot, GCP_SOURCE, COLLECTED)
        hosts = {
            (row["InstanceType"], row["Region"]): row
            for row in self._rows("gcp_vms.csv")
            if row["InstanceType"].startswith("n1-")
        }
        for gpu, count, host in N1_MACHINES:
            for region, price in GPU_PRICES[gpu].items():
                row = hosts.get((host, region))
                if row is None:
                    self.left_out["gcp: GPU in a region without a price of its machine"] += 1
                    continue
                machine = Machine(
                    provider="gcp",
                    type=f"{host}-{gpu.lower()}x{count}",
                    region=region,
                    accelerator=gpu,
                    count=count,
                    vcpus=float(row["vCPUs"]),
                    accelerator_mib=16 * 1024,
                    memory_mib=_mib(gcp_memory_gib(host, float(row["vCPUs"]))),
                )
                on_demand, spot = (
                    str(Decimal(row[column]) + count * each)
                    for column, each in zip(("Price", "SpotPrice"), price, strict=True)
                )
                yield from self._sell(machine, on_demand, spot, GCP_SOURCE, COLLECTED)

    def _azure(self) -> Iterator[Offer]:
        source = "Azure/karpenter-provider-azure, price list"
        usual = self._usual_prices("azure_vms.csv")
        for row in self._rows("azure_vms.csv"):
            if float(row["Price"] or 0) < usual[row["InstanceType"]] / 4:
                self.left_out["azure: less than a quarter of the type's usual price, or none"] += 1
                continue
            machine = self._azure_machine(row["InstanceType"], row["Region"])
            if machine is not None:
                yield from self._sell(machine, row["Price"], "", source, date(2026, 6, 18))

    def _usual_prices(self, name: str) -> dict[str, float]:
        """The median price of each instance type over all regions."""
        prices: dict[str, list[float]] = {}
        for row in self._rows(name):
            prices.setdefault(row["InstanceType"], []).append(float(row["Price"] or 0))
        return {instance_type: median(found) for instance_type, found in prices.items()}

    def _azure_machine(self, instance_type: str, region: str) -> "Machine | None":
        size = find_size(instance_type)
        if size is None:
            self.left_out["azure: accelerators or size not known for certain"] += 1
            return None
        return Machine(
            provider="azure",
            type=instance_type,
            region=region,
            accelerator=size.accelerator or "",
            count=size.count,
            part=size.part,
            accelerator_mib=_mib(size.accelerator_gib) or None,
            vcpus=size.vcpus,
            memory_mib=_mib(size.memory_gib),
        )

    def _nebius_and_verda(self) -> Iterator[Offer]:
        for provider in ("nebius", "verda"):
            source = f"skypilot-org/skypilot-catalog, {provider}"
            for row in self._rows(f"{provider}_vms.csv"):
                yield from self._sell(
                    _machine(provider, row), row["Price"], row["SpotPrice"], source, COLLECTED
                )

    def _aws_spot_by_zone(self) -> Iterator[Offer]:
        """The spot prices by zone, and the on-demand prices of regions that the same rows
        contain."""
        shapes = {
            (row["instance_type"]): row
            for row in self._rows("small_clouds.csv")
            if row["provider"] == "aws"
        }
        for row in self._rows("aws_spot_by_zone.csv"):
            shape = shapes.get(row["instance_type"])
            if shape is None:
                self.left_out["aws: spot price of an instance type that no table describes"] += 1
                continue
            machine = replace(_small_machine(shape), region=row["region"])
            if self._is_withdrawn(machine):
                continue
            yield from self._sell(machine, row["on_demand_usd_hr"], "", row["source"], COLLECTED)
            zoned = replace(machine, zone=row["zone_id"])
            for offer in self._sell(
                zoned, row["on_demand_usd_hr"], row["spot_usd_hr"], row["source"], COLLECTED
            ):
                if offer.purchase is Purchase.SPOT:
                    yield offer

    def _small(self) -> Iterator[Offer]:
        zoned = {
            (row["instance_type"], row["region"]) for row in self._rows("aws_spot_by_zone.csv")
        }
        for row in self._rows("small_clouds.csv"):
            reason = _doubt(row)
            if row["instance_type"].startswith("tpu-"):
                reason = "gcp: price of one chip; the slices are listed instead"
            if reason:
                self.left_out[reason] += 1
                continue
            machine = (
                self._azure_machine(row["instance_type"], row["region"])
                if row["provider"] == "azure"
                else _small_machine(row)
            )
            if machine is None or self._is_withdrawn(machine):
                continue
            # The region's spot price is the lowest of its zones. It is left out if the zones' own
            # prices are known.
            known_by_zone = row["provider"] == "aws" and (machine.type, machine.region) in zoned
            spot = "" if known_by_zone else row["spot_usd_hr"]
            if spot and re.search(r"catalogs/v[1-7]/", row["source"]):
                self.left_out[
                    f"{row['provider']}: spot price of a catalog that is no longer refreshed"
                ] += 1
                spot = ""
            source, as_of = _source(row["source"])
            for each, share in _variants(machine):
                prices = _scale(row["on_demand_usd_hr"], share), _scale(spot, share)
                yield from self._sell(each, *prices, source, as_of)

    def _more(self) -> Iterator[Offer]:
        """The prices of `more_prices.py`, for machines that the tables or `_KNOWN` describe."""
        known = {
            (machine.provider, machine.type): machine
            for provider, table in (("aws", "aws_vms.csv"), ("gcp", "gcp_vms.csv"))
            for machine in (_machine(provider, row) for row in self._rows(table))
        }
        for table in list_tables():
            for name, place, column, price in table.prices():
                region, _, zone = place.partition("/")
                if table.provider == "azure":
                    machine = self._azure_machine(name, region)
                else:
                    machine = _KNOWN.get(name) or known.get((table.provider, name))
                if machine is None:
                    raise ValueError(f"{table.provider} {name}: no table describes this machine")
                if table.provider == "gcp":
                    memory = _mib(gcp_memory_gib(name, machine.vcpus))
                    machine = replace(machine, memory_mib=memory)
                machine = replace(machine, region=region, zone=zone or None)
                purchase, months = _PURCHASES.get(column, (Purchase.RESERVED, column))
                rate = parse_rate(Decimal(price))
                offer = machine.offer(purchase, rate, table.source, table.as_of)
                yield replace(offer, term_months=int(months))

    def _is_withdrawn(self, machine: "Machine") -> bool:
        """Whether another table offers the machine in us-east-1 although AWS's own list of all
        types there no longer contains it.
        """
        if (machine.provider, machine.region) != ("aws", "us-east-1"):
            return False
        if not self.aws_listed:
            rows = self._rows("aws_vms.csv")
            self.aws_listed.update(
                row["InstanceType"] for row in rows if row["Region"] == "us-east-1"
            )
        if machine.type in self.aws_listed:
            return False
        self.left_out["aws: in us-east-1, but no longer in its price list"] += 1
        return True

    def _shadeform(self) -> Iterator[Offer]:
        source = "shadeform marketplace, by skypilot-org/skypilot-catalog history"
        for row in self._rows("shadeform_vms_2025-10.csv"):
            machine = _machine("shadeform", row)
            # Shadeform's names contain SXM for the SXM card, so "H100" alone is the PCIe card.
            if machine.accelerator == "H100" and "sxm" not in machine.type.lower():
                machine = replace(machine, accelerator="H100-PCIe")
            yield from self._sell(
                machine, row["Price"], row["SpotPrice"], source, date(2025, 10, 1)
            )

    def _sell(
        self, machine: "Machine", on_demand: str, spot: str, source: str, as_of: date
    ) -> Iterator[Offer]:
        reason = _unsellable(machine)
        if reason:
            self.left_out[f"{machine.provider}: {reason}"] += 1
            return
        rate, spot_rate = _rate(on_demand), _rate(spot)
        if rate:
            yield machine.offer(Purchase.ON_DEMAND, rate, source, as_of)
        if spot_rate and rate and spot_rate >= rate:
            self.left_out[
                f"{machine.provider}: spot price no lower than on-demand, a placeholder"
            ] += 1
        elif spot_rate:
            yield machine.offer(Purchase.SPOT, spot_rate, source, as_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One instance type in one region, without a price."""

    provider: str
    type: str
    region: str
    zone: str | None = None
    accelerator: str = ""
    count: float = 0
    part: float = 1.0  # the fraction of one accelerator that the machine has
    accelerator_mib: int | None = None
    vcpus: float = 0
    memory_mib: int = 0
    hosts: int = 1  # how many such machines are rented together

    def offer(self, purchase: Purchase, rate: HourlyRate, source: str, as_of: date) -> Offer:
        known = find_accelerator(self.accelerator) if self.accelerator else None
        memory = 0
        if known:
            row = known.accelerator
            only = row.memory[0].mib if len(row.memory) == 1 else None
            memory = (self.part < 1 and self.accelerator_mib) or (
                known.memory_mib
                or only
                or nominal_memory(row, self.accelerator_mib)
                or row.memory[0].mib
            )
        gbits = find_network_gbits(self.provider, self.type, int(self.count), self.vcpus)
        return Offer(
            provider=self.provider,
            region=self.region,
            zone=self.zone,
            instance_type=self.type,
            accelerator=known.accelerator.name if known else None,
            accelerator_count=int(self.count) if known else 0,
            accelerator_memory_mib=memory,
            accelerator_part=self.part,
            vcpus=self.vcpus,
            memory_mib=self.memory_mib,
            disk_gib=DISK_GIB.get(self.provider, {}).get(self.type),
            network_mbps=round(gbits * 1000) if gbits else None,
            hosts=self.hosts,
            purchase=purchase,
            rate=rate,
            source=source,
            as_of=as_of,
        )


_PURCHASES = {"on-demand": (Purchase.ON_DEMAND, "0"), "spot": (Purchase.SPOT, "0")}
# Machines of `more_prices.py` that no table describes. Sources: AWS's page on Trn2; IBM's
# "Accelerated profile family" (github.com/ibm-cloud-docs/vpc).
_KNOWN = {
    each.type: each
    for each in (
        Machine(
            provider="aws",
            type="trn2.3xlarge",
            region="",
            accelerator="Trainium2",
            count=1,
            vcpus=12,
            memory_mib=128 * 1024,
        ),
        Machine(
            provider="aws",
            type="trn2.48xlarge",
            region="",
            accelerator="Trainium2",
            count=16,
            vcpus=192,
            memory_mib=2048 * 1024,
        ),
        Machine(
            provider="ibm",
            type="gx3d-160x1792x8h100",
            region="",
            accelerator="H100",
            count=8,
            vcpus=160,
            memory_mib=1792 * 1024,
        ),
    )
}

# The names of machines that always have an accelerator. A row that states none is incomplete.
_ACCELERATED = {
    "aws": r"(dl|f|g|inf|p|trn|vt)\d.*",
    "gcp": r"(a|ct|g|tpu-v)\d.*",
    "ibm": r"g.*",
    "nebius": r"gpu-.*",
    "oci": r".*GPU.*",
}


def _unsellable(machine: Machine) -> str:
    """The reason why a machine cannot be offered; "" if it can."""
    if not machine.accelerator and re.fullmatch(
        _ACCELERATED.get(machine.provider, "(?!)"), machine.type
    ):
        return "machine of an accelerated family, without its accelerator"
    if machine.accelerator and find_accelerator(machine.accelerator) is None:
        return "accelerator that the table does not know"
    if machine.accelerator and machine.count < 1:
        return "part of an accelerator, without its size"
    retired = find_retired(machine.type)
    if (
        retired
        and retired.provider == machine.provider
        and (retired.since is None or retired.since <= COLLECTED)
    ):
        return "retired instance type"
    return ""


def _machine(provider: str, row: dict[str, str]) -> Machine:
    size = re.search(r"SizeInMiB\W+(\d+)", row["GpuInfo"] or "")
    accelerator, count = row["AcceleratorName"], float(row["AcceleratorCount"] or 0)
    if provider == "aws":
        accelerator, count = _AWS_ACCELERATORS.get(row["InstanceType"], (accelerator, count))
    part = PARTS.get(provider, {}).get(row["InstanceType"], 1.0)
    return Machine(
        provider=provider,
        type=row["InstanceType"],
        region=row["Region"],
        accelerator=accelerator,
        count=1 if part < 1 else count,
        part=part,
        accelerator_mib=int(size[1]) if size else None,
        vcpus=float(row["vCPUs"] or 0),
        memory_mib=_mib(row["MemoryGiB"]),
    )


# AWS types for which the table states no accelerator. Source: AWS's pages on F2, VT1 and DL2q.
_AWS_ACCELERATORS = {
    "f2.6xlarge": ("VU47P", 1),
    "f2.12xlarge": ("VU47P", 2),
    "f2.48xlarge": ("VU47P", 8),
    "vt1.3xlarge": ("U30", 1),
    "vt1.6xlarge": ("U30", 2),
    "vt1.24xlarge": ("U30", 8),
    "dl2q.24xlarge": ("AI100", 8),
}


def _small_machine(row: dict[str, str]) -> Machine:
    provider, name = row["provider"], row["instance_type"]
    accelerator, count = row["accelerator"], float(row["accelerator_count"] or 0)
    if provider == "aws":
        accelerator, count = _AWS_ACCELERATORS.get(name, (accelerator, count))
    if accelerator == "H100" and ("pcie" in name.lower() or provider == "fluidstack"):
        accelerator = "H100-PCIe"
    size = row["accelerator_memory_gib"]
    return Machine(
        provider=provider,
        type=_slug(name) if re.search(r"[ ()]", name) else name,
        region=_region(provider, row["region"]),
        accelerator=accelerator,
        count=count,
        accelerator_mib=round(float(size) * 1024) if size else None,
        vcpus=float(row["vcpus"] or 0),
        memory_mib=_mib(row["memory_gib"]),
    )


def _variants(machine: Machine) -> Iterator[tuple[Machine, Decimal]]:
    """The machines that a row describes, each with the factor by which the row's price is
    multiplied. A row of OCI applies to all its regions. A flexible shape, such as
    VM.Standard.E5.Flex$_8_32, can be rented with any number of vCPUs and any memory, at fixed
    prices for each vCPU and GiB. So the price of other sizes with the same ratio of memory to vCPUs
    is proportional.
    """
    if machine.provider != "oci":
        yield machine, Decimal(1)
        return
    shape, flexible, _ = machine.type.partition("$")
    for region in OCI_REGIONS:
        placed = replace(machine, region=region)
        yield placed, Decimal(1)
        for vcpus in _FLEXIBLE_VCPUS if flexible else ():
            share = Decimal(vcpus) / Decimal(machine.vcpus)
            memory_mib = int(machine.memory_mib * share)
            name = f"{shape}$_{vcpus}_{memory_mib // 1024}"
            yield replace(placed, type=name, vcpus=vcpus, memory_mib=memory_mib), share


def _scale(price: str, share: Decimal) -> str:
    return str(Decimal(price) * share) if price else ""


def _doubt(row: dict[str, str]) -> str:
    """The reason why a row about a small cloud is not trusted; "" if it is."""
    provider, source = row["provider"], row["source"]
    if provider == "runpod" and "catalogs/v5/" in source:
        return "runpod: old catalog (v5)"
    if provider == "mithril":
        return "mithril: floor of an auction, not a price"
    if provider == "coreweave" and row["accelerator"] and not row["accelerator_count"]:
        return "coreweave: number of accelerators not stated"
    return ""


def _source(text: str) -> tuple[str, date]:
    """A row's source and its date: the date in the row, or else `COLLECTED`."""
    named = re.search(r"(\d{4})-(\d\d)-(\d\d)", text)
    if named:
        return text, date(*map(int, named.groups()))
    return text, COLLECTED


def _region(provider: str, text: str) -> str:
    """Turn a region in words into a name that a task file can contain. It starts with the country,
    as in us-texas.
    """
    if not text.strip(" ,/"):
        return "anywhere"
    if provider == "vast":
        place, country, _ = (part.strip() for part in text.rsplit(",", 2))
        return _slug(f"{country} {place}") if place else country.lower()
    if provider == "primeintellect":
        country, _, rest = text.lower().partition("/")
        return (
            _slug(rest)
            if rest == country or rest.startswith(f"{country}-")
            else _slug(f"{country} {rest}")
        )
    if provider == "fluidstack":
        words = text.split("_")
        return _slug(" ".join([_COUNTRIES[words[-1]], *words[:-1]]))
    if provider == "paperspace":
        return {"East Coast (NY2)": "us-ny2"}.get(text, _slug(text))
    return _slug(text)


def _slug(text: str) -> str:
    ascii_text = text.lower().replace("á", "a").replace("é", "e")
    return re.sub(r"[^a-z0-9.]+", "-", ascii_text).strip("-")


def _mib(gib: str | float) -> int:
    return round(float(gib or 0) * 1024)


def _rate(text: str) -> HourlyRate | None:
    try:
        rate = parse_rate(Decimal(text)) if text else None
    except InvalidOperation:
        return None
    return rate if rate and rate.micros_per_hour > 0 else None
