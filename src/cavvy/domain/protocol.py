"""Versions of the agent protocol: which versions the control plane serves, and what older agents do
not support. No I/O.

`docs/concepts/agent-protocol.md` has the rule and the table of versions.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from cavvy.domain.messages import EQUIPPED, Assignment, Since

PROTOCOL = EQUIPPED  # a test compares this version with the one in `agent/config.py`
# How many older and newer versions are supported: servers are upgraded, and downgraded, while jobs
# run.
APART = 2
OLDEST = max(1, PROTOCOL - APART)
NEWEST = PROTOCOL + APART


def is_served(version: int) -> bool:
    """Whether agents of this version are served."""
    return OLDEST <= version <= NEWEST


def list_unknown(version: int, work: Assignment) -> list[str]:
    """The parts of the work that an agent of this version does not know and would ignore."""
    found = (mark.what for mark in _list_marks(work) if version < mark.version)
    return list(dict.fromkeys(found))


def _list_marks(value: Any) -> Iterator[Since]:
    """The marks of all marked fields, including nested fields, whose values use the feature."""
    for each in fields(value):
        inner, mark = getattr(value, each.name), each.metadata.get("since")
        if mark is not None and mark.used(inner):
            yield mark
        for item in inner if isinstance(inner, list | tuple) else (inner,):
            if is_dataclass(item):
                yield from _list_marks(item)
