"""Callers of services that check each answer, while the processes around the services are killed.

Each request has an ID of its own. The replicas write the ID of each request that they receive to
one file, and answer with the service, the ID and a digest of the body, so that an answer of another
request is noticed.
"""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from random import Random

from tests.waits import START_S

from cavvy.capabilities.serving.call_wire import QueuedCallAsk, submit_call
from cavvy.capabilities.serving.decide.webhook_calls import sign_standard
from cavvy.client import ApiClient, ApiError

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
EVENTS = 4  # of each stream
# It writes each request to the file argv[3], and answers the others, which are probes, with nothing.
PROGRAM = """
import hashlib, json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SERVICE, PORT, FILE = sys.argv[1:4]
RECORD = os.open(FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

class Recorder(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name = self.headers.get("X-Drill") or self.headers.get("ce-id")
        if name is None:
            return self.answer(b"")
        line = {"id": name, "service": SERVICE, "via": self.headers.get("X-Via", ""),
                "replica": int(PORT), "at": time.time()}
        os.write(RECORD, json.dumps(line).encode() + bytes([10]))
        time.sleep(0.01)
        if self.path.endswith("/events"):
            return self.stream(name)
        self.answer(f"{SERVICE} {name} {hashlib.sha256(body).hexdigest()[:16]}".encode())

    do_GET = do_POST

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self, name):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(EVENTS):
            event = f"data: {SERVICE} {name} {number}" + chr(10) * 2
            self.wfile.write(f"{len(event):x}\\r\\n{event}\\r\\n".encode())
            time.sleep(0.05)
        self.wfile.write(b"0\\r\\n\\r\\n")

    def log_message(self, *_):
        pass

ThreadingHTTPServer.request_queue_size = 128
ThreadingHTTPServer(("127.0.0.1", int(PORT)), Recorder).serve_forever()
""".replace("EVENTS", str(EVENTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One service at the gateway of one server."""

    server: str
    service: str
    host: str  # the Host header
    prefix: str
    port_file: Path  # where the port of the data plane is

    def read_port(self) -> int:
        return int(self.port_file.read_text())


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer, or how the request failed without one (`error`). Times are seconds since 1970."""

    began: float
    ended: float
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    error: str = ""  # "refused": no process listened; "broken": the connection ended


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenRequest:
    """A request without a complete answer of a replica. `error` may be the code of the gateway's
    or HAProxy's own answer.
    """

    id: str
    server: str
    began: float
    ended: float
    error: str


class Findings:
    """What the callers have seen."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.broken: list[BrokenRequest] = []
        self.right: set[str] = set()  # IDs of requests with the right answer
        self.once: set[str] = set()  # IDs of requests that a replica may get once at most
        self.queued: dict[str, bytes] = {}  # ID of each accepted queued call -> its result
        self.delivered: set[str] = set()  # IDs of the events that a webhook has accepted
        self._lock = threading.Lock()

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1


class CheckedLoad:
    """Threads that call each target in each way, until they are stopped."""

    def __init__(
        self, targets: list[Target], connect: Callable[[str], ApiClient], pause_s: float
    ) -> None:
        self.found = Findings()
        self._connect, self._pause_s = connect, pause_s
        self._over = threading.Event()
        ways = {
            "get": self._get,
            "post": self._post,
            "keyed": self._post_with_key,
            "events": self._read_events,
            "deferred": self._defer,
            "deferred-keyed": self._defer_with_key,
        }
        self.callers = [
            (f"{way}-{target.server}-{target.service}", act, target)
            for target in targets
            for way, act in ways.items()
        ]
        last = {each.server: each for each in targets}
        for way, act in (("queue", self._queue), ("hook", self._deliver)):
            self.callers += [(f"{way}-{name}", act, each) for name, each in last.items()]
        self._threads = [threading.Thread(target=self._run, args=each) for each in self.callers]

    def start(self) -> None:
        for each in self._threads:
            each.start()

    def finish(self) -> None:
        """Stop, after the results of all deferred calls have arrived."""
        self._over.set()
        for each in self._threads:
            each.join()

    def progress(self) -> Mapping[str, int]:
        """Return the number of right answers of each caller."""
        return {name: self.found.counts[f"right {name}"] for name, _, _ in self.callers}

    def _run(self, name: str, act: Callable[[str, Target], bool], target: Target) -> None:
        dice, number = Random(name), 0
        # a gateway stores 1,000 deferred calls of a service at most
        pause_s = self._pause_s * (4 if name.startswith("deferred") else 1)
        while not self._over.wait(pause_s * dice.uniform(0.5, 1.5)):
            number += 1
            try:
                if act(f"{name}-{number}", target):
                    self.found.count(f"right {name}")
            except Exception as error:  # noqa: BLE001 - a caller that ends would find nothing more
                self.found.wrong.append(f"{name}-{number}: {type(error).__name__}: {error}")

    # the ways to call

    def _get(self, name: str, target: Target) -> bool:
        return self._check(name, target, ask(target, "GET", f"/{name}", _mark(name, target)))

    def _post(self, name: str, target: Target) -> bool:
        self.found.once.add(name)
        answer = ask(target, "POST", "/", _mark(name, target), name.encode())
        return self._check(name, target, answer, name.encode())

    def _post_with_key(self, name: str, target: Target) -> bool:
        headers = {**_mark(name, target), "Idempotency-Key": name}
        answer = ask(target, "POST", "/", headers, name.encode())
        return self._check(name, target, answer, name.encode())

    def _read_events(self, name: str, target: Target) -> bool:
        answer = ask(target, "GET", f"/{name}/events", _mark(name, target))
        wanted = "".join(f"data: {target.service} {name} {n}\n\n" for n in range(EVENTS))
        return self._check(name, target, answer, wanted=wanted.encode())

    def _defer(self, name: str, target: Target) -> bool:
        self.found.once.add(name)
        return self._ask_later(name, target, _mark(name, target))

    def _defer_with_key(self, name: str, target: Target) -> bool:
        return self._ask_later(name, target, {**_mark(name, target), "Idempotency-Key": name})

    def _ask_later(self, name: str, target: Target, headers: Mapping[str, str]) -> bool:
        body = name.encode()
        accepted = ask(target, "POST", "/", {**headers, "Prefer": "respond-async"}, body)
        if accepted.status != 202:
            if accepted.status == 200:
                self.found.wrong.append(f"{name}: 200 instead of 202")
            return self._check(name, target, accepted, body)
        where = accepted.headers["location"].removeprefix(target.prefix)
        first = self._await_result(name, target, where)
        again = self._await_result(name, target, where)
        if first is None or again is None:
            return False
        if (first.status, first.body) != (again.status, again.body):
            self.found.wrong.append(f"{name}: two results, {first.body!r} and {again.body!r}")
        return self._check(name, target, replace(first, began=accepted.began), body)

    def _await_result(self, name: str, target: Target, where: str) -> Answer | None:
        give_up = time.monotonic() + START_S
        while time.monotonic() < give_up:
            answer = ask(target, "GET", where, {})
            # a stored result of the gateway has the ID of the call; HAProxy without a gateway
            # answers the poll itself
            own = answer.status == 502 and _read_own(answer).get("request_id", "") not in where
            if answer.error or answer.status == 202 or own:
                time.sleep(0.3)
                continue
            return answer
        self.found.wrong.append(f"{name}: no result within {START_S:.0f} s")
        return None

    def _queue(self, name: str, target: Target) -> bool:
        body = name.encode()
        headers = {"X-Drill": name}
        ask_of = QueuedCallAsk(id=name, path="/queued", headers=headers, body=body)
        while True:  # with the same ID, until it is accepted
            try:
                with self._connect(target.server) as client:
                    submit_call(client, "default", target.service, ask_of)
            except (ApiError, OSError) as error:
                self.found.count(f"repeated {type(error).__name__}")
                if self._over.wait(0.2):
                    return False
                continue
            self.found.queued[name] = _expect(target, name, body)
            return True

    def _deliver(self, name: str, target: Target) -> bool:
        event = {"specversion": "1.0", "id": name, "source": "/drill", "type": "sent", "data": name}
        body = json.dumps(event).encode()
        while True:
            kind = {"content-type": "application/cloudevents+json"}
            try:
                headers = {**sign_standard(SECRET, name, datetime.now(UTC), body), **kind}
                with self._connect(target.server) as client:
                    client.send("POST", f"/hooks/v1/default/{target.service}/in", body, headers)
            except (ApiError, OSError) as error:
                self.found.count(f"repeated {type(error).__name__}")
                if self._over.wait(0.2):
                    return False
                continue
            self.found.delivered.add(name)
            return True

    def _check(
        self, name: str, target: Target, answer: Answer, body: bytes = b"", wanted: bytes = b""
    ) -> bool:
        """Return whether the answer is the right one; note one that may not be."""
        found = self.found
        if answer.error:
            found.count(answer.error)
            found.broken.append(_make_broken(name, target, answer, answer.error))
            return False
        found.count(f"status {answer.status}")
        if answer.status == 200:
            if answer.body != (wanted or _expect(target, name, body)):
                found.wrong.append(f"{name}: {answer.body!r}")
                return False
            found.right.add(name)
            return True
        told = f"{name}: {answer.status} {answer.body[:200]!r}"
        if answer.status not in (502, 504) or not _read_code(answer):
            found.wrong.append(told)
        elif not answer.headers.get("x-request-id"):
            found.wrong.append(f"{told}, without a request ID")
        else:
            code = _read_code(answer)
            found.count(f"code {code}")
            found.broken.append(_make_broken(name, target, answer, code))
        return False


def ask(
    target: Target, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
) -> Answer:
    """Send one request on a connection of its own."""
    began = time.time()
    try:
        port = target.read_port()
    except (OSError, ValueError):
        return Answer(began=began, ended=time.time(), error="refused")
    with closing(HTTPConnection("127.0.0.1", port, timeout=START_S)) as line:
        try:
            line.connect()
        except OSError:
            return Answer(began=began, ended=time.time(), error="refused")
        if line.sock.getsockname() == line.sock.getpeername():  # TCP: nothing listens at the port
            return Answer(began=began, ended=time.time(), error="refused")
        try:
            line.request(method, target.prefix + path, body, {"Host": target.host, **headers})
            found = line.getresponse()
            data = found.read()
        except TimeoutError:
            return Answer(began=began, ended=time.time(), error="silent")
        except (OSError, HTTPException):
            return Answer(began=began, ended=time.time(), error="broken")
        told = {name.lower(): value for name, value in found.getheaders()}
        return Answer(began=began, ended=time.time(), status=found.status, headers=told, body=data)


def _make_broken(name: str, target: Target, answer: Answer, error: str) -> BrokenRequest:
    return BrokenRequest(
        id=name, server=target.server, began=answer.began, ended=answer.ended, error=error
    )


def _mark(name: str, target: Target) -> Mapping[str, str]:
    return {"X-Drill": name, "X-Via": target.server}


def _expect(target: Target, name: str, body: bytes) -> bytes:
    return f"{target.service} {name} {hashlib.sha256(body).hexdigest()[:16]}".encode()


def _read_code(answer: Answer) -> str:
    """Return the code of the gateway's own answer, or "" for another one."""
    return _read_own(answer).get("code", "")


def _read_own(answer: Answer) -> dict[str, str]:
    """Return the fields of an error that the gateway or HAProxy has written."""
    try:
        found = json.loads(answer.body)["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return {name: str(value) for name, value in found.items()}
