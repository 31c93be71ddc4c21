"""Queries the regions of a cloud at the same time, so that a failing region does not hide the other
regions.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from cavvy.providers.base import Refused
from cavvy.providers.vm.cloud import UNREADABLE, CloudFault, CloudMachine, SilentRegions, unreadable

_PATIENCE_S = 15.0  # seconds to wait for one region; less than the control plane waits for `offers`
_T = TypeVar("_T")


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
    ask: Callable[[str], Awaitable[Sequence[CloudMachine]]],
    title: Callable[[str], str] = str,
) -> Sequence[CloudMachine]:
    """Return the machines of all regions together. `title` returns the name that a region has in
    offers. Raises SilentRegions if some regions do not answer, and CloudFault or Refused if no
    region answers.
    """
    found, faults = await _ask_each(regions, ask)
    if faults:
        raise SilentRegions(found, {title(each): fault for each, fault in faults.items()})
    return found


async def _ask_each(
    regions: Sequence[str], ask: Callable[[str], Awaitable[Sequence[_T]]]
) -> tuple[list[_T], Mapping[str, CloudFault | Refused]]:
    """Return the answers, and the faults by region. Raises the first fault if no region answers."""

    async def hear(region: str) -> Sequence[_T] | CloudFault | Refused:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await ask(region)
        except TimeoutError:
            return CloudFault(0, f"no answer from {region} within {_PATIENCE_S:.0f} s")
        except (CloudFault, Refused) as fault:
            return fault
        except UNREADABLE as error:
            return unreadable(error)

    told = dict(zip(regions, await asyncio.gather(*map(hear, regions)), strict=True))
    found, faults = list[_T](), dict[str, CloudFault | Refused]()
    for region, answer in told.items():
        if isinstance(answer, CloudFault | Refused):
            faults[region] = answer
        else:
            found += answer
    if faults and len(faults) == len(told):
        raise next(iter(faults.values()))
    return found, faults
