"""The machines whose providers publish no network speed, with the page that was read.

The catalog has no speed for such a machine, and no other source would make it a promise of the
provider. Such a machine never meets a request for `network.min`. Speeds up to which a machine may
burst are no promise either.
"""

import re
from functools import cache

from cavvy.catalog.tables import read_table
from cavvy.domain.values import Struct


class UnpublishedNetwork(Struct, frozen=True):
    """A row of `networks.csv`. `source` is the address of the provider's page without https://, and
    `read` the date on which it was read.
    """

    provider: str
    pattern: str
    reason: str
    source: str
    read: str


@cache
def list_unpublished() -> tuple[UnpublishedNetwork, ...]:
    """Every row of the table."""
    names = ("provider", "pattern", "reason", "source", "read")
    return tuple(
        UnpublishedNetwork(*(row[name] for name in names))
        for row in read_table(__package__, "networks")
    )


@cache
def find_unpublished(provider: str, instance_type: str) -> UnpublishedNetwork | None:
    """The row that describes the machine; None if its provider may publish the speed."""
    for row in list_unpublished():
        if row.provider == provider and re.fullmatch(row.pattern, instance_type, re.IGNORECASE):
            return row
    return None
