"""Observations of markets: an offer's key is a market, and every launch, node lifetime and price is
an observation of it.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from cavvy.domain.units import HourlyRate


class ObservationKind(StrEnum):
    """The kinds of observations. Launch requests are the granted plus the refused ones."""

    GRANTED = "granted"  # the provider accepted a launch
    REFUSED = "refused"  # the provider refused a launch; the text says why
    BOOTED = "booted"  # all agents reported, this long after the launch was accepted
    ENDED = "ended"  # Cavvy released a gang after this lifetime
    TAKEN = (
        # the provider preempted a gang after this lifetime; the text says whether it gave notice
        "taken"
    )
    FAILED = "failed"  # a node was lost or never started, after this lifetime
    PRICE = "price"  # a node costs `rate` from now on


LIVES = frozenset({ObservationKind.ENDED, ObservationKind.TAKEN, ObservationKind.FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One observation, written in the same transaction as the rows behind it."""

    market: str  # Offer.key
    kind: ObservationKind
    at: datetime
    seconds: float = 0.0  # duration or lifetime
    nodes: int = 1
    rate: HourlyRate | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarketTally:
    """The sum of all observations of one kind in one market. `node_seconds` is each one's seconds
    times its nodes.
    """

    market: str
    kind: ObservationKind
    count: int
    seconds: float
    node_seconds: float
    first_at: datetime
    last_at: datetime
