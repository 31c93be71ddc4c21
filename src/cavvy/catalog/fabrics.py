"""Finds a machine's RDMA network from its instance type, because price lists omit the network.

The rows of `fabrics.csv` are patterns for instance types of one provider. If no row describes a
machine, the machine has no known RDMA network, so the machine never meets a request for an RDMA
network.
"""

import re
from functools import cache

from cavvy.catalog.tables import read_table
from cavvy.domain.tasks import Fabric


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
