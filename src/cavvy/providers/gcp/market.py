"""Builds offers from the machine types that Compute Engine lists for each zone. The price of a type
is Google's live price if Google's price list contains it, otherwise the catalog's price.

Google has no API that returns the price of a machine type. A machine type has the same price in all
zones of a region.
"""

import asyncio
import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.values import replace
from cavvy.providers.base import ProviderContext, Refused
from cavvy.providers.gcp.api import GcpApi, last_part
from cavvy.providers.gcp.extras import LivePrices
from cavvy.providers.gcp.instance import MachineShape, find_shape
from cavvy.providers.prices import PriceError
from cavvy.providers.vm.cloud import UNREADABLE
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
