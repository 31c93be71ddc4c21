"""Caches the quotas of an account for a minute, by region."""

from collections.abc import Awaitable, Callable, Hashable, Mapping
from datetime import datetime, timedelta
from math import isfinite
from typing import Generic, TypeVar

from cavvy.domain.quotas import Quota
from cavvy.providers.base import Refused
from cavvy.providers.vm.cloud import UNREADABLE, CloudFault, unreadable

_AGE = timedelta(minutes=1)
_K = TypeVar("_K", bound=Hashable)


class QuotaCache(Generic[_K]):
    """Caches each region's quotas for a minute. `ask` requests the quotas of one region."""

    def __init__(
        self, ask: Callable[[str], Awaitable[Mapping[_K, Quota]]], now: Callable[[], datetime]
    ) -> None:
        self._ask, self._now = ask, now
        self._known: dict[str, Mapping[_K, Quota]] = {}
        self._read_at: dict[str, datetime] = {}
        self.faults: dict[str, CloudFault | Refused] = {}  # by region: why the last read failed

    def forget(self) -> None:
        """Make the next call of `read` request the quotas again, because machines were created or
        deleted. If the last request failed less than a minute ago, no new request is sent.
        """
        for region in self._read_at.keys() - self.faults.keys():
            del self._read_at[region]

    def last(self, region: str) -> Mapping[_K, Quota]:
        """Return the most recently read quotas, regardless of their age, or None if no quotas were
        read.
        """
        return self._known.get(region, {})

    async def read(self, region: str) -> Mapping[_K, Quota]:
        """Return the region's quotas. Raises CloudFault or Refused if the read fails, or if the
        last read failed less than a minute ago.
        """
        now, at = self._now(), self._read_at.get(region)
        if at is None or now - at >= _AGE:
            self.faults.pop(region, None)
            try:
                self._known[region] = _check(await self._ask(region))
            except (CloudFault, Refused) as fault:
                self.faults[region] = fault
            except UNREADABLE as error:
                self.faults[region] = unreadable(error)
            self._read_at[region] = now
        if failed := self.faults.get(region):
            raise failed
        return self._known[region]


def _check(quotas: Mapping[_K, Quota]) -> Mapping[_K, Quota]:
    """Return the quotas. Raises ValueError if a limit or the use of a quota is not finite."""
    for each in quotas.values():
        if not isfinite(each.limit) or not isfinite(each.used or 0.0):
            raise ValueError(f"{each.name}: {each.used} of {each.limit}")
    return quotas
