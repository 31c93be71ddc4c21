"""Queries the regions of a cloud at the same time, so that a failing region does not hide the other
regions.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import ClassVar, TypeVar

from cavvy.domain.offers import Offer
from cavvy.providers.base import ProviderContext, Refused
from cavvy.providers.vm import cloud as vm

_PATIENCE_S = 15.0  # seconds to wait for one region; less than the control plane waits for `offers`
_T = TypeVar("_T")


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
