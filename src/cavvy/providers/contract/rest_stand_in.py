"""Stand-ins for REST APIs, which serve the state of an in-memory cloud. One HTTP server serves all
stand-ins of a test run; the path of each stand-in's URL starts with the stand-in's number.

Requests of Cavvy's own HTTP client are answered in the process, with the same replies: a socket,
and a thread for each connection, would take more time than the provider itself. Other clients, and
`RestServer.networked`, use the socket.

If a fault has no status, the server closes the connection. Tests choose the faults, the page size
and the quota. `ReplayedRest` answers from a recording of `cavvy check NAME --live` instead.
"""

import io
import json
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from http.client import HTTPConnection, RemoteDisconnected, responses
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qs, urlsplit

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import HourlyRate
from cavvy.http_client import CONNECTIONS
from cavvy.providers.contract.memory_cloud import MemoryCloud, Rented
from cavvy.providers.vm.cloud import CloudFault, CloudMachine, MachineRequest, MachineState

T = TypeVar("T")
Check = Callable[[Any], bool]  # returns whether a field of a body has an allowed value

LONG_PAGE = 50
# Maximum items of a list with short pages. Longer lists have longer pages, which saves time.
_SHORT = 32
_NAME = re.compile(r"\bcv-[a-z0-9-]+")  # matches the name of a machine
_OFFER = Offer(provider="any", region="here", instance_type="small", rate=HourlyRate(0))


class RestRequest(NamedTuple):
    """One request, as the server received it."""

    method: str
    target: str  # the request's whole path, with its query
    path: str  # below the root of the API, without the query
    query: Mapping[str, str]
    headers: Mapping[str, str]  # names in lower case
    # None without a body; text if the type of the content is text/...; otherwise parsed JSON
    body: Any


class WithHeaders(NamedTuple):
    """A reply's body and additional headers."""

    body: object
    headers: Mapping[str, str]


class _Server(ThreadingHTTPServer):
    # a client that asks many zones at the same time opens as many connections; a connection that
    # does not fit is opened only a second later
    request_queue_size = 128


class RestServer:
    """The HTTP server of a test run."""

    def __init__(self) -> None:
        self._stand_ins: list[RestStandIn] = []
        handler = type("Handler", (_Handler,), {"stand_ins": self._stand_ins})
        self._server = _Server(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self._host = f"127.0.0.1:{self._server.server_address[1]}"
        self._origin = f"http://{self._host}"
        CONNECTIONS[self._host] = partial(_DirectConnection, self._stand_ins)

    def add(self, stand_in: "RestStandIn") -> str:
        """Serve another stand-in. Returns the common prefix of the stand-in's URLs."""
        self._stand_ins.append(stand_in)
        return f"{self._origin}/{len(self._stand_ins) - 1}"

    @contextmanager
    def networked(self) -> Iterator[None]:
        """While the block runs, the requests of all clients go through the socket."""
        direct = CONNECTIONS.pop(self._host)
        try:
            yield
        finally:
            CONNECTIONS[self._host] = direct

    def close(self) -> None:
        del CONNECTIONS[self._host]
        self._server.shutdown()
        self._server.server_close()


def _answer(
    stand_ins: "Sequence[RestStandIn]",
    method: str,
    target: str,
    headers: Mapping[str, str],
    content: bytes,
) -> tuple[int, dict[str, str], bytes] | None:
    """Return the status, the headers and the body of the reply of the stand-in that the path names,
    or None to close the connection.
    """
    number = int(target.split("/")[1])
    names = {name.lower(): value for name, value in headers.items()}
    told = stand_ins[number].reply(method, target, names, content)
    if told is None:
        return None
    status, body = told
    extra: Mapping[str, str] = {}
    if isinstance(body, WithHeaders):
        body, extra = body
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    data = b"" if body is None else data
    shown = {"Content-Type": "application/json", "Content-Length": str(len(data))}
    if status in (429, 503):
        shown["Retry-After"] = "0"
    return status, {**shown, **extra}, data


class _DirectConnection(HTTPConnection):
    """A connection to the stand-ins without a socket. http.client checks and encodes the
    request.
    """

    def __init__(self, stand_ins: "Sequence[RestStandIn]", host: str, **options: Any) -> None:
        super().__init__(host, **options)
        self._stand_ins, self._sent = stand_ins, b""

    def connect(self) -> None:
        return

    def send(self, data: Any) -> None:
        self._sent += data

    def getresponse(self) -> Any:
        head, _, content = self._sent.partition(b"\r\n\r\n")
        first, *lines = head.decode("iso-8859-1").split("\r\n")
        method, target, _ = first.split(" ")
        headers = dict(line.split(": ", 1) for line in lines)
        told = _answer(self._stand_ins, method, target, headers, content)
        if told is None:
            raise RemoteDisconnected("Remote end closed connection without response")
        status, shown, data = told
        bare = method == "HEAD" or status in (204, 304)
        return _DirectReply(status, shown, b"" if bare else data)


class _DirectReply(io.BytesIO):
    """What Cavvy's HTTP client reads of an `http.client.HTTPResponse`."""

    length = 0  # bytes that are still to come

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        super().__init__(body)
        self.status, self.headers = status, headers
        self.reason = responses.get(status, "")


class _Handler(BaseHTTPRequestHandler):
    """Forwards each HTTP request to the stand-in that the request's path names."""

    stand_ins: "Sequence[RestStandIn]"
    # With HTTP/1.1, clients can reuse a connection, so that not every request needs a thread.
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # buffered: a reply is sent as a whole
    disable_nagle_algorithm = True

    def answer(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        told = _answer(self.stand_ins, self.command, self.path, dict(self.headers.items()), content)
        if told is None:
            self.close_connection = True
            return
        status, headers, data = told
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = answer

    def log_message(self, *_: object) -> None:
        return


class RestStandIn(ABC):
    """One API. Subclasses implement `answer` and `describe`, and set the API's values, such as its
    paths and the names of its states."""

    root = ""  # the path of the API's address
    key = "the-secret-key"
    key_file = "{key}\n"  # the content of a file with the key
    settings: Mapping[str, Scalar] = {}  # settings that the provider needs in addition to the key
    denied = CloudFault(401, "unauthorized", "the key is wrong")
    # The API's own faults, by the codes of the cloud in memory. Other faults are reported
    # unchanged.
    faults: Mapping[str, CloudFault] = {}
    states: Mapping[MachineState, str]  # the API's names of states
    sells = ""  # what the cloud sells, as a table in the form of `contract.sold`
    arm: Collection[str] = ()  # the types whose CPUs are arm64
    unknown = ""  # the accelerators that the catalog does not know, as `check` shows them
    # what is billed in addition to machines: "disk NAME USD" per GiB and month, or per month of a
    # disk of up to N GiB with "<=N" after the name; "address USD" per hour
    extras: Collection[str] = ()
    # the shortest time that is billed, by the start of the names of the types; "" is for all others
    minimum_charges: Mapping[str, timedelta] = {}

    def __init__(self, cloud: MemoryCloud, server: RestServer) -> None:
        self.cloud = cloud
        self.origin = server.add(self)
        self.url = self.origin + self.root
        self.quota = 1000
        self.page = 2  # the longest page of a short list
        self.others: list[dict[str, Any]] = []  # machines of the account that Cavvy did not make
        self.read_faults: list[CloudFault] = []  # the faults of the next reads
        # returns the fault of a request, and whether the request takes effect before it fails
        self.fail: Callable[[RestRequest], tuple[CloudFault, bool] | None] = lambda _: None
        self.bugs: list[Exception] = []  # errors of the stand-in itself
        self.writes: list[RestRequest] = []  # all requests but those with the method GET
        self._lock = threading.Lock()
        self.set_up()

    def set_up(self) -> None:
        """Make what the API of a subclass keeps besides. The constructor calls it."""
        return None

    def make_key_file(self) -> str:
        """Return the content of the file with the key."""
        return self.key_file.format(key=self.key)

    @abstractmethod
    def answer(self, request: RestRequest) -> tuple[int, object]:
        """Return the status and the body of a reply. Bytes are sent unchanged, None means no body,
        and any other value is sent as JSON. A body can be a `WithHeaders` object. Raises
        CloudFault.
        """

    @abstractmethod
    def describe(self, fault: CloudFault) -> object:
        """Return the body of an error."""

    def authorize(self, request: RestRequest) -> None:
        """Check the credentials of a request. Raises CloudFault."""
        if request.headers.get("authorization") != f"Bearer {self.key}":
            raise self.denied

    def reply(
        self, method: str, target: str, headers: Mapping[str, str], content: bytes
    ) -> tuple[int, object] | None:
        """Return the status and the body of a reply, or None to close the connection."""
        parts = urlsplit(target)
        number = target.split("/")[1]
        with self._lock:
            try:
                request = RestRequest(
                    method=method,
                    target=target,
                    path=parts.path.removeprefix(f"/{number}{self.root}"),
                    query={name: values[0] for name, values in parse_qs(parts.query).items()},
                    headers=headers,
                    body=_read_body(f"{method} {target}", headers, content),
                )
                if method != "GET":
                    self.writes.append(request)
                self.authorize(request)
                if method == "GET" and self.read_faults:
                    raise self.read_faults.pop(0)
                fault, late = self.fail(request) or (None, False)
                if fault is not None and not late:
                    raise fault
                told = self.answer(request)
                if fault is not None:
                    raise fault
                return told
            except CloudFault as fault:
                shown = self.faults.get(fault.code, fault)
                return (shown.status, self.describe(shown)) if shown.status else None
            except Exception as bug:  # noqa: BLE001 - the test's teardown reports it
                self.bugs.append(bug)
                return None

    def remains(self) -> Sequence[str] | None:
        """Return what Cavvy created besides machines, and what exists now: disks, addresses, keys,
        security groups; each as text, such as "disk d-1". Subclasses override this method if the
        cloud has such things and does not delete them with their machine.
        """
        return None

    def start(
        self,
        name: str,
        user_data: str,
        tags: Mapping[str, str] | None = None,
        public_key: str = "",
    ) -> str:
        """Start a machine. Returns the machine's id in the in-memory cloud. Raises CloudFault."""
        self._check_quota()
        request = _make_request(name, user_data, tags or {}, public_key)
        return finish(self.cloud.create(request))[0]

    def prepare(self, name: str, tags: Mapping[str, str] | None = None) -> str:
        """Create a machine that is off, for APIs that start machines in several calls; `power_on`
        starts the machine. Returns the machine's id. Raises CloudFault.
        """
        self._check_quota()
        return self.cloud.add(name, dict(tags or {}), off=True)

    def power_on(self, machine: str, user_data: str, public_key: str = "") -> None:
        """Start a machine that `prepare` created, even if lists do not contain it yet. Raises
        CloudFault."""
        found = self.new(machine)
        request = _make_request(found.name, user_data, found.tags, public_key)
        finish(self.cloud.turn_on(machine, request))

    def _check_quota(self) -> None:
        if len(self.cloud.billed()) >= self.quota:
            raise CloudFault(400, "quota-exceeded", "Quota exceeded.")

    def machines(self) -> Sequence[CloudMachine]:
        """Return the machines that the API lists now."""
        return [each for each in finish(self.cloud.list()) if each.state in self.states]

    def machine(self, machine: str) -> CloudMachine:
        """Return the machine with this id. Raises CloudFault."""
        found = finish(self.cloud.get(machine))
        if found is None or found.state not in self.states:
            raise CloudFault(404, "not-found", "no such machine")
        return found

    def new(self, machine: str) -> Rented:
        """Return a billed machine, even if `machine` does not return it yet. Raises CloudFault."""
        for each in self.cloud.billed():
            if each.id == machine:
                return each
        raise CloudFault(404, "not-found", "no such machine")

    def end(self, machine: str) -> None:
        """Delete a machine. Raises CloudFault."""
        finish(self.cloud.delete(machine))

    def cut(self, items: Sequence[T], number: int, size: int) -> tuple[Sequence[T], bool]:
        """Return page `number` of a list, and whether more pages follow. The first page has the
        number 1.
        """
        size = min(self.page if len(items) <= _SHORT else LONG_PAGE, size)
        return items[(number - 1) * size : number * size], number * size < len(items)


def _make_request(
    name: str, user_data: str, tags: Mapping[str, str], public_key: str
) -> MachineRequest:
    return MachineRequest(
        gang=None,  # type: ignore[arg-type]  # the cloud in memory does not read it
        offer=_OFFER,
        names=[name],
        user_data=[user_data],
        tags=tags,
        token=name,
        public_key=public_key,
    )


def _read_body(what: str, headers: Mapping[str, str], content: bytes) -> Any:
    """Parse the body of the request `what`. Raises ValueError, which is recorded in
    `RestStandIn.bugs`."""
    if not content:
        return None
    kind = headers.get("content-type", "")
    if kind.startswith("text/"):
        return content.decode()
    try:
        return json.loads(content)
    except ValueError as error:
        start = content[:80].decode(errors="replace")
        raise ValueError(
            f"the body of {what} has the type {kind or '(none)'} but is not JSON: {start!r}; send "
            "text with `RestClient.send` as a string, or with a content type text/..."
        ) from error


def name_states(**names: str) -> Mapping[MachineState, str]:
    """Return `RestStandIn.states` from the API's words for starting, running, stopped and ended; a
    state that is left out is not one of the API's."""
    return {MachineState[state.upper()]: name for state, name in names.items()}


def finish(call: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits, such as a method of the in-memory cloud, and return the
    result.
    """
    while True:
        try:
            call.send(None)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def make_start_script(key: str) -> str:
    """Return a script that permits SSH logins with this key. A container runs the script before it
    starts an SSH server.
    """
    return f"#!/bin/sh\nmkdir -p ~/.ssh\necho '{key}' >>~/.ssh/authorized_keys\n"


def number_of(machine: str) -> int:
    """Convert the id of an in-memory machine to a number, for APIs whose ids are numbers."""
    return int(machine.removeprefix("vm-"))


def id_of(number: str) -> str:
    """Convert a number in a request's path to the id of an in-memory machine. Raises CloudFault."""
    if not number.isdecimal():
        raise CloudFault(404, "not-found", f"{number} is not an id")
    return f"vm-{int(number):06d}"


def text(most: int, pattern: str = r"[\s\S]*") -> Check:
    """Return a check that accepts strings that match the pattern and have at most `most` bytes."""
    return lambda value: (
        isinstance(value, str)
        and len(value.encode()) <= most
        and re.fullmatch(pattern, value) is not None
    )


def one_of(values: Collection[object]) -> Check:
    return lambda value: value in values


def list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def flag(value: object) -> bool:
    """Return whether the value is a boolean."""
    return isinstance(value, bool)


def wrong_field(body: object, fields: Mapping[str, Check], required: Collection[str]) -> str | None:
    """Return the first field of `body` that is missing, unknown or invalid, or None if all fields
    are valid.
    """
    if not isinstance(body, dict):
        return "the body"
    missing = [name for name in required if name not in body]
    wrong = [name for name, value in body.items() if name not in fields or not fields[name](value)]
    return next(iter([*missing, *wrong]), None)


Recorded = Mapping[str, Any]


class ReplayedCalls:
    """Plays the calls of a recording, and tracks which calls have been played.

    Each recorded write starts a new part of the recording. A read receives the next reply that the
    current part of the recording contains for this read; if no such reply is left, the read
    receives its most recent reply again. Each write must match the next recorded write.
    """

    def __init__(self, calls: Sequence[Recorded]) -> None:
        self._calls = calls
        self._at = 0  # the first call after the last write that was played
        self._played: set[int] = set()
        self._last: dict[str, Recorded] = {}

    def play(self, call: str) -> Recorded:
        """Return the recorded call that matches `call`, with the recorded outcome."""
        numbers = range(self._at, len(self._calls))
        write = next((n for n in numbers if self._calls[n]["writes"]), len(self._calls))
        if write < len(self._calls) and self._calls[write]["call"] == call:
            self._at = write + 1
            return self._calls[write]
        for number in range(self._at, write):
            if number not in self._played and self._calls[number]["call"] == call:
                self._played.add(number)
                self._last[call] = self._calls[number]
                break
        assert call in self._last, f"at this point, the recording has no {call}"
        return self._last[call]

    def left(self) -> list[str]:
        """Return the recorded writes that the provider has not sent."""
        return [each["call"] for each in self._calls[self._at :] if each["writes"]]


class ReplayedRest(RestStandIn):
    """A stand-in for a REST API that answers from a recording. In the recorded replies, the names
    of machines are replaced by the names in the new requests.
    """

    def __init__(self, cloud: MemoryCloud, server: RestServer, recording: Recorded) -> None:
        super().__init__(cloud, server)
        self.calls = ReplayedCalls(recording["calls"])
        self._names: dict[str, str] = {}  # recorded: now

    def authorize(self, request: RestRequest) -> None:
        return

    def describe(self, fault: CloudFault) -> object:
        return {}

    def answer(self, request: RestRequest) -> tuple[int, object]:
        path = "/" + request.target.split("/", 2)[2]
        found = self.calls.play(f"{request.method} {path}")
        recorded, now = (_NAME.findall(json.dumps(each)) for each in (found["body"], request.body))
        self._names |= dict(zip(recorded, now, strict=True))
        text = json.dumps(found["reply"]).replace("ENDPOINT", self.url)
        for name, current in self._names.items():
            text = text.replace(name, current)
        return found["status"], json.loads(text)
