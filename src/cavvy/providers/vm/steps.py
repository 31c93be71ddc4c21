"""Creates machines in several calls: for clouds whose first call only creates the machine, and for
clouds with the trait `atomic_count` whose API needs several requests to start a gang's machines.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from cavvy.providers.base import ProviderError, Refused
from cavvy.providers.vm.cloud import UNREADABLE, CloudFault

Step = Callable[[], Awaitable[object]]


async def finish_or_delete(
    machine: str, steps: Sequence[Step], delete: Callable[[str], Awaitable[None]]
) -> str:
    """Make the remaining calls for the machine that the first call created, and return its id. If a
    call fails, or if the launch is cancelled, delete the machine and raise the error. After a lost
    reply to the last call, the machine may run and is kept; the layer then finds it by its name.

    Set the trait `created_off`: if the deletion fails too, or if the reply to the first call is
    lost, the layer deletes the machine that is off, and requests another one.
    """
    for number, step in enumerate(steps, 1):
        try:
            await step()
        except BaseException as error:
            lost = isinstance(error, CloudFault) and error.uncertain
            if number < len(steps) or not lost:
                with suppress(CloudFault, Refused, *UNREADABLE):
                    await delete(machine)
            raise
    return machine


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
