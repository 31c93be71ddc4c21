"""What a capability adds to the gateway for each service: a meter, and a scorer of replicas."""

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from time import monotonic
from typing import Any

import pytest

from cavvy.capabilities.serving.gateway.admission import _refuse_client
from cavvy.capabilities.serving.gateway.client_keys import SERVICE_KEY
from cavvy.capabilities.serving.gateway.config import (
    ClientKey,
    GatewayLimits,
    ReplicaAddress,
    ServiceRoute,
)
from cavvy.capabilities.serving.gateway.exchange import Exchange
from cavvy.capabilities.serving.gateway.extensions import (
    ServiceMeters,
    ServiceScorer,
    find_meters,
    find_scorer,
)
from cavvy.capabilities.serving.gateway.heads import HeadMemo
from cavvy.capabilities.serving.gateway.own_answers import AnswerCode, OwnAnswer
from cavvy.capabilities.serving.gateway.seams import ClientRequest
from cavvy.capabilities.serving.gateway.service_queue import ServiceQueue
from cavvy.frame import discover
from cavvy.frame.capability import Capability
from cavvy.frame.discover import Found


class OwnMeters(ServiceMeters): ...


class CountingMeters(ServiceMeters):
    counts_tokens = True


class Anywhere:
    """Knows of a request only that it may be sent to the replica `at`."""

    misses = binds = False
    at = 2

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *given: True


class OwnScorer(ServiceScorer):
    reads = 1

    def read(self, exchange: Exchange) -> bool:
        if exchange.affinity is None:
            if (body := exchange.read_beginning()) is None:
                return False
            exchange.affinity = None if body == b"n" else Anywhere()
        return True

    def choose(self, exchange: Exchange, loads: Sequence[int]) -> int | None:
        return exchange.affinity.at if isinstance(exchange.affinity, Anywhere) else None


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    def add(**fields: Any) -> None:
        found = Found((Capability("other", "", **fields),), {})
        monkeypatch.setattr(discover, "find_capabilities", lambda: found)
        find_meters.cache_clear()
        find_scorer.cache_clear()

    yield add
    monkeypatch.undo()
    find_meters.cache_clear()
    find_scorer.cache_clear()


def choose(queue: ServiceQueue, body: bytes) -> list[int]:
    """Return how many requests each of three replicas has after one with this body."""
    queue.set_replicas([ReplicaAddress(id=name, host="127.0.0.1", port=1) for name in "abc"])
    for pool in queue._replicas:
        pool.start = lambda exchange: None  # type: ignore[method-assign]  # nothing is sent
    parsed = queue.memo.parse_request(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\n")
    made = Exchange(None, queue.entry, parsed, b"", monotonic())  # type: ignore[arg-type]  # unused
    made.feed(body, True)
    made.begin()
    return [pool.in_flight for pool in queue._replicas]


def test_services_work_without_any(add: Callable[..., None]) -> None:
    add()
    queue = ServiceQueue(ServiceRoute(name="s"), HeadMemo(GatewayLimits()))
    assert (type(queue.meters), type(queue.scorer)) == (ServiceMeters, ServiceScorer)
    assert choose(queue, b"y") == [0, 1, 0]
    assert queue.describe().tokens.answers == 0
    assert queue.routed is None


@pytest.mark.parametrize("counts", [True, False])
def test_a_limit_of_tokens_that_nothing_counts_lets_no_request_pass(
    add: Callable[..., None], counts: bool
) -> None:
    add(gateway_meters=f"{__name__}:{'Counting' if counts else 'Own'}Meters")
    keys = [
        ClientKey(id=name, sha256=sha256(f"{SERVICE_KEY}{name}".encode()).hexdigest(), **limits)
        for name, limits in (("few", {"tokens_per_min": 9}), ("day", {"micros_per_day": 9}))
    ]
    route = ServiceRoute(name="s", keyed=True, keys=tuple(keys))
    queue = ServiceQueue(route, HeadMemo(GatewayLimits()))
    codes = {}
    for key in keys:
        fields = f"Host: a\r\nX-API-Key: {SERVICE_KEY}{key.id}\r\n\r\n"
        head = queue.memo.parse_request(f"POST / HTTP/1.1\r\n{fields}".encode())
        request = ClientRequest(None, head, monotonic(), b"")  # type: ignore[arg-type]  # unused
        answer = _refuse_client(request, queue)
        codes[key.id] = (answer.status, answer.code) if isinstance(answer, OwnAnswer) else None
    refused = None if counts else (501, AnswerCode.NO_TOKENS)
    assert codes == {"few": refused, "day": None}


@pytest.mark.parametrize(("body", "expected"), [(b"y", [0, 0, 1]), (b"n", [0, 1, 0])])
def test_a_scorer_of_a_capability_chooses_and_loads_decide_the_rest(
    add: Callable[..., None], body: bytes, expected: list[int]
) -> None:
    add(gateway_scorer=f"{__name__}:OwnScorer", gateway_meters=f"{__name__}:OwnMeters")
    queue = ServiceQueue(ServiceRoute(name="s"), HeadMemo(GatewayLimits()))
    assert isinstance(queue.meters, OwnMeters)
    assert choose(queue, body) == expected
