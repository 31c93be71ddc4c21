"""Queries the regions of a cloud at the same time, so that a failing region does not hide the other
regions. An account's quotas are kept for a minute, by region.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from datetime import datetime, timedelta
from math import isfinite
from typing import ClassVar, Generic, TypeVar

from cavvy.domain.offers import Offer, Quota
from cavvy.providers.base import ProviderContext, Refused
from cavvy.providers.vm import cloud as vm
from cavvy.providers.vm.cloud import UNREADABLE, CloudFault, unreadable

_PATIENCE_S = 15.0  # seconds to wait for one region; less than the control plane waits for `offers`
_T = TypeVar("_T")

_AGE = timedelta(minutes=1)
_K = TypeVar("_K", bound=Hashable)


class RegionalMarket(ABC):
    """Reads the offers of a cloud's regions, and caches them for `age`. If some regions did not
    answer, the offers are read again after `again`.
    """

    age: ClassVar[timedelta] = timedelta(hours=1)
    again: ClassVar[timedelta] = timedelta(minutes=1)

    def __init__(self, context: ProviderContext) -> None:
        self._settings, self._now = context.settings, context.now
        self._list_prices = context.list_prices  # returns the catalog's offers of a provider
        # the offers, and the time until which they are not read again
        self._offers: tuple[datetime, Sequence[Offer]] | None = None
        # the regions, zones or projects that did not answer the last read, with the reason
        self.silent: Sequence[str] = ()

    async def offers(self) -> Sequence[Offer]:
        """Return the offers of all regions that answer. Raises CloudFault or Refused if no region
        answers.
        """
        now = self._now()
        if self._offers is None or now >= self._offers[0]:
            found = await self._join()
            self._offers = now + (self.again if self.silent else self.age), found
        return self._offers[1]

    @abstractmethod
    async def _join(self) -> Sequence[Offer]:
        """Read the offers, and set `silent`."""


async def ask_regions(
    regions: Sequence[str], ask: Callable[[str], Awaitable[Sequence[_T]]]
) -> tuple[list[_T], Sequence[str]]:
    """Return the answers of all regions together, and the regions that did not answer, each with
    the reason. Raises CloudFault or Refused if no region answers.

    For lists of machines, use `list_regions` instead: with `ask_regions`, a machine in a region
    that does not answer would count as ended.
    """
    found, faults = await _ask_each(regions, ask)
    return found, [f"{region}: {fault}" for region, fault in faults.items()]


async def list_regions(
    regions: Sequence[str],
    ask: Callable[[str], Awaitable[Sequence[vm.CloudMachine]]],
    title: Callable[[str], str] = str,
) -> Sequence[vm.CloudMachine]:
    """Return the machines of all regions together. `title` returns the name that a region has in
    offers. Raises SilentRegions if some regions do not answer, and CloudFault or Refused if no
    region answers.
    """
    found, faults = await _ask_each(regions, ask)
    if faults:
        raise vm.SilentRegions(found, {title(each): fault for each, fault in faults.items()})
    return found


async def _ask_each(
    regions: Sequence[str], ask: Callable[[str], Awaitable[Sequence[_T]]]
) -> tuple[list[_T], Mapping[str, vm.CloudFault | Refused]]:
    """Return the answers, and the faults by region. Raises the first fault if no region answers."""

    async def hear(region: str) -> Sequence[_T] | vm.CloudFault | Refused:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await ask(region)
        except TimeoutError:
            return vm.CloudFault(0, f"no answer from {region} within {_PATIENCE_S:.0f} s")
        except (vm.CloudFault, Refused) as fault:
            return fault
        except vm.UNREADABLE as error:
            return vm.unreadable(error)

    told = dict(zip(regions, await asyncio.gather(*map(hear, regions)), strict=True))
    found, faults = list[_T](), dict[str, vm.CloudFault | Refused]()
    for region, answer in told.items():
        if isinstance(answer, vm.CloudFault | Refused):
            faults[region] = answer
        else:
            found += answer
    if faults and len(faults) == len(told):
        raise next(iter(faults.values()))
    return found, faults


class QuotaCache(Generic[_K]):
    """Caches each region's quotas for a minute. `ask` requests the quotas of one region."""

    def __init__(
        self, ask: Callable[[str], Awaitable[Mapping[_K, Quota]]], now: Callable[[], datetime]
    ) -> None:
        self._ask, self._now = ask, now
        self._known: dict[str, Mapping[_K, Quota]] = {}
        self._read_at: dict[str, datetime] = {}
        self.faults: dict[str, CloudFault | Refused] = {}  # by region: why the last read failed

    def forget(self) -> None:
        """Make the next call of `read` request the quotas again, because machines were created or
        deleted. If the last request failed less than a minute ago, no new request is sent.
        """
        for region in self._read_at.keys() - self.faults.keys():
            del self._read_at[region]

    def last(self, region: str) -> Mapping[_K, Quota]:
        """Return the most recently read quotas, regardless of their age, or None if no quotas were
        read.
        """
        return self._known.get(region, {})

    async def read(self, region: str) -> Mapping[_K, Quota]:
        """Return the region's quotas. Raises CloudFault or Refused if the read fails, or if the
        last read failed less than a minute ago.
        """
        now, at = self._now(), self._read_at.get(region)
        if at is None or now - at >= _AGE:
            self.faults.pop(region, None)
            try:
                self._known[region] = _check(await self._ask(region))
            except (CloudFault, Refused) as fault:
                self.faults[region] = fault
            except UNREADABLE as error:
                self.faults[region] = unreadable(error)
            self._read_at[region] = now
        if failed := self.faults.get(region):
            raise failed
        return self._known[region]


def _check(quotas: Mapping[_K, Quota]) -> Mapping[_K, Quota]:
    """Return the quotas. Raises ValueError if a limit or the use of a quota is not finite."""
    for each in quotas.values():
        if not isfinite(each.limit) or not isfinite(each.used or 0.0):
            raise ValueError(f"{each.name}: {each.used} of {each.limit}")
    return quotas
