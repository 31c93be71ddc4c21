"""Deletes startup scripts whose machine was never created, for example because the server crashed
after it had created the script. This module is for clouds that store startup scripts separately
from machines. A script contains the claim of a node.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import datetime, timedelta

from cavvy.providers.vm.records import is_machine_name
from cavvy.providers.vm.rest import RECORDER, Json

_EVERY = timedelta(minutes=10)
# a script may lack its machine for as long as a launch is repeated, also by another server
_SPARED = timedelta(hours=1)


class LeftoverScripts:
    """Deletes leftover scripts from the account. Each script is named after its machine. `read`
    lists all scripts of the account, and `drop` deletes the scripts with the given ids.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[Sequence[Json]]],
        drop: Callable[[Collection[str]], Awaitable[None]],
        now: Callable[[], datetime],
    ) -> None:
        self._read, self._drop, self._now = read, drop, now
        self._swept_at: datetime | None = None
        self._unused: dict[str, datetime] = {}  # scripts without a machine, and since when

    async def sweep(self, names: Collection[str]) -> None:
        """Delete old scripts whose names are not in `names`, the names of the machines. Raises
        CloudFault.
        """
        now = self._now()
        if self._swept_at is not None and now - self._swept_at < _EVERY:
            return
        self._swept_at = now
        told = await self._list()
        unused = [str(each["id"]) for each in told if str(each["name"]) not in names]
        self._unused = {each: self._unused.get(each, now) for each in unused}
        await self._drop([each for each, at in self._unused.items() if now - at >= _SPARED])

    async def _list(self) -> Sequence[Json]:
        """Return the scripts whose names have the form of machines' names. The reply contains
        claims, so it is not recorded."""
        recorder = RECORDER.set(None)
        try:
            return [each for each in await self._read() if is_machine_name(str(each.get("name")))]
        finally:
            RECORDER.reset(recorder)
