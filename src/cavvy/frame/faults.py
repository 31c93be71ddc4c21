"""The faults of capabilities that this process has met. The rest works without what has failed, so
only the log and `cavvy server status` show them.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

_log = logging.getLogger(__name__)
_MOST = 50  # faults that are kept; a capability of others could fail in new ways for ever


class Fault(NamedTuple):
    """What a capability could not do."""

    capability: str
    what: str  # such as "cannot learn what happens (MODULE:NAME)"
    why: str
    times: int

    def describe(self) -> str:
        often = f" ({self.times} times)" if self.times > 1 else ""
        return f"{self.capability}: {self.what}: {self.why}{often}"


_faults: dict[tuple[str, str], Fault] = {}


def note_fault(capability: str, what: str, why: object) -> None:
    """Keep a fault. The log says it the first time, with the traceback of an exception."""
    while isinstance(why, ExceptionGroup) and len(why.exceptions) == 1:
        (why,) = why.exceptions  # the group of the tasks names no reason
    error = why if isinstance(why, Exception) else None
    text = f"{type(why).__name__}: {why}" if error is not None else str(why)
    known = _faults.get((capability, what))
    if known is None and len(_faults) >= _MOST:
        return
    times = known.times + 1 if known is not None else 1
    _faults[capability, what] = Fault(capability, what, text, times)
    if known is None or known.why != text:
        _log.error("the capability %s %s: %s", capability, what, text, exc_info=error)


def list_faults() -> Sequence[str]:
    """Return a sentence for each fault since this process has started."""
    return [fault.describe() for fault in _faults.values()]


def forget_faults() -> None:
    """Begin anew, for a server that starts in the process of another, such as in tests."""
    _faults.clear()
