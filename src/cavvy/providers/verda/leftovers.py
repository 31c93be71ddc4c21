"""Deletes startup scripts whose instance was never made, such as those of a server that crashed
between the two requests. A script contains the claim of a node.
"""

from collections.abc import Awaitable, Callable, Collection
from datetime import datetime, timedelta

from cavvy.providers.vm.account import keep_ours
from cavvy.providers.vm.rest import RECORDER, Json

_EVERY = timedelta(minutes=10)
# a script may lack its instance for as long as a launch is repeated, also by another server
_SPARED = timedelta(hours=1)


class VerdaLeftovers:
    """Sweeps the scripts of the account. `get` and `drop` call the API."""

    def __init__(
        self,
        get: Callable[[str], Awaitable[Json]],
        drop: Callable[[Collection[str]], Awaitable[None]],
        now: Callable[[], datetime],
    ) -> None:
        self._get, self._drop, self._now = get, drop, now
        self._swept_at: datetime | None = None
        self._unused: dict[str, datetime] = {}  # scripts without an instance, and since when

    async def sweep(self, hostnames: Collection[str]) -> None:
        """Delete old scripts that belong to none of the instances. Raises CloudFault."""
        now = self._now()
        if self._swept_at is not None and now - self._swept_at < _EVERY:
            return
        self._swept_at = now
        told = await self._list()
        unused = [str(each["id"]) for each in told if str(each["name"]) not in hostnames]
        self._unused = {each: self._unused.get(each, now) for each in unused}
        await self._drop([each for each, at in self._unused.items() if now - at >= _SPARED])

    async def _list(self) -> Json:
        """Cavvy's scripts. The reply contains claims, so it is not recorded."""
        recorder = RECORDER.set(None)
        try:
            return keep_ours(await self._get("/scripts"))
        finally:
            RECORDER.reset(recorder)
