"""Sends the requests for all machines of a gang at the same time. Clouds with the trait
`atomic_count` use this module if their API needs several requests to start the machines.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from cavvy.providers.base import ProviderError
from cavvy.providers.vm.cloud import CloudFault


async def start_together(
    starts: Mapping[str, Awaitable[None]], undo: Callable[[str], Awaitable[None]]
) -> None:
    """Await all requests in `starts`, whose keys are names. If some requests fail, raise one of the
    errors. If a request can never succeed, first call `undo` with each name, and then raise that
    request's error. `undo` raises nothing.
    """
    results = await asyncio.gather(*starts.values(), return_exceptions=True)
    errors = [each for each in results if isinstance(each, BaseException)]
    for error in errors:
        if not isinstance(error, CloudFault | ProviderError):
            raise error
    if final := [each for each in errors if _is_final(each)]:
        await asyncio.gather(*map(undo, starts))
        raise final[0]
    if errors:
        raise errors[0]


def _is_final(error: BaseException) -> bool:
    """Return whether the request would also fail if it were repeated."""
    if not isinstance(error, CloudFault):
        return True
    return not error.uncertain and error.status not in (409, 425, 429)
