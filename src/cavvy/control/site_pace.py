"""Keeps what the devices of a site fetch from this server together below the site's limit."""

from asyncio import Lock
from datetime import datetime, timedelta
from weakref import WeakValueDictionary

from cavvy.control.clock import ControlClock


class SitePace:
    """When each site may get its next bytes. Devices are not trusted: one that opens many
    connections gets no more than another, because it waits for one piece at a time."""

    def __init__(self, clock: ControlClock) -> None:
        self._clock = clock
        self._free_at: dict[tuple[str, str], datetime] = {}
        self._turns: WeakValueDictionary[tuple[str, str], Lock] = WeakValueDictionary()

    def turn_of(self, project: str, device: str) -> Lock:
        """Return the lock that a device's connections share; it is kept as long as one has it."""
        return self._turns.setdefault((project, device), Lock())

    async def wait(self, turn: Lock, site: tuple[str, str], size: int, mib_per_s: float) -> None:
        """Return when so many bytes may be sent to a device of the site. A device that has gone
        meanwhile leaves its time to others."""
        async with turn:
            start = self.reserve(site, size, mib_per_s)
            try:
                await self._clock.sleep_until(start)
            except BaseException:
                self._free_at[site] -= _need(size, mib_per_s)
                raise

    def reserve(self, site: tuple[str, str], size: int, mib_per_s: float) -> datetime:
        """Reserve the time that so many bytes take at the site's rate, after all that was reserved
        before. Return when it begins."""
        now = self._clock.now()
        start = max(now, self._free_at.get(site, now))
        self._free_at[site] = start + _need(size, mib_per_s)
        return start


def _need(size: int, mib_per_s: float) -> timedelta:
    return timedelta(seconds=size / mib_per_s / 2**20)
