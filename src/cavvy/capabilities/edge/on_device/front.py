"""The HTTP door of a device: passes each request for a model to the engine that serves it, and
counts the answers. While a version is on trial, its engine gets all requests of the model, and a
request that it refuses or fails is repeated at the engine of the served version. Requests that no
engine can answer now go to a service in the cloud, if the model has one.

An engine rests after a connection that fails, an answer that does not come in time, and three
failures in a row; then one request tries it, and others follow when it is answered. An engine is
overloaded while the wait that its last answers let expect is too long (Little's law: the number of
open requests times the mean gap between two answers). Engines that rest or are overloaded are tried
last, so that a device without a cloud works as before.

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
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_TOO_MANY = 429  # a status
_REFUSED = (401, 402, 403, 404)  # with these a service takes no request at all from the device
_MOST_BYTES = 64 << 20  # of a body
_TIMEOUT_S = 60.0
_CONNECT_S = 1.0  # within which an engine or a cloud must accept a connection
# An answer may take this multiple of the usual time, and at least _PATIENCE_S, before the request
# goes on to the next target; until an engine has answered once, it may take _FIRST_S.
_PATIENCE, _PATIENCE_S, _FIRST_S = 10.0, 1.0, 10.0
_OVERLOAD_S = 1.0  # expected wait, or twice the time of a quick answer if that is longer
_FAILURES = 3  # in a row, after which an engine rests
_REST_S, _LONGEST_REST_S = 0.5, 2.0  # doubled while the engine goes on failing
# An engine is started again after _FAILURES late answers in a row that lie this far apart.
_STUCK_S = 30.0
_NEW = 0.1  # the weight of the newest answer in mean values
_MOST_COUNTED = 64  # models, because callers may name any
_MODEL = re.compile(r"/v[12]/models/([a-z0-9-]+)(?=[/:?]|$)")
_BROKEN = re.compile(r"[\r\n\0]")  # in the value of a header
_PATH = re.compile(r"[!-~]+")  # printable ASCII without spaces, which http.client takes
_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length", "host", "te", "upgrade")
# Times of answers are counted in buckets, four for each power of two. Bucket 0 is for answers
# within LEAST_S seconds, and the last one for all longer ones.
LEAST_S, BUCKETS = 1e-4, 84


class EngineTarget:
    """An engine that serves a version on a port of this device, and the sums over its answers, in
    the form of `domain.service_updates.RevisionSums`. While it is asleep, its engine does not run:
    a request waits, and `wanted` says that the engine has to be started."""

    def __init__(self, number: int, port: int) -> None:
        self.number, self.port = number, port
        self.wanted, self.asked_at = False, 0.0  # the time of the last request
        self._awake = threading.Event()
        self._awake.set()
        self._lock = threading.Lock()
        self._sums: dict[str, float] = dict.fromkeys(
            ("requests", "errors", "timed", "logs", "squares"), 0
        )
        self.busy = 0
        self._usual_s = self._quick_s = self._gap_s = self._gap_since = 0.0
        self._failed, self._rest_s, self._rested_at, self._rest_until = 0, 0.0, 0.0, 0.0
        self._silent_since: float | None = None
        self._late_at = 0.0

    def ask(
        self, method: str, path: str, body: bytes, headers: dict[str, str], wait_s: float
    ) -> tuple[int, str, bytes]:
        """Send a request, and return the status, the content type and the body of its answer.
        Raises OSError, HTTPException."""
        if not self._awake.is_set():
            self.wanted = True
            if not self._awake.wait(wait_s):
                raise TimeoutError("its engine did not start in time")
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_CONNECT_S)
        return exchange(line, method, path, body, headers, wait_s)

    @property
    def asleep(self) -> bool:
        return not self._awake.is_set()

    def sleep(self) -> None:
        self.wanted = False
        self._awake.clear()

    def wake(self, port: int) -> None:
        """Pass requests to the engine that was started on a port, also those that wait."""
        self.port = port
        with self._lock:  # what was late while it slept says nothing about this engine
            self._failed, self._rest_s, self._silent_since = 0, 0.0, None
        self._awake.set()

    @property
    def sums(self) -> dict[str, Any]:
        with self._lock:
            return dict(self._sums)

    @property
    def is_stuck(self) -> bool:
        """Whether requests have had no answer in time for so long that the engine must hang."""
        with self._lock:
            since, late_at = self._silent_since, self._late_at
            return since is not None and late_at - since > _STUCK_S and self._failed >= _FAILURES

    def patience_s(self) -> float:
        """Return how long an answer may take while something else can answer."""
        usual_s = self._usual_s
        wait_s = max(_PATIENCE_S, _PATIENCE * usual_s) if usual_s else _FIRST_S
        return min(_TIMEOUT_S, wait_s)

    def takes(self) -> bool:
        """Return whether the target should get a request now: it does not rest, and is not
        overloaded. After a rest, one request tries it."""
        now = time.monotonic()
        if self.asleep:
            return False
        with self._lock:
            if self._rest_s:
                if now < self._rest_until:
                    return False
                self._rest_until = now + self._rest_s
                return True
            return not self._is_overloaded()

    def _is_overloaded(self) -> bool:
        return self.busy * self._gap_s > max(_OVERLOAD_S, 2 * self._quick_s)

    def begin(self) -> float:
        """Note that a request begins, and return the time."""
        now = self.asked_at = time.monotonic()
        with self._lock:
            if not self.busy:
                self._gap_since = now
            self.busy += 1
        return now

    def end(self, begun: float, *, status: int, late: bool, counts: bool) -> None:
        """Note the end of a request: its status, or 0 without an answer; `late` if the answer did
        not come in time. A model that cannot compute a request refuses it with 400, as wrong
        requests are, so that these count as errors of the version but are no reason for a rest."""
        now = time.monotonic()
        with self._lock:
            self.busy -= 1
            if counts:
                self._count(now - begun, failed=not 0 < status < 400)
            if status and status < 500:
                self._note_answer(now, now - begun)
            else:
                self._note_failure(begun, now, late=late, at_once=not status)

    def _note_answer(self, now: float, seconds: float) -> None:
        usual_s, gap_s = self._usual_s or seconds, now - self._gap_since
        self._usual_s = (1 - _NEW) * usual_s + _NEW * seconds
        self._quick_s = min(1.01 * (self._quick_s or seconds), seconds)
        self._gap_s = (1 - _NEW) * self._gap_s + _NEW * gap_s
        self._gap_since = now
        self._failed, self._rest_s, self._silent_since = 0, 0.0, None

    def _note_failure(self, begun: float, now: float, *, late: bool, at_once: bool) -> None:
        self._failed += 1
        if late:
            self._late_at = now
            self._silent_since = now if self._silent_since is None else self._silent_since
        if self._rest_s and begun < self._rested_at:
            return  # a request that began before the rest says nothing new
        if at_once or self._rest_s or self._failed >= _FAILURES:
            self._rest_s = min(_LONGEST_REST_S, 2 * self._rest_s or _REST_S)
            self._rested_at, self._rest_until = now, now + self._rest_s

    def _count(self, seconds: float, *, failed: bool) -> None:
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
    service. It scales by itself, so it is never overloaded."""

    def __init__(self, url: str, key: str) -> None:
        super().__init__(0, 0)
        self.url, self.key = url, key
        parts = urlsplit(url)
        self._secure, self._where, self._prefix = parts.scheme == "https", parts.netloc, parts.path

    def patience_s(self) -> float:
        return _TIMEOUT_S

    def ask(
        self, method: str, path: str, body: bytes, headers: dict[str, str], wait_s: float
    ) -> tuple[int, str, bytes]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        sent = {name: value for name, value in headers.items() if name.lower() != "authorization"}
        if self.key:
            sent["Authorization"] = f"Bearer {self.key}"
        line = kind(self._where, timeout=2 * _CONNECT_S)
        return exchange(line, method, self._prefix + path, body, sent, wait_s)

    def _is_overloaded(self) -> bool:
        return False

    def end(self, begun: float, *, status: int, late: bool, counts: bool) -> None:
        """Note the end of a request, also that of one which the service refuses, as a failure."""
        failed = status in _REFUSED or status == _TOO_MANY
        super().end(begun, status=503 if failed else status, late=late, counts=counts)


class AnswerCounts:
    """What became of the requests for one model since the program started: the answers of the
    device and of the cloud, by the bucket of the time since the request came, and the requests
    that neither answered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[str, Counter[int]] = {"device": Counter(), "cloud": Counter()}
        self._lost = 0

    def note(self, by: str, status: int, seconds: float) -> None:
        with self._lock:
            if status >= 500 or status == _TOO_MANY or (by == "cloud" and status in _REFUSED):
                self._lost += 1
            else:
                self._answers[by][bucket_of(seconds)] += 1

    def tell(self) -> dict[str, Any]:
        """Return the counts in the form of `domain.edge.PathCounts`."""
        with self._lock:
            told = {by: dict(counted) for by, counted in self._answers.items()}
            return {**told, "lost": self._lost}


def _make_failure(text: str) -> tuple[int, str, bytes]:
    return 502, "application/json", json.dumps({"error": text}).encode()


def bucket_of(seconds: float) -> int:
    """Return the bucket of a time."""
    if seconds <= LEAST_S:
        return 0
    return min(BUCKETS - 1, math.ceil(4 * math.log2(seconds / LEAST_S)))


class EdgeFront(ThreadingHTTPServer):
    """Listens for requests. `routes` names the engines of a model, in the order in which they are
    tried. `keep`, if set, is called with each answered request and its answer. `clouds` are the
    services that get requests for a model which no engine of this device answers, and `cloud` is
    the one for all other models. `counts` are those of each model that was served."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int]) -> None:
        self.routes: dict[str, list[EngineTarget]] = {}
        self.keep: Callable[[str, int, bytes, bytes], None] | None = None
        self.clouds: dict[str, CloudTarget] = {}
        self.cloud: CloudTarget | None = None
        self.counts: dict[str, AnswerCounts] = {}
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
        body = self.rfile.read(int(length))
        if len(body) < int(length):  # the caller is gone: a part of its request says nothing
            self.close_connection = True
            with suppress(OSError):
                self._answer(400, {"error": f"only {len(body)} of {length} bytes came"})
            return
        self._pass(body)

    def _pass(self, body: bytes) -> None:
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
        if not _PATH.fullmatch(self.path) or any(map(_BROKEN.search, headers.values())):
            self._answer(400, {"error": "the path or a header has a character that HTTP forbids"})
            return
        found = _MODEL.match(self.path)
        if self.path in ("/v2/health/live", "/v2/health/ready"):
            ready = bool(self.server.routes) or self.path.endswith("live")
            self._answer(200 if ready else 503, {})
            return
        server = self.server
        cloud = None if found is None else server.clouds.get(found[1], server.cloud)
        if found is None or (found[1] not in server.routes and cloud is None):
            known = ", ".join(sorted(server.routes)) or "no model yet"
            self._answer(404, {"error": f"there is no {self.path}; this device serves {known}"})
            return
        targets = [*server.routes.get(found[1], ()), *([] if cloud is None else [cloud])]
        if len(targets) > 1:
            targets.sort(key=lambda each: not each.takes())
        counts, arrived = self.command == "POST", time.monotonic()
        while targets:
            target = targets.pop(0)
            status, kind, answer = self._ask(found[1], target, body, headers, bool(targets))
            if target is cloud and targets and status in _REFUSED:
                continue  # the fault lies with the device's key or the service, not the request
            if target is not cloud and 400 <= status < 500 and status != _TOO_MANY:
                # Another engine may compute it. The cloud does not get what a device has refused.
                targets.sort(key=lambda each: each is cloud)
                if targets and targets[0] is not cloud:
                    continue
            elif targets and (status >= 500 or status == _TOO_MANY):
                continue
            by = "cloud" if target is cloud else "device"
            if counts and (found[1] in server.counts or len(server.counts) < _MOST_COUNTED):
                taken_s = time.monotonic() - arrived
                server.counts.setdefault(found[1], AnswerCounts()).note(by, status, taken_s)
            self._send(status, kind, answer, by)
            if counts and status == 200 and server.keep is not None:
                server.keep(found[1], target.number, body, answer)
            return

    def _ask(
        self, model: str, target: EngineTarget, body: bytes, headers: dict[str, str], more: bool
    ) -> tuple[int, str, bytes]:
        """Ask a target, which has less time if there are more that could answer."""
        begun, status, late = target.begin(), 0, False
        try:
            wait_s = target.patience_s() if more else _TIMEOUT_S
            status, kind, answer = target.ask(self.command, self.path, body, headers, wait_s)
        except (OSError, http.client.HTTPException) as error:
            late = isinstance(error, TimeoutError)
            return _make_failure(f"{model} gave no answer on this device: {error}")
        except ValueError:  # its text would have the key
            return _make_failure(f"the key of the service for {model} cannot be sent over HTTP")
        finally:
            target.end(begun, status=status, late=late, counts=self.command == "POST")
        return status, kind, answer

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
    line: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes,
    headers: dict[str, str],
    wait_s: float,
) -> tuple[int, str, bytes]:
    """Send a request over a new connection, and return the status, the content type and the body of
    its answer, each part of which may take `wait_s`. Raises OSError, HTTPException."""
    try:
        line.connect()
        line.sock.settimeout(wait_s)
        line.request(method, path, body or None, headers)
        reply = line.getresponse()
        return reply.status, reply.getheader("Content-Type", ""), reply.read()
    finally:
        line.close()
