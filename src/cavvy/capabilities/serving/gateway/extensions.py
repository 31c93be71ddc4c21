"""What capabilities add to the gateway for each service: meters of requests, and a scorer of
replicas. Without them, the classes of this file do nothing, and loads decide.

A meter reads from an answer what a request has used, such as the tokens of a language model. A
scorer reads a request, and finds out which replica should get it, or must: such as the one whose
cache holds its prompt. A capability names its classes in its description.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

from cavvy.capabilities.serving.gateway.config import ServiceRoute
from cavvy.capabilities.serving.gateway.exchange import Exchange
from cavvy.capabilities.serving.gateway.own_answers import Answer, OwnAnswer
from cavvy.capabilities.serving.gateway.seams import ClientRequest
from cavvy.capabilities.serving.gateway.upstream import ReplicaPool
from cavvy.capabilities.serving.loads import TokenTimes
from cavvy.frame.capability import Capability
from cavvy.frame.discover import load_all

UNCOUNTED = "no capability of this installation counts tokens"


class ServiceMeters:
    """The meters of one service's requests. `hold_bytes` are those of a body that may be held, and
    `state` is the folder for what outlives the process.
    """

    counts_tokens = False  # whether limits of tokens are kept

    def __init__(self, route: ServiceRoute, hold_bytes: int, state: Path | None = None) -> None: ...

    def open(self, exchange: Exchange, target: bytes, model: str = "") -> None:
        """Meter a request, if its target is one whose answers state what they used, by putting a
        `ResponseMeter` before its receiver. `model` is the one that has selected the service.
        """

    def derive(self, model: str) -> "ServiceMeters":
        """Return the meters of an API that answers requests of the service with this model."""
        return self

    def may_take(self, exchange: Exchange) -> bool:
        """Return whether what these meters count may get the request, which has an affinity."""
        return True

    def describe(self) -> TokenTimes:
        """Return the times of the answers."""
        return TokenTimes()

    def adopt(self, old: Any) -> None:
        """Take over the counts of the service's older route."""

    def remove(self) -> None:
        """Delete what is stored, because the service is gone."""


class RoutedRequests(Protocol):
    """Counts of the requests whose replica a scorer has chosen, and of their tokens, by whether the
    replica was taken to hold them.
    """

    hits: int
    misses: int
    held_tokens: int
    other_tokens: int


class ServiceScorer:
    """Chooses the replicas for requests of one service, whose `service_queue.ServiceQueue` it gets.
    It gives a request that it knows something about an `affinity`.
    """

    # bytes of the beginning of each body; if 0, it is only asked about requests with an affinity
    reads = 0
    answers = False  # whether `answer` is asked about each request

    def __init__(self, queue: Any) -> None: ...

    @property
    def routed(self) -> RoutedRequests | None:
        return None

    def answer(self, request: ClientRequest) -> Answer | None:
        """Return the answer to a request that no replica may get, or None."""
        return None

    def read(self, exchange: Exchange) -> bool:
        """Read what the choice depends on. Return False if it depends on what has not arrived yet:
        the request enters the queue again then, or has its answer.
        """
        return True

    def admit(self, exchange: Exchange) -> OwnAnswer | None:
        """Find out what the request needs. Return the answer to one that no replica can answer."""
        return None

    def bind(self, exchange: Exchange) -> None:
        """Find the replica that must get the request, if there is one."""

    def may_take(self, exchange: Exchange) -> bool:
        """Return whether a request of another service, with an affinity, may be sent to this
        one.
        """
        return True

    def equip(self, pool: ReplicaPool) -> None:
        """Prepare to know something of a replica, or change this for a new route."""

    def set_replicas(self, pools: Sequence[ReplicaPool]) -> None:
        """Replace the replicas among which `choose` chooses."""

    def choose(self, exchange: Exchange, loads: Sequence[int]) -> int | None:
        """Return the position of the replica that gets the request, which has an affinity; -1: none
        has room, None: the loads decide. Those of `balancing` are given.
        """
        return None

    def pick(self, waiting: Iterator[Exchange], pool: ReplicaPool) -> Exchange | None:
        """Return which of the waiting requests a free replica gets."""
        return next(waiting, None)

    def begin(self, exchange: Exchange, pool: ReplicaPool, now: float) -> None:
        """Record that the replica gets the request, which has an affinity."""

    def adopt(self, old: Any) -> None:
        """Take over what the scorer of the service's older route knows."""


@cache
def find_meters() -> type[ServiceMeters]:
    return cast(type[ServiceMeters], _find(lambda each: each.gateway_meters, ServiceMeters))


@cache
def find_scorer() -> type[ServiceScorer]:
    return cast(type[ServiceScorer], _find(lambda each: each.gateway_scorer, ServiceScorer))


def _find(pick: Callable[[Capability], str], usual: type) -> object:
    places = load_all(lambda each: (pick(each),) if pick(each) else ())
    return next((made for _, made in places), usual)
