"""Builds offers from the machine types that Compute Engine lists for each zone. The price of a type
is Google's live price if Google's price list contains it, otherwise the catalog's price.

Google has no API that returns the price of a machine type. A machine type has the same price in all
zones of a region.

Reads the project's Compute Engine quotas and their use, and limits offers to the unused quota.

https://cloud.google.com/compute/resource-usage
"""

import asyncio
import fnmatch
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.domain.offers import NEW_LIMIT, Offer, Purchase, Quota, limit_offer
from cavvy.domain.values import replace
from cavvy.providers.base import ProviderContext, Refused
from cavvy.providers.gcp.api import GcpApi, last_part
from cavvy.providers.gcp.instance import MachineShape, find_shape
from cavvy.providers.gcp.price_list import LivePrices
from cavvy.providers.prices import PriceError
from cavvy.providers.vm.cloud import UNREADABLE, CloudFault
from cavvy.providers.vm.rest import Json

ReadLive = Callable[[], LivePrices]
# the errors that a list of prices in another form raises
# (region, machine type) -> pairs of a zone and the machine type's description in that zone
_Machines = dict[tuple[str, str], list[tuple[str, Json]]]

_TYPES_AGE = timedelta(days=1)
_PATTERN = re.compile(r"[a-z0-9*-]+")
# the minimum charge: https://cloud.google.com/compute/vm-instance-pricing
_MINIMUM = timedelta(minutes=1)
_SOLD = (Purchase.ON_DEMAND, Purchase.SPOT)

_AGE = timedelta(minutes=1)
# the metrics for vCPUs and GPUs, without those for commitments and virtual workstations, which
# limit no offer
_METRIC = re.compile(r"(?!COMMITTED_)(\w+_)?(CPUS|(?<!VWS_)GPUS)(_ALL_REGIONS)?")
# Spot machines use the quotas with this prefix. In a project without such a quota, they use the
# quota for on-demand machines.
_PREEMPTIBLE = "PREEMPTIBLE_"
# machine series that use the quota CPUS; every other series has its own quota
_GENERAL = frozenset({"e2", "f1", "g1", "n1"})

_Quotas = Mapping[tuple[str, str], Quota]  # (region or "" for all regions, metric) -> quota


class GcpMarket:
    """Reads and caches offers. `list_prices` returns the offers that the catalog contains for a
    provider.
    """

    def __init__(self, api: GcpApi, context: ProviderContext, read_live: ReadLive) -> None:
        self._api, self._settings, self._now = api, context.settings, context.now
        self._list_prices, self._read_live = context.list_prices, read_live
        self.silent = ""  # why Google's list of prices could not be read; "" if it was read
        self._offers: tuple[datetime, Sequence[Offer]] | None = None
        self._reading: asyncio.Task[None] | None = None  # the last read, maybe unfinished
        self.gpus: Mapping[str, str] = {}  # machine type -> Google's name of its GPU
        self.unpriced: Sequence[str] = ()  # machine types that have no price in the catalog
        # machine types whose number of GPUs differs from the catalog's
        self.differing: Sequence[str] = ()

    async def offers(self) -> Sequence[Offer]:
        """Return the offers of all zones in the settings. Raises CloudFault, Refused. Concurrent
        callers share the requests to Google. The requests continue if the caller is cancelled,
        because reading all zones may take longer than a caller waits.
        """
        while self._offers is None or self._now() - self._offers[0] >= _TYPES_AGE:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._read())
                self._reading.add_done_callback(_take_error)
            await asyncio.shield(self._reading)
        return self._offers[1]

    async def _read(self) -> None:
        at = self._now()
        self._offers = at, await self._join()

    async def _join(self) -> Sequence[Offer]:
        patterns = self._patterns()
        live, prices = await self._read_prices()
        rows = [row for each in prices.values() for row in each]
        rows = [row for row in rows if _matches(row.instance_type, patterns)]
        built = {row: shape for row in rows if (shape := find_shape(row.instance_type))}
        names = {each.replace("*", ".*") for each in patterns}
        names |= {shape.machine_type for shape in built.values()}
        text = "|".join(sorted(names))
        listed = await self._api.aggregated("machineTypes", filter=f'name eq "{text}"')
        machines: _Machines = {}
        for machine in listed:
            zone, name = last_part(str(machine["zone"])), str(machine["name"])
            region = zone.rpartition("-")[0]
            if self._is_wanted(region, zone) and not machine.get("deprecated"):
                machines.setdefault((region, name), []).append((zone, machine))
        self.gpus = _find_gpus(listed, built)
        whole = {each: machines[each] for each in machines if _matches(each[1], patterns)}
        return self._add_extras(
            [*self._price(whole, prices), *await self._build(built, machines)], live
        )

    def _add_extras(self, offers: Sequence[Offer], live: LivePrices | None) -> Sequence[Offer]:
        """Add the prices of disks and addresses to the offers. Return the offers unchanged if
        Google's price list could not be read.
        """
        if live is None:
            return offers
        settings = self._settings
        return [replace(each, extras=live.list_extras(each, settings)) for each in offers]

    def _price(
        self, machines: _Machines, prices: Mapping[tuple[str, str], Sequence[Offer]]
    ) -> Sequence[Offer]:
        """Return the offers of machine types that have a price in the catalog. The names of omitted
        types are stored in `unpriced` and `differing`.
        """
        found, unpriced, differing = list[Offer](), set[str](), set[str]()
        for (region, name), zones in machines.items():
            rows = prices.get((region, name), ())
            for zone, machine in zones:
                if any(row.accelerator_count != _count_gpus(machine) for row in rows):
                    differing.add(name)
                    continue
                found += [_make_offer(machine, zone, row) for row in rows]
                unpriced |= set() if rows else {name}
        self.unpriced = sorted(unpriced - {each.instance_type for each in found} - differing)
        self.differing = sorted(differing)
        return found

    async def _build(
        self, shapes: Mapping[Offer, MachineShape], machines: _Machines
    ) -> Sequence[Offer]:
        """Return the offers of machines with attached GPUs or TPUs. A machine is offered in the
        zones that have both its machine type and its GPU type.
        """
        gpus: set[tuple[str, str]] = set()
        if any(shape.gpu for shape in shapes.values()):
            told = await self._api.aggregated("acceleratorTypes")
            gpus = {(last_part(str(each["zone"])), str(each["name"])) for each in told}
        return [
            _make_offer(machine, zone, row)
            for row, shape in shapes.items()
            for zone, machine in machines.get((row.region, shape.machine_type), ())
            if not shape.gpu or (zone, shape.gpu) in gpus
        ]

    async def _read_prices(
        self,
    ) -> tuple[LivePrices | None, Mapping[tuple[str, str], Sequence[Offer]]]:
        """Return Google's price list, and the catalog's offers by region and machine type. The
        offers have the prices of Google's list. The price list is None if the account has no
        permission to read it, or if reading it fails.
        """
        rows = await asyncio.to_thread(self._list_prices, "gcp")
        try:
            live = await asyncio.to_thread(self._read_live)
            rows = await asyncio.to_thread(live.price, rows)
        except (PriceError, *UNREADABLE) as error:
            self.silent = str(error)
            return None, _group_prices(rows)
        self.silent = ""
        return live, _group_prices(rows)

    def _is_wanted(self, region: str, zone: str) -> bool:
        regions, zones = self._listed("regions"), self._listed("zones")
        return (not regions or region in regions) and (not zones or zone in zones)

    def _patterns(self) -> Sequence[str]:
        patterns = self._listed("machines")
        for each in patterns:
            if not _PATTERN.fullmatch(each):
                raise Refused(
                    f"[providers.gcp] machines: {each} is not a pattern of machine types, such as "
                    "`a2-*` or `g2-standard-4`"
                )
        return patterns

    def _listed(self, setting: str) -> Sequence[str]:
        words = str(self._settings.get(setting) or "").split(",")
        return [each.strip() for each in words if each.strip()]


def _find_gpus(machines: Sequence[Json], shapes: Mapping[Offer, MachineShape]) -> dict[str, str]:
    """Return a map from each instance type to Google's name for its GPU."""
    own = {
        str(each["name"]): str(each["accelerators"][0]["guestAcceleratorType"])
        for each in machines
        if each.get("accelerators")
    }
    return own | {row.instance_type: shape.gpu for row, shape in shapes.items() if shape.gpu}


def _group_prices(rows: Sequence[Offer]) -> Mapping[tuple[str, str], Sequence[Offer]]:
    """Return the purchasable offers, by region and machine type."""
    prices: dict[tuple[str, str], list[Offer]] = {}
    for each in rows:
        if each.purchase in _SOLD:
            prices.setdefault((each.region, each.instance_type), []).append(each)
    return prices


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, each) for each in patterns)


def _take_error(task: asyncio.Task[None]) -> None:
    """Retrieve the exception of a finished read, so that asyncio does not log the exception if no
    caller awaits the task.
    """
    if not task.cancelled():
        task.exception()


def _count_gpus(machine: Json) -> int:
    """Return the number of GPUs that Compute Engine reports for a machine type."""
    gpus = machine.get("accelerators") or ()
    return sum(int(each["guestAcceleratorCount"]) for each in gpus)


def _make_offer(machine: Json, zone: str, price: Offer) -> Offer:
    return replace(
        price,
        zone=zone,
        vcpus=float(machine["guestCpus"]),
        memory_mib=int(machine["memoryMb"]),
        disk_gib=None,
        minimum_charge=_MINIMUM,
        architecture=str(machine.get("architecture") or "X86_64").lower(),
    )


class GcpQuotas:
    """The quotas of one project, at most a minute old."""

    def __init__(self, api: GcpApi, regions: Collection[str], now: Callable[[], datetime]) -> None:
        """`regions` are the regions to read; () means all regions."""
        self._api, self._regions, self._now = api, regions, now
        self._known: tuple[datetime, _Quotas] | None = None
        self._fault: Exception | None = None  # why the last read failed

    @property
    def problem(self) -> str:
        """The reason why the quotas could not be read, or "" if they were read."""
        return f"cannot be read: {self._fault}" if self._fault is not None else ""

    def forget(self) -> None:
        """Discard the cached quotas, because machines were created or deleted."""
        if self._fault is None:
            self._known = None

    async def read(self) -> Sequence[Quota]:
        """Return the quotas of vCPUs and GPUs, sorted by region and name. Raises CloudFault or
        Refused if the quotas cannot be read, or if the last attempt failed less than a minute ago.
        """
        known = await self._read()
        if self._fault is not None:
            raise self._fault
        return [known[key] for key in sorted(known)]

    async def limit(self, offers: Sequence[Offer], gpus: Mapping[str, str]) -> Sequence[Offer]:
        """Return the offers, with their capacity reduced to the unused quota. `gpus` maps machine
        types to Google's names of their GPUs. If the quotas cannot be read, the last known quotas
        are used.
        """
        try:
            known = await self._read()
        except (CloudFault, Refused) as fault:
            self._fault = fault
            known = self._known[1] if self._known is not None else {}
            self._known = (self._now(), known)
        return [limit_offer(each, _list_needs(each, gpus, known)) for each in offers]

    async def _read(self) -> _Quotas:
        now = self._now()
        if self._known is not None and now - self._known[0] < _AGE:
            return self._known[1]
        project = await self._api.project()
        whole = await self._api.get("")
        regions = await self._api.list("regions")
        scopes = [("", whole), *((str(each["name"]), each) for each in regions)]
        found = {
            (region, quota.name): quota
            for region, told in scopes
            if not region or not self._regions or region in self._regions
            for quota in _read_scope(told.get("quotas") or (), region, project)
        }
        self._known, self._fault = (now, found), None
        return found


def _read_scope(told: Sequence[Json], region: str, project: str) -> Iterator[Quota]:
    limits = {str(each["metric"]): float(each["limit"]) for each in told}
    for each in told:
        name = str(each["metric"])
        if not _METRIC.fullmatch(name):
            continue
        spot = name.startswith(_PREEMPTIBLE)
        shared = not spot and not limits.get(_PREEMPTIBLE + name)
        only = None if shared else Purchase.ON_DEMAND
        place = "per-project-region" if region else "per-project"
        yield Quota(
            provider="gcp",
            name=name,
            family=name.removeprefix(_PREEMPTIBLE).replace("_", " "),
            unit="GPUs" if "GPUS" in name else "vCPUs",
            region=region,
            purchase=Purchase.SPOT if spot else only,
            limit=limits[name],
            used=float(each.get("usage", 0)),
            request="gcloud quotas preferences create --service=compute.googleapis.com "
            f"--project={project} --quota-id={name.replace('_', '-')}-{place} "
            f"--preferred-value={NEW_LIMIT}" + (f" --dimensions=region={region}" if region else ""),
        )


def _list_needs(
    offer: Offer, gpus: Mapping[str, str], known: _Quotas
) -> Iterator[tuple[Quota, float]]:
    """Yield the quotas of the offer's machines, each with the amount for one machine.
    Quotas that Google does not report are omitted.
    """
    spot = offer.purchase is Purchase.SPOT
    series = offer.instance_type.partition("-")[0]
    cpus = "CPUS" if series in _GENERAL else f"{series.upper()}_CPUS"
    amounts = [(offer.region, cpus, offer.vcpus)]
    if offer.instance_type in gpus:
        # Google's names of GPUs: nvidia-l4, nvidia-tesla-a100, nvidia-a100-80gb, nvidia-h100-80gb
        gpu = gpus[offer.instance_type].replace("-tesla", "").replace("-", "_").upper()
        whole = f"{gpu}_GPUS"
        metric = whole if (offer.region, whole) in known else f"{gpu.rpartition('_')[0]}_GPUS"
        amounts.append((offer.region, metric, float(offer.accelerator_count)))
        amounts.append(("", "" if spot else "GPUS_ALL_REGIONS", float(offer.accelerator_count)))
    amounts.append(("", "" if spot else "CPUS_ALL_REGIONS", offer.vcpus))
    for region, metric, amount in amounts:
        own = known.get((region, f"{_PREEMPTIBLE}{metric.removeprefix(f'{series.upper()}_')}"))
        quota = own if spot and own is not None and own.limit else known.get((region, metric))
        if quota is not None:
            yield quota, amount
