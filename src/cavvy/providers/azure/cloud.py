"""Calls Azure's Compute API through Azure Resource Manager
(https://learn.microsoft.com/rest/api/compute/virtual-machines).
"""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import date, datetime, timedelta
from typing import Any, NamedTuple

from cavvy.domain.offers import ExtraPrice, Offer, Purchase, Quota
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.azure.account import COMPUTE, SKUS, AzureAccount, MakeCredential
from cavvy.providers.azure.machines import (
    MACHINES,
    choose_image,
    find_default,
    make_id,
    make_machine,
    make_public_key,
    read_failure,
    read_id,
    read_machine,
    read_power,
)
from cavvy.providers.azure.market import AzureQuotas, AzureSize, read_sizes
from cavvy.providers.azure.network import (
    NO_FABRIC,
    AzureLeftovers,
    AzureNetworks,
    make_set,
    needs_set,
)
from cavvy.providers.azure.price_list import AzurePrices, make_filter, read_extras
from cavvy.providers.base import ProviderContext
from cavvy.providers.prices import PriceError, PriceQuery
from cavvy.providers.required_images import require_images
from cavvy.providers.vm import cloud as vm
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.records import MachineNames
from cavvy.providers.vm.regions import ask_regions

# https://learn.microsoft.com/azure/virtual-machines/troubleshooting-allocation-failure and
# https://learn.microsoft.com/azure/azure-resource-manager/troubleshooting/common-deployment-errors
FULL = frozenset(
    {
        "SkuNotAvailable",
        "AllocationFailed",
        "ZonalAllocationFailed",
        "OverconstrainedAllocationRequest",
        "OverconstrainedZonalAllocationRequest",
    }
)
_QUOTA = "QuotaExceeded"
_SIZES_AGE, _PRICES_AGE = timedelta(minutes=10), timedelta(hours=1)
_PRICES_AGAIN = timedelta(minutes=5)  # time until prices are read again after a failed read
_FULL_AGE = timedelta(minutes=10)  # time before an offer without capacity is requested again
_NO_PRICES = "Azure's price list cannot be read, so no machine has a price"
_POWER_AGE = timedelta(minutes=1)
_TYPES_PER_QUERY = 15  # keeps the URL of a price query below 2 KiB

# (when the states were read, machine -> state)
_Power = tuple[datetime | None, Mapping[str, vm.MachineState | None]]


class _Prices(NamedTuple):
    """A region's prices."""

    rates: Mapping[tuple[str, Purchase], HourlyRate]  # (size, purchase option) -> price
    extras: tuple[ExtraPrice, ...]
    as_of: date | None = None  # when they were read


_UNPRICED = _Prices({}, ())


class AzureCloud:
    """Implements `Cloud`."""

    # The API documents the limits of names, tags and user data. A name is unique in the resource
    # group, so a repeated request finds the first machine: names serve as tokens.
    traits = vm.CloudTraits(
        name_limit=63,
        tags=True,
        tokens=True,
        user_data_limit=65535,
        # https://learn.microsoft.com/azure/virtual-machines/states-billing
        bill_starts=vm.BillStart.RUNNING,
        quota_codes=frozenset({_QUOTA}),
    )

    def __init__(self, context: ProviderContext, make_credential: MakeCredential = None) -> None:
        settings, now = context.settings, context.now
        mark = MachineNames(context.installation, self.traits.name_limit).mark
        self._prefix = f"{vm.NAME_PREFIX}{mark}-"
        self._settings, self._now, self._find_instance = settings, now, context.find_instance
        self._account = AzureAccount(settings, make_credential)
        self._networks = AzureNetworks(self._account, settings)
        self._leftovers = AzureLeftovers(self._account, mark, now)
        self._quotas = AzureQuotas(self._account, now)
        prices = str(settings["prices_endpoint"]).rstrip("/")
        self._prices = AzurePrices(base=prices, tries=1, timeout_s=10)
        # a separate thread, so that a slow price list delays nothing else
        self._threads = ThreadPoolExecutor(1, "azure-prices")
        self._reading: dict[str, asyncio.Task[_Prices]] = {}
        self._key = str(settings.get("ssh_key") or "")
        self._closed = threading.Event()
        # region -> when the value was read, and the value
        self._sizes: dict[str, tuple[datetime, Sequence[AzureSize]]] = {}
        self._known_prices: dict[str, tuple[datetime, _Prices]] = {}
        # offer key -> the time until which the offer is not requested
        self._full: dict[str, datetime] = {}
        self._power: _Power = (None, {})
        # the regions that did not answer the last `offers`, and the last `quotas`, with the reason
        self._silent: Sequence[str] = ()
        self._untold: Sequence[str] = ()

    def close(self) -> None:
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._account.close()

    def identity(self) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`. The caller must first call `offers`, which reads the
        sizes.
        """
        sizes = [each for _, found in self._sizes.values() for each in found]
        why = {each.why_not for each in sizes if each.why_not}
        facts = [("resource group", self._account.group)]
        if why:
            facts.append(("sizes not offered", ", ".join(sorted(why))))
        if self._quotas.problem:
            facts.append(("quotas", self._quotas.problem))
        return facts

    async def offers(self) -> Sequence[Offer]:
        """Return the offers of all regions that answer. Raises CloudFault or Refused if no region
        answers."""
        now = self._now()
        self._full = {key: until for key, until in self._full.items() if until > now}
        found, self._silent = await ask_regions(await self._regions(), self._list_region)
        return require_images(found, self._settings.get("image"), find_default)

    def silent(self) -> Sequence[str]:
        """See `HasParts.silent`."""
        return self._silent

    async def quotas(self) -> Sequence[Quota]:
        """Return the quotas of all regions that answer. Raises CloudFault or Refused if no region
        answers."""
        found, self._untold = await ask_regions(await self._regions(), self._quotas.read)
        return found

    def untold_quotas(self) -> Sequence[str]:
        """See `TellsQuotas.untold_quotas`."""
        return self._untold

    async def _list_region(self, region: str) -> Sequence[Offer]:
        sizes = [each for each in await self._read_sizes(region) if not each.why_not]
        prices = await self._read_prices(region, sizes)
        found = [
            offer
            for size in sizes
            for purchase in (Purchase.ON_DEMAND, Purchase.SPOT)
            if (rate := prices.rates.get((size.name, purchase))) is not None
            and (size.spot or purchase is Purchase.ON_DEMAND)
            and (offer := self._offer(size, region, purchase, rate, prices)).key not in self._full
        ]
        families = {each.name: each.family for each in sizes}
        return await self._quotas.limit(region, found, families)

    async def create(self, request: vm.MachineRequest) -> Sequence[str]:
        offer, name = request.offer, request.names[0]
        if self._full.get(offer.key, self._now()) > self._now():
            raise vm.CloudFault(409, "AllocationFailed", f"{offer.key} recently had no capacity")
        made = make_id(name, spot=offer.purchase is Purchase.SPOT)
        # an earlier request made the machine
        if await self._account.find(MACHINES, name) is not None:
            return [made]
        together = await make_set(self._account, request) if needs_set(request) else ""
        if not self._key:
            self._key = await asyncio.to_thread(make_public_key)
        self._quotas.forget()
        image = choose_image(
            offer, str(request.gang.options.get("image") or self._settings.get("image") or "")
        )
        body = make_machine(
            request,
            self._settings,
            image=image,
            key=self._key,
            subnet=await self._networks.subnet(offer.region),
        )
        if together:
            body["properties"]["availabilitySet"] = {"id": together}
        try:
            await self._account.put(MACHINES, name, body)
        except vm.CloudFault as fault:
            self._networks.forget(offer.region)
            if self.is_full(fault):
                self._full[offer.key] = self._now() + _FULL_AGE
            raise self.name_quota(fault) from fault
        return [made]

    async def list(self) -> Sequence[vm.CloudMachine]:
        told = [
            each
            for each in await self._account.resources(MACHINES)
            if str(each.get("name")).startswith(self._prefix)
        ]
        with suppress(vm.CloudFault):  # the next sweep tries again
            await self._leftovers.sweep()
        power = await self._read_power() if told else {}
        return [await self._read(each, power) for each in told]

    async def get(self, machine: str) -> vm.CloudMachine | None:
        name, spot = read_id(machine)
        told = await self._account.find(MACHINES, name, "&$expand=instanceView")
        if told is not None:
            return await self._read(told, {str(told["id"]).lower(): read_power(told)})
        if not spot:
            return None
        return vm.CloudMachine(
            id=machine,
            name=name,
            state=vm.MachineState.ENDED,
            preempted_or_deleted=True,
            reason="the spot machine was evicted or deleted",
        )

    async def delete(self, machine: str) -> None:
        self._quotas.forget()
        await self._account.delete(MACHINES, read_id(machine)[0], "&forceDeletion=true")

    def is_full(self, fault: vm.CloudFault) -> bool:
        """Return whether Azure currently cannot provide a machine of this size for the
        subscription.
        """
        return fault.code in FULL or fault.code == NO_FABRIC

    def name_quota(self, fault: vm.CloudFault) -> vm.CloudFault:
        """Return the fault, with the code `_QUOTA` if the fault's message mentions a quota. Azure
        uses the code OperationNotAllowed for exceeded core quotas, but also for other refusals:
        https://learn.microsoft.com/azure/azure-resource-manager/troubleshooting (the page
        error-resource-quota)
        """
        if fault.code == "OperationNotAllowed" and "quota" in fault.message.lower():
            return vm.CloudFault(fault.status, _QUOTA, fault.message)
        return fault

    async def _read(
        self, told: Any, power: Mapping[str, vm.MachineState | None]
    ) -> vm.CloudMachine:
        """Parse a machine in the API's list. A machine that Azure could not start counts as
        stopped, so that `providers.vm` deletes the machine.
        """
        on = power.get(str(told["id"]).lower())
        machine = read_machine(told, on)
        if str(told["properties"].get("provisioningState")) != "Failed":
            return machine
        try:
            view = await self._account.find(MACHINES, machine.name, "&$expand=instanceView")
        # ignored, because this list must still return the other machines; the next list retries
        except vm.CloudFault:
            return machine
        failed = read_failure(machine, view, FULL)
        if failed.no_capacity:
            self._remember_full(told)
        return failed

    def _remember_full(self, told: Any) -> None:
        size = str(told["properties"]["hardwareProfile"]["vmSize"])
        spot = told["properties"].get("priority") == "Spot"
        purchase = Purchase.SPOT if spot else Purchase.ON_DEMAND
        for _, sizes in self._sizes.values():
            for each in sizes:
                if each.name == size:
                    offer = self._offer(each, str(told["location"]), purchase, HourlyRate(0))
                    self._full[offer.key] = self._now() + _FULL_AGE

    async def _read_power(self) -> Mapping[str, vm.MachineState | None]:
        """Return the power state of each machine in the subscription; the keys are resource ids in
        lower case. Azure's list of the machines in a resource group does not contain power states.
        If Azure does not respond, the power states of its last response are used, so that machines
        can still be listed and deleted.
        """
        now = self._now()
        at, power = self._power
        if at is None or now - at >= _POWER_AGE:
            with suppress(vm.CloudFault):
                query = f"api-version={COMPUTE}&statusOnly=true"
                told = await self._account.all("providers/Microsoft.Compute/virtualMachines", query)
                power = {str(each["id"]).lower(): read_power(each) for each in told}
            self._power = (now, power)
        return power

    async def _regions(self) -> Sequence[str]:
        named = list_setting(self._settings, "regions")
        return named or [await self._account.group_region()]

    async def _read_sizes(self, region: str) -> Sequence[AzureSize]:
        at, sizes = self._sizes.get(region, (None, ()))
        if at is None or self._now() - at >= _SIZES_AGE:
            where = f"api-version={SKUS}&$filter=location%20eq%20'{region}'"
            told = await self._account.all("providers/Microsoft.Compute/skus", where)
            patterns = list_setting(self._settings, "sizes")
            sizes = read_sizes(told, patterns, self._find_instance)
            self._sizes[region] = (self._now(), sizes)
        return sizes

    async def _read_prices(self, region: str, sizes: Sequence[AzureSize]) -> _Prices:
        """Return the prices of sizes, disks and addresses, from Azure's public list."""
        at, prices = self._known_prices.get(region, (None, _UNPRICED))
        if at is not None and self._now() - at < _PRICES_AGE:
            return prices
        task = self._reading.get(region)
        if task is None or task.done():
            names = [each.name for each in sizes]
            task = self._reading[region] = asyncio.create_task(self._fetch_all(region, names))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:  # shielded, so that a cancelled caller does not end the read
            return await asyncio.shield(task)
        except vm.CloudFault:
            if at is None:
                raise
            self._known_prices[region] = (self._now() - _PRICES_AGE + _PRICES_AGAIN, prices)
            return prices

    async def _fetch_all(self, region: str, names: Sequence[str]) -> _Prices:
        loop = asyncio.get_running_loop()
        found: dict[tuple[str, Purchase], HourlyRate] = {}
        for start in range(0, len(names), _TYPES_PER_QUERY):
            chunk = names[start : start + _TYPES_PER_QUERY]
            offers = await loop.run_in_executor(self._threads, self._fetch, region, chunk)
            found |= {(each.instance_type, each.purchase): each.rate for each in offers}
        extras = await loop.run_in_executor(self._threads, self._fetch_extras, region)
        prices = _Prices(found, extras, self._now().date())
        self._known_prices[region] = (self._now(), prices)
        return prices

    def _fetch_extras(self, region: str) -> tuple[ExtraPrice, ...]:
        """Fetch the prices of disks and addresses. This call blocks. Raises CloudFault."""
        query = self._make_query(())
        try:
            items = self._prices.list_items(make_filter(region), query)
            return read_extras(items, self._settings, query.today)
        except PriceError as error:
            raise vm.CloudFault(0, _NO_PRICES, str(error)) from error

    def _fetch(self, region: str, names: Sequence[str]) -> Sequence[Offer]:
        """Fetch the prices of the VM sizes in `names`. Blocks. Raises CloudFault."""
        types = " or ".join(f"armSkuName eq '{each}'" for each in names)
        only = f"armRegionName eq '{region}' and priceType eq 'Consumption' and ({types})"
        blank = Offer(provider="azure", region=region, instance_type="", rate=HourlyRate(0))
        query = self._make_query([replace(blank, instance_type=each) for each in names])
        try:
            return replace(self._prices, only=only).find(query)
        except PriceError as error:
            raise vm.CloudFault(0, _NO_PRICES, str(error)) from error

    def _make_query(self, machines: Sequence[Offer]) -> PriceQuery:
        return PriceQuery(
            machines={each.instance_type: each for each in machines},
            today=self._now().date(),
            progress=lambda _: None,
            pause=self._pause,
        )

    def _pause(self, seconds: float) -> None:
        self._closed.wait(seconds)

    def _offer(
        self,
        size: AzureSize,
        region: str,
        purchase: Purchase,
        rate: HourlyRate,
        prices: _Prices = _UNPRICED,
    ) -> Offer:
        return Offer(
            provider="azure",
            region=region,
            instance_type=size.name,
            purchase=purchase,
            rate=rate,
            source="Azure Retail Prices API",
            as_of=prices.as_of,
            extras=prices.extras,
            **size.offered(),
        )
