"""Spans of requests, which OpenTelemetry's SDK (the extra `otel`) sends to a collector.

The span of a request is a child of the client's, if the request states one, and the replica gets
the span as its parent (W3C Trace Context, `traceparent`). The sampler decides about each request;
requests without a span pass the gateway unchanged.
"""

import sys
import time
from typing import Any

from cavvy import __version__
from cavvy.capabilities.serving.gateway.exchange import Exchange
from cavvy.capabilities.serving.gateway.heads import RequestHead, ResponseHead
from cavvy.capabilities.serving.gateway.own_answers import OwnAnswer
from cavvy.capabilities.serving.gateway.seams import ClientRequest, PassingSink, ResponseSink
from cavvy.capabilities.serving.gateway.service_queue import ServiceQueue
from cavvy.packages import extra_command
from cavvy.telemetry import is_wanted, make_resource

_PARENT = frozenset({b"traceparent"})
_CONTEXT = frozenset({b"traceparent", b"tracestate"})
_CONTEXT_MAX = 512  # characters
_OFFSET_NS = time.time_ns() - time.monotonic_ns()


class RequestTraces:
    """Begins the spans of requests. Raises ImportError without OpenTelemetry's SDK."""

    def __init__(self) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = make_resource("cavvy-gateway")
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("cavvy.capabilities.serving.gateway", __version__)
        self._context = TraceContextTextMapPropagator()
        self._kind = trace.SpanKind.SERVER
        self._get_span = trace.get_current_span
        self._set_span = trace.set_span_in_context

    def begin(self, request: ClientRequest, service: ServiceQueue) -> "RequestSpan | None":
        """Return the span of a request, or None if the sampler leaves the request out."""
        head, route = request.head, service.route
        stated = head.get_header(b"traceparent")
        if len(stated) > _CONTEXT_MAX:  # OpenTelemetry would log each one
            stated = b""
        parent = self._context.extract({"traceparent": stated.decode("latin-1")})
        span = self._tracer.start_span(
            head.method.decode("latin-1"),
            parent,
            self._kind,
            {
                "http.request.method": head.method.decode("latin-1"),
                "cavvy.project": route.project,
                "cavvy.service": route.label or route.name,
                "cavvy.request.id": request.id.decode("latin-1"),
            },
            start_time=_OFFSET_NS + int(request.arrived_at * 1e9),
        )
        if not span.is_recording():
            return None
        carrier: dict[str, str] = {}
        self._context.inject(carrier, self._set_span(span))
        # the state of another trace must not be mixed with a new trace
        known = self._get_span(parent).get_span_context().is_valid
        return RequestSpan(span, carrier["traceparent"].encode(), _PARENT if known else _CONTEXT)

    def close(self) -> None:
        """Send the spans that are left."""
        self._provider.shutdown()


class RequestSpan:
    """The span of a request. `exchange` is set when the request enters the queue."""

    def __init__(self, span: Any, field: bytes, replaced: frozenset[bytes]) -> None:
        self._span, self._replaced = span, replaced
        self.exchange: Exchange | None = None
        self.field = b"traceparent: %b\r\n" % field

    def strip(self, head: RequestHead) -> bytes:
        """Return the fields for the replica without those that `field` replaces."""
        return head.without(self._replaced)

    def set_status(self, status: int, code: str = "") -> None:
        if self.exchange is not None and self.exchange.started_at:
            at = _OFFSET_NS + int(self.exchange.started_at * 1e9)
            self._span.add_event("replica", timestamp=at)  # has got the request
        self._span.set_attribute("http.response.status_code", status)
        if code:
            self._span.set_attribute("error.type", code)

    def end(self, problem: str = "") -> None:
        """End the span; only the first call counts."""
        if self._span.is_recording():
            if problem:
                self._span.set_attribute("error.type", problem)
            self._span.end()


class TracedSink(PassingSink):
    """Passes a response on to `sink`, and ends the span of its request."""

    def __init__(self, sink: ResponseSink, span: RequestSpan) -> None:
        self._sink, self._span = sink, span

    @property
    def passes_chunks(self) -> bool:
        return self._sink.passes_chunks

    def respond(self, head: ResponseHead, payload: bytes, done: bool, more: bytes = b"") -> None:
        self._span.set_status(head.status, "replica" if head.status >= 500 else "")
        self._sink.respond(head, payload, done, more)

    def send(self, payload: bytes, done: bool) -> None:
        self._sink.send(payload, done)

    def switch(self, head: ResponseHead, payload: bytes) -> None:
        self._span.set_status(head.status)
        self._sink.switch(head, payload)

    def answer(self, answer: OwnAnswer) -> None:
        self._span.set_status(answer.status, answer.code)
        self._span.end()
        self._sink.answer(answer)

    def cut(self) -> None:
        self._span.end("cut")
        self._sink.cut()

    def end(self) -> None:
        self._span.end()
        self._sink.end()


def open_request_traces() -> RequestTraces | None:
    """Return what traces requests, or None if the variables name no collector for traces."""
    if not is_wanted("traces"):
        return None
    try:
        return RequestTraces()
    except ImportError as error:
        hint = f"install it where the gateway runs: {extra_command('otel')}"
        sys.stderr.write(f"gateway: no traces are sent without {error.name}; {hint}\n")
        return None
