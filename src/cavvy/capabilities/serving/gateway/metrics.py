"""The listener from which Prometheus reads the gateway's figures, which docs/reference/metrics.md
lists. Its readers must state a token, because the figures are of all projects.

The gateway's usual listener does not answer for them: each of its paths may belong to a service.
"""

import asyncio
import contextlib
import hmac
import ssl
from collections.abc import Iterable
from math import inf
from pathlib import Path

from cavvy.capabilities.serving.addresses import explain_address
from cavvy.capabilities.serving.gateway.config import GatewayConfigError, MetricsListener
from cavvy.capabilities.serving.gateway.door import Door
from cavvy.capabilities.serving.gateway.service_queue import ServiceQueue
from cavvy.capabilities.serving.gateway.statistics import ServiceFacts
from cavvy.capabilities.serving.loads import upper_bound_of
from cavvy.telemetry import Figures, MetricsMissing, write_metrics

_HEAD_BYTES = 8192
_EXCHANGE_S = 10.0  # for a reader to send its request, and to read the answer
_READERS = 8  # at the same time; others are cut off
# upper bounds of latencies in microseconds: each is that of a bucket of `loads.bucket_of`
_BOUNDS_US = tuple(1 << power for power in range(10, 30))
_PLAIN = "text/plain; charset=utf-8"


class MetricsServer:
    """Answers `GET /metrics`."""

    def __init__(self, listener: MetricsListener, door: Door) -> None:
        self._listener = listener
        self._door = door
        self._readers = 0

    async def open(self, tls: ssl.SSLContext | None) -> asyncio.Server:
        """Raises GatewayConfigError."""
        host, port = self._listener.host, self._listener.port
        try:
            return await asyncio.start_server(self._serve, host, port, limit=_HEAD_BYTES, ssl=tls)
        except OSError as error:
            text = explain_address(host, port, error, setting="services.metrics_listen")
            raise GatewayConfigError(text) from error

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._readers += 1
        try:
            if self._readers <= _READERS:
                async with asyncio.timeout(_EXCHANGE_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(await self._answer(head))
                    await writer.drain()
        # TimeoutError is an OSError; the other two: the head is too long or not whole
        except (OSError, asyncio.LimitOverrunError, asyncio.IncompleteReadError):
            pass
        finally:
            self._readers -= 1
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, head: bytes) -> bytes:
        request, *lines = head.split(b"\r\n")
        parts = (line.partition(b":") for line in lines)
        fields = {name.lower(): value.strip() for name, _, value in parts}
        method, _, rest = request.partition(b" ")
        if rest.partition(b" ")[0].partition(b"?")[0] != b"/metrics":
            return _write("404 Not Found", "the figures are at /metrics\n")
        if method != b"GET":
            return _write("405 Method Not Allowed", "only GET is answered\n", "Allow: GET\r\n")
        if not self._is_known(fields.get(b"authorization", b"")):
            text = f"state the token in {self._listener.token_file}: Authorization: Bearer TOKEN\n"
            return _write("401 Unauthorized", text, "WWW-Authenticate: Bearer\r\n")
        figures = Figures()
        for service in self._door.services.values():
            _add_service(figures, service)
        accept = fields.get(b"accept", b"").decode("latin-1")
        try:  # in a thread, because requests of clients must not wait for it
            body, kind = await asyncio.to_thread(write_metrics, figures, accept, process=True)
        except MetricsMissing as error:
            return _write("501 Not Implemented", f"{error}; {error.hint}\n")
        return _write("200 OK", body, kind=kind)

    def _is_known(self, authorization: bytes) -> bool:
        """Return whether the reader states the token. The file may have been replaced."""
        try:
            token = Path(self._listener.token_file).read_bytes().strip()
        except OSError:
            return False
        scheme, _, stated = authorization.partition(b" ")
        return bool(token) and scheme.lower() == b"bearer" and hmac.compare_digest(stated, token)


def _write(status: str, body: str | bytes, fields: str = "", kind: str = _PLAIN) -> bytes:
    content = body.encode() if isinstance(body, str) else body
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n"
    return f"{head}{fields}Connection: close\r\n\r\n".encode("latin-1") + content


def _add_service(figures: Figures, service: ServiceQueue) -> None:
    facts, route = service.describe(), service.route
    labels = {"project": route.project, "service": route.label or route.name}
    results = {
        "answered": facts.answered,
        "lost": facts.lost,
        "unserved": facts.unserved,
        "refused": facts.refused - facts.unserved,
        "aborted": facts.aborted,
    }
    for result, count in results.items():
        name, text = "cavvy_gateway_requests", "Ended requests."
        figures.add(name, text, count, kind="counter", **labels, result=result)
    for name, text, value in _list_counters(facts):
        figures.add(name, text, value, kind="counter", **labels)
    for name, text, level in (
        ("cavvy_gateway_in_flight", "Requests that replicas work on.", facts.in_flight),
        ("cavvy_gateway_waiting", "Requests that wait for a replica.", facts.backlog),
        (
            "cavvy_gateway_replicas",
            "Replicas that get requests, or finish some.",
            len(facts.replicas),
        ),
        ("cavvy_gateway_cold_start_seconds", "The usual time of a cold start.", facts.cold_start_s),
    ):
        figures.add(name, text, level, **labels)
    figures.set_histogram(
        "cavvy_gateway_request_seconds",
        "Time from a request's arrival to the last byte of its answer.",
        _count_latencies(facts.latency_us),
        service.counters.latency_s,
        **labels,
    )
    labels_of = {each.id: each.label for each in route.fallbacks}
    for fallback, count in facts.fallbacks.items():
        name, text = "cavvy_gateway_fallbacks", "Answers that a fallback gave."
        if shown := labels_of.get(fallback):
            figures.add(name, text, count, kind="counter", **labels, fallback=shown)
    used = service.sum_tokens()
    for kind, tokens in (
        ("prompt", used.prompt),
        ("cached", used.cached),
        ("completion", used.completion),
    ):
        name, text = "cavvy_gateway_tokens", "Tokens of language models."
        figures.add(name, text, tokens, kind="counter", **labels, type=kind)
    if (routed := service.routed) is not None:
        for cache, prompts, tokens in (
            ("hit", routed.hits, routed.held_tokens),
            ("miss", routed.misses, routed.other_tokens),
        ):
            name, text = "cavvy_gateway_routed_prompts", "Prompts by whether the replica knew them."
            figures.add(name, text, prompts, kind="counter", **labels, cache=cache)
            name, text = "cavvy_gateway_routed_tokens", "Tokens of these prompts."
            figures.add(name, text, tokens, kind="counter", **labels, cache=cache)


def _list_counters(facts: ServiceFacts) -> Iterable[tuple[str, str, float]]:
    return (
        ("cavvy_gateway_arrivals", "Requests that have arrived.", facts.arrivals),
        ("cavvy_gateway_retries", "Requests that were sent to a second replica.", facts.retried),
        ("cavvy_gateway_late", "Requests that waited longer than the service aims at.", facts.late),
        ("cavvy_gateway_slow", "Answers that took longer than the service aims at.", facts.slow),
        ("cavvy_gateway_wait_seconds", "The sum of the waits for a replica.", facts.waited_s),
        ("cavvy_gateway_cold_starts", "Cold starts that have ended.", facts.cold_starts),
    )


def _count_latencies(buckets: dict[int, int]) -> dict[float, int]:
    """Return the number of requests for each upper bound in seconds."""
    counts = dict.fromkeys([*(bound / 1e6 for bound in _BOUNDS_US), inf], 0)
    for bucket, count in buckets.items():
        upper = upper_bound_of(bucket)
        bound = next((each for each in _BOUNDS_US if upper <= each), None)
        counts[inf if bound is None else bound / 1e6] += count
    return counts
