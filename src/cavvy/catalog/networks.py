"""The networks of machines: the RDMA network, found from the instance type, and the machines whose
providers publish no network speed, with the provider's page that describes the machine.

Price lists omit the RDMA network. The rows of `fabrics.csv` are patterns for instance types of one
provider. If no row describes a machine, the machine has no known RDMA network, so the machine never
meets a request for an RDMA network.

The catalog has no network speed for the machines in the other table, because a speed from another
source is not a promise of the provider. A machine without a published speed never meets a request
for `network.min`. A burst speed does not count as a network speed, because providers do not promise
burst speeds.
"""

import re
from functools import cache

from cavvy.catalog.tables import read_table
from cavvy.domain.tasks import Fabric
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


@cache
def find_fabric(provider: str, instance_type: str) -> Fabric | None:
    """Return the RDMA network over which the machine's accelerators or processes exchange data
    without using the CPU. Returns None if no row of the table describes the machine.
    """
    for name, pattern in _patterns().get(provider, ()):
        if re.fullmatch(pattern, instance_type, re.IGNORECASE):
            return name
    return None


def has_fabric(provider: str, instance_type: str, wanted: Fabric | str) -> bool:
    """Return whether the machine has the requested network. A request for `rdma` accepts every kind
    of RDMA network."""
    found = find_fabric(provider, instance_type)
    return found is not None and wanted in (found, Fabric.RDMA)


@cache
def _patterns() -> dict[str, list[tuple[Fabric, str]]]:
    found: dict[str, list[tuple[Fabric, str]]] = {}
    for row in read_table(__package__, "fabrics"):
        found.setdefault(row["provider"], []).append((Fabric(row["fabric"]), row["pattern"]))
    return found
