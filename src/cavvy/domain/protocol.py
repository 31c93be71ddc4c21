"""Versions of the agent protocol: which versions the control plane serves, and what older agents do
not support. Does no I/O.

`docs/concepts/agent-protocol.md` explains when the version changes, and lists the versions.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from cavvy.agent.documents import PROTOCOL, WorkConfig

# How many older and newer versions are supported. Other versions are supported because servers may
# be upgraded or downgraded while jobs run.
APART = 2
OLDEST = max(1, PROTOCOL - APART)
NEWEST = PROTOCOL + APART


def is_served(version: int) -> bool:
    """Return whether the control plane serves agents of this version."""
    return OLDEST <= version <= NEWEST


def list_unknown(version: int, work: WorkConfig) -> list[str]:
    """Return the features of the work that an agent of this version would silently ignore."""
    return list(dict.fromkeys(_list_unknown(version, work)))


def _list_unknown(version: int, record: Any) -> Iterator[str]:
    """Yield what the marks of the fields that `record` uses name, including nested fields."""
    for each in fields(record):
        value, mark = getattr(record, each.name), each.metadata
        if version < mark.get("since", 0) and mark["used"](value):
            yield mark["what"]
        for item in value if isinstance(value, list) else (value,):
            if is_dataclass(item):
                yield from _list_unknown(version, item)
