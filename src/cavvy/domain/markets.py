"""Observations of markets. A market is identified by an offer's key. Every launch, node lifetime
and price is an observation of its market.
"""

from datetime import datetime
from enum import StrEnum

from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct


class ObservationKind(StrEnum):
    """The kinds of observations. Each launch request is either granted or refused."""

    GRANTED = "granted"  # the provider accepted a launch
    REFUSED = "refused"  # the provider refused a launch; the text has the reason
    BOOTED = "booted"  # all agents reported within `seconds` after the launch was accepted
    ENDED = "ended"  # Cavvy released a gang after a lifetime of `seconds`
    TAKEN = (
        # the provider preempted a gang after a lifetime of `seconds`; the text states whether it
        # gave notice
        "taken"
    )
    FAILED = "failed"  # a node was lost or never started, after a lifetime of `seconds`
    PRICE = "price"  # from this time on, a node costs `rate`


LIVES = frozenset({ObservationKind.ENDED, ObservationKind.TAKEN, ObservationKind.FAILED})


class Observation(Struct, frozen=True, kw_only=True):
    """One observation. An observation is stored in the same transaction as the rows from which it
    was derived.
    """

    market: str  # Offer.key
    kind: ObservationKind
    at: datetime
    seconds: float = 0.0  # duration or lifetime
    nodes: int = 1
    rate: HourlyRate | None = None
    text: str = ""


class MarketTally(Struct, frozen=True, kw_only=True):
    """The sum of all observations of one kind in one market. `seconds` is the total duration of the
    observations in seconds. `node_seconds` is the sum of the observations' node-seconds: the
    duration of each observation in seconds, multiplied by its number of nodes.
    """

    market: str
    kind: ObservationKind
    count: int
    seconds: float
    node_seconds: float
    first_at: datetime
    last_at: datetime
