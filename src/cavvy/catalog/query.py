"""The query interface of a catalog. The snapshot's reader (in `store/`) and live offers implement
this interface.

Constraints are checked in the order of `Constraint`. An offer is counted only for the first
constraint that it fails.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import ResourceSpec
from cavvy.domain.values import Struct, field


class Constraint(StrEnum):
    """The constraints that an offer can fail, in the order of the checks."""

    PURCHASE = "purchase"  # the purchase option: spot or on-demand
    ACCELERATOR = "accelerator"
    COUNT = "accelerator count"
    ACCELERATOR_MEMORY = "accelerator memory"
    INSTANCE = "instance type"
    CPUS = "cpus"
    MEMORY = "memory"
    DISK = "disk"
    NETWORK = "network"
    PROVIDER = "provider"
    REGION = "region"
    PRICE = "price"


class NearMiss(Struct, frozen=True, kw_only=True):
    """An offer that fails exactly one constraint, with the reason."""

    offer: Offer
    constraint: Constraint
    text: str  # e.g. "costs $19.92/h, your limit is $15.00/h"
    per_cpu: bool = False  # whether the task requires memory per CPU
    distance: float = 0.0  # how far the offer is from the constraint; 0 is the nearest


class OfferMatches(Struct, frozen=True, kw_only=True):
    """The offers that fit, cheapest first, and the counts of rejected offers.

    `total` is the number of offers that were considered: matched + sum(rejected.values()) == total.
    """

    offers: Sequence[Offer]
    matched: int
    total: int
    rejected: Mapping[Constraint, int] = field(default_factory=dict)
    misses: Sequence[NearMiss] = ()


class Catalog(Protocol):
    """A source of offers."""

    def match(
        self, need: ResourceSpec, *, limit: int | None = None, misses: int = 5
    ) -> OfferMatches:
        """Find the offers that fit one node of `need`. The result has at most `limit` offers,
        cheapest first, or all offers if `limit` is None, and at most `misses` near misses.
        """
