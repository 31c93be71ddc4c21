"""The HTTP door of a device: passes each request for a model to the engine that serves it, and
counts the answers. While a version is on trial, its engine gets all requests of the model, and a
request that it refuses or fails is repeated at the engine of the served version.

The paths are those of the Open Inference Protocol (version 2) and of the prediction API of
TensorFlow Serving; the model's name is the part after `/v2/models/` or `/v1/models/`.
"""

from __future__ import annotations

import http.client
import json
import math
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_MOST_BYTES = 64 << 20  # of a body
_TIMEOUT_S = 60.0
_MODEL = re.compile(r"/v[12]/models/([a-z0-9-]+)(?=[/:?]|$)")
_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length", "host", "te", "upgrade")


class EngineTarget:
    """An engine that serves a version on a port of this device, and the sums over its answers, in
    the form of `domain.service_updates.RevisionSums`."""

    def __init__(self, number: int, port: int) -> None:
        self.number, self.port = number, port
        self._lock = threading.Lock()
        self._sums: dict[str, float] = dict.fromkeys(
            ("requests", "errors", "timed", "logs", "squares"), 0
        )
        self.busy = 0

    def ask(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, str, bytes]:
        """Send a request, and return the status, the content type and the body of its answer.
        Raises OSError, HTTPException."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT_S)
        return exchange(line, method, path, body, headers)

    @property
    def sums(self) -> dict[str, float]:
        with self._lock:
            return dict(self._sums)

    def count(self, seconds: float, *, failed: bool) -> None:
        with self._lock:
            self._sums["requests"] += 1
            if failed:
                self._sums["errors"] += 1
                return
            log = math.log(max(seconds, 1e-6))
            self._sums["timed"] += 1
            self._sums["logs"] += log
            self._sums["squares"] += log * log


class CloudTarget(EngineTarget):
    """A service in the cloud, for requests that this device cannot answer. `key` is a key of the
    service."""

    def __init__(self, url: str, key: str) -> None:
        super().__init__(0, 0)
        parts = urlsplit(url)
        self._secure, self._where, self._prefix = parts.scheme == "https", parts.netloc, parts.path
        self._key = key

    def ask(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, str, bytes]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        sent = {name: value for name, value in headers.items() if name.lower() != "authorization"}
        if self._key:
            sent["Authorization"] = f"Bearer {self._key}"
        return exchange(
            kind(self._where, timeout=_TIMEOUT_S), method, self._prefix + path, body, sent
        )


class EdgeFront(ThreadingHTTPServer):
    """Listens for requests. `routes` names the engines of a model, in the order in which they are
    tried. `keep`, if set, is called with each answered request and its answer. `cloud` is a service
    that gets the requests which no engine of this device answers."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int]) -> None:
        self.routes: dict[str, list[EngineTarget]] = {}
        self.keep: Callable[[str, int, bytes, bytes], None] | None = None
        self.cloud: CloudTarget | None = None
        super().__init__(address, _FrontHandler)


class _FrontHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: EdgeFront

    def do_GET(self) -> None:
        self._pass(b"")

    def do_HEAD(self) -> None:
        self._pass(b"")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MOST_BYTES:
            self.close_connection = True
            self._answer(411, {"error": f"a Content-Length of at most {_MOST_BYTES} is needed"})
            return
        self._pass(self.rfile.read(int(length)))

    def _pass(self, body: bytes) -> None:
        found = _MODEL.match(self.path)
        if self.path in ("/v2/health/live", "/v2/health/ready"):
            ready = bool(self.server.routes) or self.path.endswith("live")
            self._answer(200 if ready else 503, {})
            return
        cloud = self.server.cloud
        if found is None or (found[1] not in self.server.routes and cloud is None):
            known = ", ".join(sorted(self.server.routes)) or "no model yet"
            self._answer(404, {"error": f"there is no {self.path}; this device serves {known}"})
            return
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
        targets = [*self.server.routes.get(found[1], ()), *([] if cloud is None else [cloud])]
        for target in targets:
            started = time.perf_counter()
            try:
                target.busy += 1
                status, kind, answer = target.ask(self.command, self.path, body, headers)
            except (OSError, http.client.HTTPException) as error:
                told = f"{found[1]} gave no answer on this device: {error}"
                status, kind, answer = 502, "application/json", json.dumps({"error": told}).encode()
            finally:
                target.busy -= 1
            counts = self.command == "POST"
            if counts:
                # A model that cannot compute a request refuses it with 400, as wrong requests are.
                target.count(time.perf_counter() - started, failed=status >= 400)
            follows = targets[targets.index(target) + 1 :]
            # The cloud gets what this device cannot answer, and not what it has refused.
            if follows and (status >= 500 or (status >= 400 and follows[0] is not cloud)):
                continue
            self._send(status, kind, answer, "cloud" if target is cloud else "device")
            if counts and status == 200 and self.server.keep is not None:
                self.server.keep(found[1], target.number, body, answer)
            return

    def _answer(self, status: int, body: Any) -> None:
        self._send(status, "application/json", json.dumps(body).encode())

    def _send(self, status: int, kind: str, body: bytes, by: str = "device") -> None:
        self.send_response(status)
        if kind:
            self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cavvy-Answered-By", by)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, *arguments: Any) -> None:
        """Do nothing: the counts say how many requests there were."""


def exchange(
    line: http.client.HTTPConnection, method: str, path: str, body: bytes, headers: dict[str, str]
) -> tuple[int, str, bytes]:
    """Send a request over a new connection, and return the status, the content type and the body of
    its answer. Raises OSError, HTTPException."""
    try:
        line.request(method, path, body or None, headers)
        reply = line.getresponse()
        return reply.status, reply.getheader("Content-Type", ""), reply.read()
    finally:
        line.close()
