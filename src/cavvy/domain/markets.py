"""What was seen of a market: one offer's key is one market, and every launch, life and price is
an observation of it.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from cavvy.domain.units import HourlyRate


class ObservationKind(StrEnum):
    """What kind of thing was seen. Launches that were asked for are those granted and those
    refused.
    """

    GRANTED = "granted"  # the place accepted a launch
    REFUSED = "refused"  # it did not; the text says why
    BOOTED = "booted"  # every agent reported in, so long after the launch was accepted
    ENDED = "ended"  # a gang was given back by us after so long a life
    TAKEN = (
        "taken"  # the place took it away after so long a life; the text says whether it gave notice
    )
    FAILED = "failed"  # a node of it was lost or never came, after so long a life
    PRICE = "price"  # a node costs `rate` from now on


LIVES = frozenset({ObservationKind.ENDED, ObservationKind.TAKEN, ObservationKind.FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One thing seen, written in the same transaction as the rows that it follows from."""

    market: str  # Offer.key
    kind: ObservationKind
    at: datetime
    seconds: float = 0.0  # how long it took or lasted
    nodes: int = 1
    rate: HourlyRate | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarketTally:
    """All observations of one kind in one market, summed up. `node_seconds` is each one's seconds
    times its nodes.
    """

    market: str
    kind: ObservationKind
    count: int
    seconds: float
    node_seconds: float
    first_at: datetime
    last_at: datetime
