"""Creates a machine in several calls, for clouds whose first call only creates the machine, and
later calls give it its user data and switch it on.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from cavvy.providers.base import Refused
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
