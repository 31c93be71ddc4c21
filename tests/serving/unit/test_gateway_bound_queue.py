"""The work of the gateway's queue grows in proportion to what arrives."""

import asyncio
from collections.abc import Sequence
from heapq import heappop, heappush
from random import Random
from time import monotonic

import pytest
from tests.contract.gateway_suite import of_models

from cavvy.capabilities.serving.gateway.config import (
    ClientKey,
    FallbackTarget,
    GatewayLimits,
    ReplicaAddress,
    RoutingTerms,
    ServiceRoute,
)
from cavvy.capabilities.serving.gateway.exchange import Exchange
from cavvy.capabilities.serving.gateway.fallbacks import Fallbacks
from cavvy.capabilities.serving.gateway.heads import HeadMemo
from cavvy.capabilities.serving.gateway.own_answers import AnswerCode, OwnAnswer
from cavvy.capabilities.serving.gateway.service_queue import ServiceQueue
from cavvy.capabilities.serving.gateway.statistics import WaitingLine
from cavvy.capabilities.serving.gateway.upstream import UpstreamConnection

EU = b"GET / HTTP/1.1\r\nHost: a\r\nCavvy-Residency: eu\r\n\r\n"
ANYWHERE = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


class CountedExchange(Exchange):
    """A request that counts how often the queue looks at waiting ones."""

    looks = 0

    @property
    def is_bound(self) -> bool:
        type(self).looks += 1
        return super().is_bound


class SilentSink:
    """A client that waits, and to which nothing is sent."""

    def answer(self, answer: OwnAnswer) -> None:
        raise AssertionError(answer)

    def want_body(self) -> None: ...


def admit(queue: ServiceQueue, head: bytes) -> Exchange:
    parsed = queue.memo.parse_request(head)
    made = CountedExchange(SilentSink(), queue.entry, parsed, b"", monotonic())  # type: ignore[arg-type]  # nothing is answered
    queue.enter(made)
    return made


async def test_a_new_request_is_not_compared_with_all_that_wait() -> None:
    queue = ServiceQueue(ServiceRoute(name="chat"), HeadMemo(GatewayLimits()))
    waiting = [admit(queue, EU) for _ in range(500)]
    assert queue.describe().backlog == 500
    assert CountedExchange.looks <= 3 * 500
    free = admit(queue, ANYWHERE)
    waiting.append(admit(queue, EU))
    for each in [free, *waiting]:
        queue.leave(each)
        each.timer.cancel() if each.timer else None
    assert queue.describe().backlog == 0


@pytest.mark.parametrize(("size", "repeated"), [(2 << 20, False), (1 << 20, True)])
def test_a_request_is_not_repeated_without_its_body(size: int, repeated: bool) -> None:
    queue = ServiceQueue(ServiceRoute(name="chat"), HeadMemo(GatewayLimits()))
    head = b"PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size
    parsed = queue.memo.parse_request(head)
    for pieces in ([size], [size // 2] * 2):
        request = Exchange(SilentSink(), queue.entry, parsed, b"head", monotonic())  # type: ignore[arg-type]  # as above
        for number, length in enumerate(pieces, 1):
            request.feed(bytes(length), number == len(pieces))
        assert len(request.take_bytes()) == size + len(b"head")  # the first replica has all
        assert request.can_retry() is repeated


@of_models
def test_a_body_that_arrives_byte_by_byte_is_not_copied_for_each_byte() -> None:
    route = ServiceRoute(name="chat", routing=RoutingTerms(by="cache"))
    queue = ServiceQueue(route, HeadMemo(GatewayLimits()))
    request = admit(queue, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n")
    request.feed(b"{", False)
    held = request._read
    request.feed(b"}", False)
    assert request._read is held


class ToldSink(SilentSink):
    """A client that remembers how its request was refused."""

    def __init__(self) -> None:
        self.told: list[OwnAnswer] = []

    def answer(self, answer: OwnAnswer) -> None:
        self.told.append(answer)


class Guard:
    """Stands for fallbacks."""

    def silence(self) -> bool:
        return False


async def refuse_late(
    slots_max: int, guard: Guard | None = None, elsewhere: int = 0, keys: Sequence[str] = ("",)
) -> tuple[int, OwnAnswer | None]:
    """Return how many requests may wait at a busy replica that needs 10 s for each, while each
    waits for at most 30 s, and the answer to the next request. Others wait for a replica that is
    elsewhere. When the first key's requests are refused, those of the next key follow.
    """
    queue = ServiceQueue(
        ServiceRoute(
            name="chat",
            wait_s=30,
            concurrency=1,
            slots_max=slots_max,
            models=("m",),
            keys=tuple(ClientKey(id=each, sha256="0" * 64) for each in keys),
        ),
        HeadMemo(GatewayLimits()),
    )
    queue.set_replicas([ReplicaAddress(id="r", host="127.0.0.1", port=1)])
    queue._replicas[0].in_flight = 1
    queue._set_load(queue._replicas[0])
    parsed, waiting = queue.memo.parse_request(ANYWHERE), []
    bound = [admit(queue, EU) for _ in range(elsewhere)]
    left = list(keys)
    while left:
        sink = ToldSink()
        made = Exchange(sink, queue.entry, parsed, b"", monotonic())  # type: ignore[arg-type]  # nothing else is called
        made.guard, made.key_id = guard, left[0]
        queue.enter(made)
        if sink.told:
            del left[0]
            continue
        waiting.append(made)
        if len(waiting) == 1:
            for _ in range(20):
                queue._line.record(1, 10.0)
    for each in [*waiting, *bound]:
        queue.leave(each)
        each.timer.cancel() if each.timer else None
    assert queue._line.predict_s(1) is None
    return len(waiting), sink.told[0] if sink.told else None


async def test_a_request_is_refused_at_once_if_it_would_surely_wait_too_long() -> None:
    waiting, refused = await refuse_late(slots_max=1)
    assert waiting == 3  # the fourth would wait for 30 s, and for the end of the running request
    assert refused is not None
    assert (refused.status, refused.code, refused.retry_s) == (429, AnswerCode.QUEUE_FULL, 5)
    assert refused.message == "the request would wait for about 35 s, and may wait for 30 s"


async def test_requests_that_wait_for_another_place_are_not_ahead() -> None:
    assert (await refuse_late(slots_max=1, elsewhere=50))[0] == 3


async def test_requests_of_a_key_that_has_few_are_not_behind_all_of_another() -> None:
    assert (await refuse_late(slots_max=1, keys=("many", "few")))[0] > 3


async def test_a_full_queue_refuses_the_lowest_priority_first() -> None:
    """Also of services that are no language models."""
    keys = [
        ClientKey(id=name, sha256="0" * 64, priority=priority)
        for priority, name in enumerate(("low", "usual", "high"))
    ]
    route = ServiceRoute(name="web", queue_max=2, keys=tuple(keys))
    queue = ServiceQueue(route, HeadMemo(GatewayLimits()))
    parsed, sinks = queue.memo.parse_request(ANYWHERE), list[ToldSink]()
    made: list[Exchange] = []
    for key in ("low", "low", "usual", "low", "high", "usual", "high", "high"):
        sinks.append(ToldSink())
        each = Exchange(sinks[-1], queue.entry, parsed, b"", monotonic())  # type: ignore[arg-type]  # as above
        each.key_id = key
        queue.enter(each)
        made.append(each)
    refused = [[answer.status for answer in each.told] for each in sinks]
    assert refused == [[429], [429], [429], [429], [], [429], [], [429]]
    facts = queue.describe()
    assert (facts.backlog, facts.unserved, facts.shed) == (2, 6, 6)
    for each in made:
        queue.leave(each)
        each.timer.cancel() if each.timer else None


async def test_replicas_that_may_start_count_unless_a_fallback_answers_now() -> None:
    assert (await refuse_late(slots_max=4))[0] == 11
    waiting, refused = await refuse_late(slots_max=4, guard=Guard())
    assert (waiting, refused is None) == (3, False)


async def test_a_measured_cold_start_sends_requests_to_fallbacks_at_once() -> None:
    told: list[str] = []
    route = ServiceRoute(name="chat", wait_s=5)
    queue = ServiceQueue(route, HeadMemo(GatewayLimits()), told.append)
    queue._cold_starts.estimate_s, queue._cold_starts.count = 60.0, 1
    parsed = queue.memo.parse_request(ANYWHERE)
    sink = ToldSink()
    made = Exchange(sink, queue.entry, parsed, b"", monotonic())  # type: ignore[arg-type]  # as above
    made.guard = Guard()
    queue.enter(made)
    assert [each.code for each in sink.told] == [AnswerCode.TOO_LATE]
    assert told == ["chat"], "a replica starts all the same"
    waits = admit(queue, ANYWHERE)  # without fallbacks
    queue.leave(waits)
    assert waits.timer is not None
    waits.timer.cancel()


def test_an_image_in_a_body_does_not_count_as_a_book() -> None:
    """No request is expected to take longer than the longest that was measured."""
    line = WaitingLine()
    line.enter(2_500_000)  # an image of 10 MB in base64
    for number in range(40):
        tokens = 500 + 50 * number
        line.record(tokens, 1 + tokens / 1000)
    wait_s = line.predict_s(1)
    assert wait_s is not None
    assert wait_s <= 1.5 * (1 + 2.45)


def test_predicted_waits_are_those_of_a_busy_service() -> None:
    """Prompts of very different lengths arrive at twice the rate that 4 slots can serve."""
    draw, line, limit_s = Random(7), WaitingLine(), 20.0
    free_at, waiting = [0.0] * 4, list[tuple[float, float, int]]()
    late = refused = worse = at = 0.0
    ends: list[tuple[float, int, float]] = []
    for _ in range(4000):
        at += draw.expovariate(2.0)
        while waiting and min(free_at) <= at:
            arrived, taken, tokens = waiting.pop(0)
            slot = free_at.index(min(free_at))
            start = max(free_at[slot], arrived)
            while ends and ends[0][0] <= start:
                _, size, busy = heappop(ends)
                line.record(size, busy)
            line.leave(tokens)
            late += start - arrived > limit_s
            worse += start - arrived > 1.15 * limit_s
            free_at[slot] = start + taken
            heappush(ends, (start + taken, tokens, taken))
        tokens = draw.choice((100, 1000, 8000))
        predicted = line.predict_s(4)
        if predicted is not None and predicted * 1.1 > limit_s:
            refused += 1
            continue
        line.enter(tokens)
        waiting.append((at, (0.5 + tokens / 1000) * draw.uniform(0.5, 1.5), tokens))
    assert 1500 < refused < 1900  # the slots can serve 2,270 of 4,000
    assert late < 0.1 * (4000 - refused)
    assert worse < 20


class CountedFallbacks(Fallbacks):
    """Counts the look-ups of hosts."""

    looks = 0

    def __getattribute__(self, name: str) -> object:
        if name == "private_targets":
            CountedFallbacks.looks += 1
        return super().__getattribute__(name)


async def test_connections_to_an_api_share_a_look_up_of_its_host() -> None:
    target = FallbackTarget(id="api-1", label="a", url="http://127.0.0.1:9/v1", model="m")
    memo = HeadMemo(GatewayLimits())
    service = ServiceQueue(ServiceRoute(name="chat", fallbacks=(target,)), memo)
    api = CountedFallbacks(memo, lambda name: None).find_api(service, target)

    def make() -> UpstreamConnection:
        raise AssertionError("the address is private")

    for looks in (1, 2):
        tries = [api._dial(make) for _ in range(50)]
        denied = await asyncio.gather(*tries, return_exceptions=True)
        assert {type(each) for each in denied} == {OSError}
        assert CountedFallbacks.looks == looks
