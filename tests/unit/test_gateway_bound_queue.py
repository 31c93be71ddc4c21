"""The work of the gateway's queue grows in proportion to what arrives."""

from time import monotonic

from cavvy.gateway.config import GatewayLimits, RoutingTerms, ServiceRoute
from cavvy.gateway.exchange import Exchange
from cavvy.gateway.heads import HeadMemo
from cavvy.gateway.own_answers import OwnAnswer
from cavvy.gateway.service_queue import ServiceQueue

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


def test_a_body_that_arrives_byte_by_byte_is_not_copied_for_each_byte() -> None:
    route = ServiceRoute(name="chat", routing=RoutingTerms(by="cache"))
    queue = ServiceQueue(route, HeadMemo(GatewayLimits()))
    request = admit(queue, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n")
    request.feed(b"{", False)
    held = request._read
    request.feed(b"}", False)
    assert request._read is held
