"""Instance types that providers have withdrawn, and their replacements. Error messages of the spec
module suggest the replacements.

The rows of `retired.csv` come from announcements of the providers. A replacement has the same kind
of accelerator or a newer kind.
"""

from datetime import date
from functools import cache

from cavvy.catalog.tables import read_table
from cavvy.domain.values import Struct


class RetiredType(Struct, frozen=True, kw_only=True):
    """A withdrawn instance type. `since` is the last day on which the type could be used, or None
    if unknown.
    """

    instance_type: str
    provider: str
    successor: str
    since: date | None = None


def find_retired(instance_type: str) -> RetiredType | None:
    """Return the entry of a withdrawn type, ignoring case, or None for any other type."""
    return _table().get(instance_type.strip().lower())


def successor(instance_type: str) -> str | None:
    """Return the replacement of a withdrawn type, or None for any other type."""
    retired = find_retired(instance_type)
    return retired.successor if retired else None


def list_retired() -> tuple[RetiredType, ...]:
    """Return all withdrawn instance types."""
    return tuple(_table().values())


@cache
def _table() -> dict[str, RetiredType]:
    return {
        row["instance_type"].lower(): RetiredType(
            instance_type=row["instance_type"],
            provider=row["provider"],
            successor=row["successor"],
            since=date.fromisoformat(row["since"]) if row["since"] else None,
        )
        for row in read_table(__package__, "retired")
    }
