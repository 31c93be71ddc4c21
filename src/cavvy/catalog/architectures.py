"""Finds the architecture of a machine's CPUs from its instance type, because price lists do not
state the architecture.

The rows of `architectures.csv` are patterns for instance types of one provider. A type that no
pattern matches has x86_64 CPUs, unless its accelerators contain an Arm CPU.
"""

import re
from functools import cache

from cavvy.catalog.tables import read_table
from cavvy.domain.offers import Offer

_SAME = {"aarch64": "arm64", "amd64": "x86_64"}
# Grace Hopper and Grace Blackwell combine the GPU with an Arm CPU, according to NVIDIA's data
# sheets.
_GRACE = ("GH200", "GB200", "GB300")


def find_architecture(offer: Offer) -> str:
    """Return the architecture of the offer's CPUs, such as x86_64 or arm64."""
    if offer.architecture:
        return _SAME.get(offer.architecture.lower(), offer.architecture)
    return (
        "arm64"
        if offer.accelerator in _GRACE
        else _architecture_of(offer.provider, offer.instance_type)
    )


@cache
def _architecture_of(provider: str, instance_type: str) -> str:
    for row in read_table(__package__, "architectures"):
        if row["provider"] == provider and re.fullmatch(row["pattern"], instance_type):
            return row["architecture"]
    return "x86_64"
