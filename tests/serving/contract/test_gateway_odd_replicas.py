"""What both data planes make of replicas that answer in unusual ways."""

import itertools
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from tests.contract.gateway_process import GatewayProcess, wait_for
from tests.contract.haproxy_process import HaproxyPlaneProcess, need_haproxy
from tests.contract.http_talk import Background, Talk, ask

from cavvy.capabilities.serving.gateway.config import KEPT_S

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Answer = Callable[[socket.socket, int], None]  # gets the connection and the number of its request


class RawReplica:
    """Answers the requests of a connection one by one, with whatever bytes a test chooses."""

    numbers = itertools.count()

    def __init__(self) -> None:
        self.name = f"raw-{next(self.numbers)}"
        self.answer: Answer = lambda connection, number: connection.sendall(OK)
        self.answer_data = lambda connection, data, number: self.answer(connection, number)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        number = 0
        # a plane may reset the connection of an invalid response
        with connection, suppress(ConnectionError):
            while data := connection.recv(65536):  # the requests of these tests are small
                self.answer_data(connection, data, number)
                number += 1
                if connection.fileno() < 0:
                    return


@pytest.fixture
def replica() -> Iterator[RawReplica]:
    replica = RawReplica()
    yield replica
    replica.stop()


@pytest.fixture(scope="module", params=["embedded", "haproxy"])
def shared_plane(request: pytest.FixtureRequest) -> Iterator[GatewayProcess]:
    odd = {"name": "svc", "hosts": ["svc.example"]}
    silent = {"name": "silent", "hosts": ["silent.example"], "response_s": 0.5, "silence_s": 0.5}
    paused = {"name": "paused", "hosts": ["paused.example"], "response_s": 0.5, "silence_s": 9}
    below = {"name": "below", "prefix": "/default/app"}
    whole = {"name": "whole", "prefix": "/default/whole", "strip_prefix": False}
    services = (odd, silent, paused, below, whole)
    plane = (
        GatewayProcess(services=services)
        if request.param == "embedded"
        else HaproxyPlaneProcess(need_haproxy(), services=services)
    )
    yield plane
    plane.remove()


@pytest.fixture
def plane(shared_plane: GatewayProcess, replica: RawReplica) -> GatewayProcess:
    """The same plane for all tests, and a replica of the test's own."""
    here: Any = [replica]
    for name in ("silent", "paused", "below", "whole"):
        shared_plane.set_replicas(name, [])
    shared_plane.set_replicas("svc", here)
    return shared_plane


def skip_lacking(plane: GatewayProcess, what: str) -> None:
    if what in plane.lacks:
        pytest.skip(plane.lacks[what])


def test_a_response_without_content_may_state_the_length_zero(
    plane: GatewayProcess, replica: RawReplica
) -> None:
    replica.answer = lambda connection, number: connection.sendall(
        b"HTTP/1.1 204 No Content\r\nX-A: 1\r\nContent-Length: 0\r\nX-B: 2\r\n\r\n"
        if number == 0
        else OK
    )
    with Talk(plane.port) as talk:
        reply = talk.ask("GET", "/")
        assert reply.status == 204
        assert (reply.headers["x-a"], reply.headers["x-b"]) == ("1", "2")
        assert "content-length" not in reply.headers
        assert talk.ask("GET", "/").body == b"ok", "the replica's connection is used again"


@pytest.mark.parametrize("field", [b"Content-Length: 50", b"Transfer-Encoding: chunked"])
def test_bytes_after_a_response_without_content_are_not_the_next_response(
    plane: GatewayProcess, replica: RawReplica, field: bytes
) -> None:
    skip_lacking(plane, "a 204 with a length")
    late = threading.Event()

    def answer(connection: socket.socket, number: int) -> None:
        if late.is_set():
            connection.sendall(OK)
        else:
            connection.sendall(b"HTTP/1.1 204 No Content\r\n%b\r\n\r\n" % field)
            late.set()

    replica.answer = answer
    with Talk(plane.port) as talk:
        assert talk.ask("POST", "/", b"x").status == 204
        replica.answer = lambda connection, number: connection.sendall(
            OK if number == 0 else b"HTTP/1.1 403 Other\r\nContent-Length: 0\r\n\r\n"
        )
        assert talk.ask("POST", "/", b"x").body == b"ok"


@pytest.mark.parametrize(
    ("data", "what"),
    [
        pytest.param(
            b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
            "the head of the response is not valid HTTP/1.1",
            id="an LF in a response",
        ),
        (b"hello", "the head of the response is not valid HTTP/1.1"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok",
            "the message has two Content-Length fields",
            id="two equal lengths",
        ),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nhello\r\n",
            "the size of a chunk is not valid",
        ),
        (
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: other\r\n\r\n",
            "the replica changed the protocol without a request to do so",
        ),
    ],
)
def test_an_invalid_response_is_refused_at_once_with_the_reason(
    request: pytest.FixtureRequest,
    plane: GatewayProcess,
    replica: RawReplica,
    data: bytes,
    what: str,
) -> None:
    """The replica keeps its connection open."""
    skip_lacking(plane, request.node.callspec.id.removesuffix("-haproxy").removeprefix("haproxy-"))
    replica.answer = lambda connection, number: connection.sendall(data)
    reply = ask(plane.port, "GET", "/")
    assert reply.status == 502
    error = reply.json["error"]
    assert error["code"] == "replica-answer-invalid"
    assert error["type"] == "server_error"
    if "reasons" not in plane.lacks:
        assert error["message"] == f"the replica's response cannot be passed on: {what}"


def test_a_request_that_must_not_be_repeated_gets_no_connection_that_was_long_unused(
    plane: GatewayProcess, replica: RawReplica
) -> None:
    """Many servers close a connection after some seconds, perhaps while a request is on its way."""

    def answer(connection: socket.socket, number: int) -> None:
        if number == 0:
            connection.sendall(OK)
        else:
            connection.close()

    replica.answer = answer
    with Talk(plane.port) as talk:
        for _ in range(3):
            assert talk.ask("POST", "/", b"x").status == 200
            time.sleep(1.1)
        assert talk.ask("GET", "/").status == 200, "it is repeated on a new connection"


@pytest.mark.parametrize("idle_s", [0.0, 0.004], ids=["at once", "after 4 ms"])
def test_no_post_is_lost_if_its_replica_closes_connections_without_a_word(
    plane: GatewayProcess, replica: RawReplica, idle_s: float
) -> None:
    """The close of a connection and the next request may cross."""

    def answer(connection: socket.socket, number: int) -> None:
        connection.sendall(OK)
        if not idle_s or not select.select([connection], [], [], idle_s)[0]:
            connection.close()

    replica.answer = answer
    times, count = itertools.cycle((0.0, 0.9 * idle_s, idle_s, 1.1 * idle_s)), 200

    def call() -> list[int]:
        found = []
        with Talk(plane.port) as talk:
            for _ in range(count):
                time.sleep(next(times) if idle_s else 0)
                found.append(talk.ask("POST", "/", b"x").status)
        return found

    callers = [Background(call) for _ in range(5)]
    assert [each.result() for each in callers] == [[200] * count] * 5


def test_a_post_that_a_replica_did_not_answer_is_not_repeated_and_says_why(
    plane: GatewayProcess, replica: RawReplica
) -> None:
    skip_lacking(plane, "reasons")
    got = []

    def answer(connection: socket.socket, number: int) -> None:
        got.append(number)
        connection.close()

    replica.answer = answer
    reply = ask(plane.port, "POST", "/", b"x")
    assert (reply.status, reply.json["error"]["code"]) == (502, "replica-lost")
    said = "the replica closed the connection without an answer"
    why = "; the request was not repeated, because it may have had an effect"
    assert reply.json["error"]["message"] == said + why
    assert ask(plane.port, "GET", "/").json["error"]["message"] == said
    assert len(got) == 3, "only the GET is repeated"


def test_a_post_uses_a_connection_again_if_the_replica_keeps_them_open(
    plane: GatewayProcess, replica: RawReplica
) -> None:
    if isinstance(plane, HaproxyPlaneProcess):
        pytest.skip("HAProxy uses a connection again only if the server has tried the replica")
    replica.answer = say_number
    with Talk(plane.port) as talk:
        assert talk.ask("POST", "/", b"x").body == b"0"
        time.sleep(2.1)
        assert talk.ask("POST", "/", b"x").body == b"0", "the one before was unused for too long"
        assert [talk.ask("POST", "/", b"x").body for _ in range(3)] == [b"1", b"2", b"3"]


def say_number(connection: socket.socket, number: int) -> None:
    """Answer with how many requests the connection had before."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % min(number, 9))


def test_a_post_uses_a_connection_again_if_the_server_has_seen_that_it_is_kept(
    plane: GatewayProcess, replica: RawReplica
) -> None:
    here: Any = [replica]
    plane.set_replicas("svc", here, keeps=True)
    replica.answer = say_number
    with Talk(plane.port) as talk:
        assert [talk.ask("POST", "/", b"x").body for _ in range(3)] == [b"0", b"1", b"2"]
    plane.set_replicas("svc", here, keeps=False)
    if isinstance(plane, HaproxyPlaneProcess):  # the gateway has learned it itself
        with Talk(plane.port) as talk:
            bodies = [talk.ask("POST", "/", b"x").body for _ in range(3)]
        assert set(bodies) <= {b"0", b"3"}, "one may still use the last connection"
        assert bodies[2] == b"0"


def test_haproxy_closes_unused_connections_before_a_replica_that_keeps_them_may(
    plane: GatewayProcess, replica: RawReplica
) -> None:
    """So no request crosses the end of a connection."""
    if not isinstance(plane, HaproxyPlaneProcess):
        pytest.skip("the gateway looks at the age of a connection when it uses one")
    here: Any = [replica]
    plane.set_replicas("svc", here, keeps=True)
    together, left, closed = threading.Barrier(8), threading.Semaphore(0), []

    def answer(connection: socket.socket, number: int) -> None:
        together.wait(20)
        connection.sendall(OK)
        closed.append(bool(select.select([connection], [], [], KEPT_S)[0]))
        left.release()

    replica.answer = answer
    calls = [Background(ask, plane.port, "POST", "/", b"x") for _ in range(8)]
    assert {each.result().status for each in calls} == {200}
    for _ in calls:
        assert left.acquire(timeout=20)
    assert all(closed)


def test_no_post_is_sent_twice_if_a_replica_closes_a_kept_connection_at_the_wrong_moment(
    plane: GatewayProcess,
) -> None:
    """Each replica reads every third request of a connection and closes the connection then."""
    got: list[bytes] = []

    def answer(connection: socket.socket, data: bytes, number: int) -> None:
        got.extend(re.findall(rb"call-\d+", data))
        if number % 3 == 2:
            connection.close()
        else:
            connection.sendall(OK)

    replicas: Any = [RawReplica(), RawReplica()]
    for each in replicas:
        each.answer_data = answer
    plane.set_replicas("svc", replicas, keeps=True)
    sent = [b"call-%d" % number for number in range(60)]
    answered = []
    pending = iter(sent)
    while (body := next(pending, None)) is not None:
        with Talk(plane.port) as talk:
            while body is not None:
                try:
                    status = talk.ask("POST", "/", body).status
                except (EOFError, ConnectionError):  # HAProxy ends the client's connection, too
                    break
                assert status in (200, 502)
                answered += [body] * (status == 200)
                if status == 502:
                    break
                body = next(pending, None)
    assert len(got) == len(set(got)), "one was sent twice"
    assert set(answered) <= set(got)
    assert 10 < len(answered) < 60, "some were answered, and some were lost with their connection"
    for each in replicas:
        each.stop()


def test_a_response_may_pause_for_longer_than_it_may_take_to_begin(
    plane: GatewayProcess, replica: RawReplica
) -> None:
    here: Any = [replica]
    plane.set_replicas("paused", here)

    def answer(connection: socket.socket, number: int) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n")
        time.sleep(2.5)
        connection.sendall(b"2\r\nok\r\n0\r\n\r\n")

    replica.answer = answer
    assert ask(plane.port, "GET", "/", host="paused.example").body == b"okok"


@pytest.mark.parametrize("begins", [False, True])
def test_a_deferred_call_ends_if_its_replica_is_silent(
    plane: GatewayProcess, replica: RawReplica, begins: bool
) -> None:
    here: Any = [replica]
    plane.set_replicas("silent", here)
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no" if begins else b""
    replica.answer = lambda connection, number: connection.sendall(head)
    accepted = ask(plane.port, "POST", "/", b"x", host="silent.example", prefer="respond-async")
    assert accepted.status == 202

    def fetch() -> Any:
        reply = ask(plane.port, "GET", accepted.headers["location"], host="silent.example")
        return reply if reply.status != 202 else None

    reply = wait_for(fetch)
    assert (reply.status, reply.json["error"]["code"]) == (504, "replica-silent")
    assert plane.facts("silent")["in_flight"] == 0, "the replica's slot is free again"


@pytest.mark.parametrize(
    ("given", "passed_on"),
    [
        ("/login?next=/", "/default/app/login?next=/"),
        ("http://any.example/items/", "http://any.example/default/app/items/"),
        ("/default/application", "/default/app/default/application"),
        ("/default/app/items", "/default/app/items"),
        ("/default/app?a=1", "/default/app?a=1"),
        ("items/", "items/"),
        ("?page=2", "?page=2"),
        ("//other.example/login", "//other.example/login"),
        ("https://other.example/login", "https://other.example/login"),
    ],
)
def test_a_redirect_stays_below_the_path_of_its_service(
    plane: GatewayProcess, replica: RawReplica, given: str, passed_on: str
) -> None:
    here: Any = [replica]
    head = f"HTTP/1.1 307 Temporary Redirect\r\nlocation: {given}\r\nContent-Length: 0\r\n\r\n"
    replica.answer = lambda connection, number: connection.sendall(head.encode())
    for name, path, wanted in (("below", "app", passed_on), ("whole", "whole", given)):
        plane.set_replicas(name, here)
        for _ in range(2):  # the second head comes from the gateway's cache
            reply = ask(plane.port, "GET", f"/default/{path}/items", host="any.example")
            assert (reply.status, reply.headers["location"]) == (307, wanted)
    assert ask(plane.port, "GET", "/items").headers["location"] == given, "a service with a host"


@pytest.mark.parametrize(
    ("given", "passed_on"),
    [
        ("a=1; Path=/", "a=1; Path=/default/app"),
        (
            "a=1; HttpOnly; path = /login/ ; Secure",
            "a=1; HttpOnly; path = /default/app/login/; Secure",
        ),
        ("a=/; Path=/default/app/x", "a=/; Path=/default/app/x"),
        ("a=1; Path=/default/application", "a=1; Path=/default/app/default/application"),
        ("a=1; SameSite=Lax", "a=1; SameSite=Lax"),
        ("a=1; Path=", "a=1; Path="),
    ],
)
def test_a_cookie_is_only_for_its_service(
    plane: GatewayProcess, replica: RawReplica, given: str, passed_on: str
) -> None:
    """Otherwise the browser would send it to the programs of all services."""
    here: Any = [replica]
    head = f"HTTP/1.1 200 OK\r\nset-cookie: {given}\r\nX-Path: Path=/\r\nContent-Length: 0\r\n\r\n"
    replica.answer = lambda connection, number: connection.sendall(head.encode())
    plane.set_replicas("below", here)
    for _ in range(2):  # the second head comes from the gateway's cache
        reply = ask(plane.port, "GET", "/default/app/items", host="any.example")
        assert (reply.headers["set-cookie"], reply.headers["x-path"]) == (passed_on, "Path=/")
    assert ask(plane.port, "GET", "/items").headers["set-cookie"] == given, "a service with a host"


# cookie -> as it is passed on by a service below a path, and by one with a host; None: not at all
REACHING = {
    "cavvy-console-8520=x; Path=/": (None, None),
    "__Host-cavvy-console-8520=x; Path=/; Secure": (None, None),
    "__Secure-Cavvy-Console-8520=x; Path=/; Secure": (None, None),
    "__Host-Http-cavvy-console-8520=x; Path=/; Secure": (None, None),
    "  =cavvy-console-8520=x; Path=/": (None, None),
    "cavvy-console-8520": (None, None),
    "\xa0cavvy-console-8520=x": (None, None),
    '"cavvy-console-8520"=x': (None, None),
    "__Host-a=1; Secure; Path=/": (None, "__Host-a=1; Secure; Path=/"),
    "__hOST-a=1; Secure; Path=/": (None, "__hOST-a=1; Secure; Path=/"),
    "__Secure-a=1; Secure; Path=/": (
        "__Secure-a=1; Secure; Path=/default/app",
        "__Secure-a=1; Secure; Path=/",
    ),
    "a=1; Domain=example; Secure": ("a=1; Secure", "a=1; Secure"),
    "a=1;domain = .example": ("a=1", "a=1"),
    "a=1; Domain; x": ("a=1; x", "a=1; x"),
    "a=Domain=example": ("a=Domain=example", "a=Domain=example"),
    "a=cavvy-console-8520": ("a=cavvy-console-8520", "a=cavvy-console-8520"),
    "a=1; Path=/; PATH=x": ("a=1; Path=/default/app; PATH=x", "a=1; Path=/; PATH=x"),
}


@pytest.mark.parametrize("given", REACHING)
def test_a_program_sets_no_cookies_of_the_console_or_of_other_services(
    plane: GatewayProcess, replica: RawReplica, given: str
) -> None:
    here: Any = [replica]
    head = f"HTTP/1.1 200 OK\r\nSet-Cookie: {given}\r\nContent-Length: 0\r\n\r\n"
    replica.answer = lambda connection, number: connection.sendall(head.encode("latin-1"))
    below, own = REACHING[given]
    plane.set_replicas("below", here)
    for path, host, wanted in (
        ("/default/app/x", "any.example", below),
        ("/", "svc.example", own),
    ):
        found = ask(plane.port, "GET", path, host=host).headers.get("set-cookie")
        assert (None if found == ";" else found) == wanted, host  # browsers ignore `;`


@pytest.mark.parametrize(("path", "added"), [("", "; Path=/default/app"), ("/x", "")])
def test_a_cookie_without_a_path_stays_below_its_service(
    plane: GatewayProcess, replica: RawReplica, path: str, added: str
) -> None:
    """A browser uses the folder of the request's path, which is not below `/default/app`."""
    here: Any = [replica]
    head = b"HTTP/1.1 200 OK\r\nSet-Cookie: a=1\r\nContent-Length: 0\r\n\r\n"
    replica.answer = lambda connection, number: connection.sendall(head)
    plane.set_replicas("below", here)
    plane.set_replicas("whole", here)
    reply = ask(plane.port, "GET", f"/default/app{path}", host="any.example")
    assert reply.headers["set-cookie"] == f"a=1{added}"
    replica.answer = lambda connection, number: connection.sendall(
        head.replace(b"=1", b"=1;path=/")
    )
    reply = ask(plane.port, "GET", f"/default/whole{path}", host="any.example")
    assert reply.headers["set-cookie"] == "a=1;path=/default/whole"


@pytest.mark.parametrize(
    ("field", "below", "own"),
    [
        ("Clear-Site-Data", False, False),
        ("X-Accel-Redirect", False, False),
        ("Service-Worker-Allowed", False, True),
        ("Strict-Transport-Security", False, True),
        ("Public-Key-Pins", False, True),
        ("Alt-Svc", False, True),
        ("NEL", False, True),
        ("Report-To", False, True),
        ("X-Custom", True, True),
    ],
)
def test_a_program_sets_nothing_for_the_whole_origin(
    plane: GatewayProcess, replica: RawReplica, field: str, below: bool, own: bool
) -> None:
    here: Any = [replica]
    head = f"HTTP/1.1 200 OK\r\n{field}: x\r\nContent-Length: 0\r\n\r\n"
    replica.answer = lambda connection, number: connection.sendall(head.encode())
    plane.set_replicas("below", here)
    for path, host, passes in (
        ("/default/app/x", "any.example", below),
        ("/", "svc.example", own),
    ):
        for _ in range(2):
            found = ask(plane.port, "GET", path, host=host).headers
            assert (field.lower() in found) == passes


def test_each_cookie_of_a_response_is_only_for_its_service(
    plane: GatewayProcess, replica: RawReplica
) -> None:
    here: Any = [replica]
    plane.set_replicas("below", here)
    replica.answer = lambda connection, number: connection.sendall(
        b"HTTP/1.1 302 Found\r\nSet-Cookie: a=1; Path=/\r\nLocation: /in\r\nSet-Cookie: b=2; Path=/b"
        b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    )
    with Talk(plane.port) as talk:
        talk.send(b"GET /default/app/ HTTP/1.1\r\nHost: any.example\r\nConnection: close\r\n\r\n")
        head = talk.rest().lower()
    for field in (
        b"set-cookie: a=1; path=/default/app\r\n",
        b"location: /default/app/in\r\n",
        b"set-cookie: b=2; path=/default/app/b\r\n",
    ):
        assert head.count(field) == 1


@pytest.mark.parametrize("query", ["", "?a=1/2"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_browser_gets_pages_at_a_url_that_ends_with_a_slash(
    plane: GatewayProcess, replica: RawReplica, method: str, query: str
) -> None:
    """Relative links of the page then stay below the path of the service."""
    here: Any = [replica]
    page = "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    replica.answer = lambda connection, number: connection.sendall(whole)
    for name in ("below", "whole"):
        plane.set_replicas(name, here)
    with Talk(plane.port) as talk:
        for _ in range(2):
            reply = talk.ask(method, f"/default/app{query}", host="any.example", accept=page)
            assert (reply.status, reply.headers["location"]) == (307, f"app/{query}")
        for path in (f"/default/app/{query}", f"/default/whole{query}"):
            assert talk.ask(method, path, host="any.example", accept=page).status == 200
        assert talk.ask(method, f"/default/app{query}", host="any.example").status == 200
        reply = talk.ask("POST", f"/default/app{query}", host="any.example", accept=page)
        assert reply.status == 200
