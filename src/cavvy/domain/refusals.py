"""Limits the number of refused requests that get their own records in the audit log, so that a
flood of refusals does not fill the disk. For the refusals without their own records, the audit log
gets only their number.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from cavvy.domain.values import Struct

PER_ADDRESS = 20  # maximum records per minute from one address
IN_TOTAL = 200  # maximum records per minute from all addresses together
_WINDOW = timedelta(minutes=1)


class LeftOut(Struct, frozen=True):
    """The number of refused requests from one address that were not recorded one by one."""

    address: str
    count: int


class RefusalLimiter:
    """Counts the refusals of each minute by address."""

    def __init__(self) -> None:
        self._begun: datetime | None = None
        self._admitted: dict[str, int] = {}
        self._left_out: dict[str, int] = {}

    def admit(self, address: str, now: datetime) -> bool:
        """Return whether to record this refusal in the audit log."""
        if self._begun is None or now - self._begun >= _WINDOW:
            self._begun, self._admitted = now, {}
        mine = self._admitted.get(address, 0)
        if mine < PER_ADDRESS and sum(self._admitted.values()) < IN_TOTAL:
            self._admitted[address] = mine + 1
            return True
        # If there are too many addresses, the rest are counted together, so that memory is bounded.
        key = address if len(self._left_out) < IN_TOTAL or address in self._left_out else ""
        self._left_out[key] = self._left_out.get(key, 0) + 1
        return False

    def take_left_out(self, now: datetime) -> Sequence[LeftOut]:
        """Return the numbers of unrecorded refusals in a minute that has ended. A later call does
        not return these numbers again.
        """
        if not self._left_out or self._begun is None or now - self._begun < _WINDOW:
            return []
        found = [LeftOut(address, count) for address, count in self._left_out.items()]
        self._left_out = {}
        return found
