"""Asks the regions of a cloud at the same time, so that a region that fails hides no other."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from cavvy.providers.base import Refused
from cavvy.providers.vm.cloud import CloudFault

_PATIENCE_S = 15.0  # to wait for one region; less than the control plane waits for `offers`
_T = TypeVar("_T")


async def ask_regions(
    regions: Sequence[str], ask: Callable[[str], Awaitable[Sequence[_T]]]
) -> tuple[list[_T], Sequence[str]]:
    """The answers of all regions together, and the regions that did not answer, each with the
    reason. Raises CloudFault, Refused if no region answers.

    Lists of machines must not be read this way: a machine in a region that does not answer would
    count as gone.
    """

    async def hear(region: str) -> Sequence[_T] | CloudFault | Refused:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await ask(region)
        except TimeoutError:
            return CloudFault(0, f"no answer from {region} within {_PATIENCE_S:.0f} s")
        except (CloudFault, Refused) as fault:
            return fault

    answers = await asyncio.gather(*(hear(each) for each in regions))
    faults = [each for each in answers if isinstance(each, CloudFault | Refused)]
    if faults and len(faults) == len(answers):
        raise faults[0]
    told = zip(regions, answers, strict=True)
    silent = [f"{region}: {each}" for region, each in told if isinstance(each, Exception)]
    return [one for each in answers if not isinstance(each, Exception) for one in each], silent
