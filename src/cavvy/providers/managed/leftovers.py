"""Decides when a provider searches its regions for objects that launches or deletions left
behind.
"""

from datetime import datetime, timedelta

UNUSED = timedelta(hours=1)  # unused objects are deleted after this time
MOST_DELETED = 10  # maximum objects of each kind that one poll deletes, since polls must be quick
_PAUSE = timedelta(minutes=30)  # minimum time between two searches in a region


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
