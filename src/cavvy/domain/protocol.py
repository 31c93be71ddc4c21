"""Versions of the agent protocol: which versions the control plane serves, and what older agents do
not support. Does no I/O.

`docs/concepts/agent-protocol.md` explains when the version changes, and lists the versions.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from cavvy.domain.messages import EQUIPPED, Assignment, Since

PROTOCOL = EQUIPPED  # a test compares this version with the one in `agent/config.py`
# How many older and newer versions are supported. Other versions are supported because servers may
# be upgraded or downgraded while jobs run.
APART = 2
OLDEST = max(1, PROTOCOL - APART)
NEWEST = PROTOCOL + APART


def is_served(version: int) -> bool:
    """Return whether the control plane serves agents of this version."""
    return OLDEST <= version <= NEWEST


def list_unknown(version: int, work: Assignment) -> list[str]:
    """Return the features of the work that an agent of this version would silently ignore."""
    found = (mark.what for mark in _list_marks(work) if version < mark.version)
    return list(dict.fromkeys(found))


def _list_marks(value: Any) -> Iterator[Since]:
    """Some fields have a mark (`Since`) that names a feature. Yield the marks of the fields that
    `value` uses, including nested fields.
    """
    for each in fields(value):
        inner, mark = getattr(value, each.name), each.metadata.get("since")
        if mark is not None and mark.used(inner):
            yield mark
        for item in inner if isinstance(inner, list | tuple) else (inner,):
            if is_dataclass(item):
                yield from _list_marks(item)
