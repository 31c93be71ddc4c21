"""The records of gangs that are being removed: when the agents that still run are killed.

The time is measured by the clock that counts since the host's boot, because an administrator or a
time service can set the clock of the date. The date counts only in records of another boot and in
records of older supervisors.
"""

from __future__ import annotations

import time

from .processes import boot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Fields = dict[str, Any]


def make_removal(seconds: float) -> Fields:
    """Return the record of a removal whose agents are killed `seconds` from now."""
    return {
        "kill_at": time.time() + seconds,
        "boot": boot(),
        "kill_since_boot_s": time.monotonic() + seconds,
    }


def is_overdue(removal: Fields | None) -> bool:
    """Return whether the agents of a gang must be killed now."""
    if removal is None:
        return False
    if removal.get("boot") == boot():
        return bool(time.monotonic() >= removal["kill_since_boot_s"])
    return bool(time.time() >= removal["kill_at"])
