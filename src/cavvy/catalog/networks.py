"""The machines whose providers publish no network speed, with the provider's page that describes
the machine.

The catalog has no network speed for the machines in this table, because a speed from another source
is not a promise of the provider. A machine without a published speed never meets a request for
`network.min`. A burst speed does not count as a network speed, because providers do not promise
burst speeds.
"""

import re
from functools import cache

from cavvy.catalog.tables import read_table
from cavvy.domain.values import Struct


class UnpublishedNetwork(Struct, frozen=True):
    """A row of `networks.csv`. `source` is the address of the provider's page without https://, and
    `read` is the date on which the page was read.
    """

    provider: str
    pattern: str
    reason: str
    source: str
    read: str


@cache
def list_unpublished() -> tuple[UnpublishedNetwork, ...]:
    """Return every row of the table."""
    names = ("provider", "pattern", "reason", "source", "read")
    return tuple(
        UnpublishedNetwork(*(row[name] for name in names))
        for row in read_table(__package__, "networks")
    )


@cache
def find_unpublished(provider: str, instance_type: str) -> UnpublishedNetwork | None:
    """Return the machine's row in the table of unpublished network speeds, or None if the table has
    no row for the machine.
    """
    for row in list_unpublished():
        if row.provider == provider and re.fullmatch(row.pattern, instance_type, re.IGNORECASE):
            return row
    return None
