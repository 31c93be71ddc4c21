"""Decides when a provider searches its regions for objects that launches or deletions left behind,
and deletes startup scripts without a machine.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import datetime, timedelta

from cavvy.providers.vm.records import is_machine_name
from cavvy.providers.vm.rest import RECORDER, Json

UNUSED = timedelta(hours=1)  # unused objects are deleted after this time
MOST_DELETED = 10  # maximum objects of each kind that one poll deletes, since polls must be quick
_PAUSE = timedelta(minutes=30)  # minimum time between two searches in a region
_EVERY = timedelta(minutes=10)
# a script may lack its machine for as long as a launch is repeated, also by another server
_SPARED = timedelta(hours=1)


class LeftoverSearch:
    """Limits how often each region is searched for leftover objects."""

    def __init__(self) -> None:
        self._searched: dict[str, datetime] = {}

    def is_due(self, region: str, now: datetime) -> bool:
        """Return whether a search of the region is due. If a search is due, record `now` as the
        time of the region's last search.
        """
        if region in self._searched and now - self._searched[region] < _PAUSE:
            return False
        self._searched[region] = now
        return True


class LeftoverScripts:
    """Deletes startup scripts whose machine was never created, for example because the server
    crashed after it had created the script. For clouds that store startup scripts separately from
    machines. A script contains the claim of a node, and is named after its machine. `read` lists
    all scripts of the account, and `drop` deletes the scripts with the given ids.
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
