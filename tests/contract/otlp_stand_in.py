"""A collector that takes OTLP over HTTP and refuses what the protocol does not permit. It decodes
the official protobufs.
"""

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

_KINDS = {
    "/v1/traces": (ExportTraceServiceRequest, ExportTraceServiceResponse),
    "/v1/logs": (ExportLogsServiceRequest, ExportLogsServiceResponse),
}


class OtlpStandIn:
    """`refusals` is how many requests get the status 503 first. `broken` lists what was wrong."""

    def __init__(self, refusals: int = 0) -> None:
        self.refusals = refusals
        self.requests: list[Any] = []
        self.fields: list[dict[str, str]] = []
        self.broken: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._make_handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for group in getattr(request, "resource_spans", ())
            for scope in group.scope_spans
            for span in scope.spans
        ]

    @property
    def records(self) -> list[Any]:
        return [
            record
            for request in self.requests
            for group in getattr(request, "resource_logs", ())
            for scope in group.scope_logs
            for record in scope.log_records
        ]

    def take(self, path: str, fields: dict[str, str], body: bytes) -> tuple[int, bytes]:
        if path not in _KINDS or fields.get("content-type") != "application/x-protobuf":
            self.broken.append(f"{path} {fields.get('content-type')}")
            return 400, b""
        if self.refusals:
            self.refusals -= 1
            return 503, b""
        if fields.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        kind, answer = _KINDS[path]
        request = kind.FromString(body)
        self.broken += list(_list_problems(request))
        self.fields.append(fields)
        self.requests.append(request)
        return 200, answer().SerializeToString()

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                fields = {name.lower(): value for name, value in self.headers.items()}
                status, answer = collector.take(self.path, fields, body)
                self.send_response(status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None: ...

        return Handler


def attributes(owner: Any) -> dict[str, Any]:
    found = {}
    for each in owner.attributes:
        kind = each.value.WhichOneof("value")
        found[each.key] = getattr(each.value, kind)
    return found


def _list_problems(request: Any) -> Any:
    for group in (*getattr(request, "resource_spans", ()), *getattr(request, "resource_logs", ())):
        if not attributes(group.resource).get("service.name"):
            yield "a resource has no service.name"
    seen = set()
    for group in getattr(request, "resource_spans", ()):
        for scope in group.scope_spans:
            for span in scope.spans:
                if len(span.trace_id) != 16 or not any(span.trace_id):
                    yield f"{span.name}: trace_id {span.trace_id!r}"
                if len(span.span_id) != 8 or not any(span.span_id):
                    yield f"{span.name}: span_id {span.span_id!r}"
                if len(span.parent_span_id) not in (0, 8):
                    yield f"{span.name}: parent_span_id {span.parent_span_id!r}"
                if span.span_id in seen:
                    yield f"{span.name}: two spans of a request have an id"
                seen.add(span.span_id)
                if not 0 < span.start_time_unix_nano <= span.end_time_unix_nano:
                    yield f"{span.name}: it ends before it begins"
                if not span.name:
                    yield "a span has no name"
