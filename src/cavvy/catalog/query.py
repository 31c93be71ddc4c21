"""The query interface of a catalog, implemented by the snapshot's reader in `store/` and by live
offers.

Constraints are checked in the order of `Constraint`; a row is counted at the first that it fails.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Resources


class Constraint(StrEnum):
    """Why an offer does not fit, in the order of the checks."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class NearMiss:
    """An offer that fails only one constraint, and the necessary change."""

    offer: Offer
    constraint: Constraint
    text: str  # e.g. "costs $19.92/h, your limit is $15.00/h"
    per_cpu: bool = False  # memory was requested per CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferMatches:
    """The offers that fit, cheapest first, and an account of the others.

    `total` rows were considered: `matched` + sum(rejected.values()) == total.
    """

    offers: Sequence[Offer]
    matched: int
    total: int
    rejected: Mapping[Constraint, int] = field(default_factory=dict)
    misses: Sequence[NearMiss] = ()


class Catalog(Protocol):
    """A source of offers."""

    def match(self, need: Resources, *, limit: int | None = None, misses: int = 5) -> OfferMatches:
        """Offers that fit one node of `need`, cheapest first; all of them if `limit` is None."""
