"""Connections that show no token: what they send is bounded, and the server answers others
meanwhile.
"""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest
from tests.system.server_state import home_at, wait_until

from cavvy.client import ApiClient, connect
from cavvy.client.state import read_server

pytestmark = pytest.mark.system
PATIENCE_S = 60.0  # of the test, for what the server does within seconds
GET = b"GET /v1/health HTTP/1.1\r\nHost: x\r\n"


@dataclass(frozen=True, kw_only=True)
class Server:
    client: ApiClient
    unix: str
    tcp: tuple[str, int]
    tls: tuple[str, int]

    def dial(self, door: str) -> socket.socket:
        """A connection that is ready for a request."""
        if door == "unix":
            made = socket.socket(socket.AF_UNIX)
            made.connect(self.unix)
        else:
            made = socket.create_connection(self.tcp if door == "tcp" else self.tls)
        made.settimeout(PATIENCE_S)
        if door != "tls":
            return made
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context.wrap_socket(made)

    def is_well(self) -> bool:
        with socket.socket(socket.AF_UNIX) as made:
            made.settimeout(PATIENCE_S)
            made.connect(self.unix)
            made.sendall(GET + b"Connection: close\r\n\r\n")
            return made.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("doors")
    with home_at(folder / "home") as home:
        (folder / "settings.toml").write_text(
            "[server]\nlisten = '127.0.0.1:0'\ntls_listen = '127.0.0.1:0'\n"
            "[providers.local]\nenabled = false\n"
        )
        with connect() as client:
            found, outside = read_server(str(home)), urlsplit(client.server().node_endpoint or "")
            assert found is not None
            listen = urlsplit(found.listen or "")
            yield Server(
                client=client,
                unix=found.address.removeprefix("unix:"),
                tcp=("127.0.0.1", listen.port or 0),
                tls=("127.0.0.1", outside.port or 0),
            )


DOORS = pytest.mark.parametrize("door", ["unix", "tcp", "tls"])


def send(connection: socket.socket, data: bytes) -> bytes:
    """All of it, or as much as is taken; what was answered, "" where it was only cut."""
    with contextlib.suppress(OSError):
        for at in range(0, len(data), 65536):
            connection.sendall(data[at : at + 65536])
    return read(connection)


def is_cut(connection: socket.socket, start: bytes, rest: bytes) -> bool:
    """Whether the server stops to take what follows. A TLS connection is cut a moment after its
    end, and what arrives in between is thrown away: much fits in where the machine is fast.
    """
    deadline = time.monotonic() + PATIENCE_S
    try:
        connection.sendall(start)
        while time.monotonic() < deadline:
            connection.sendall(rest)
    except OSError:
        return True
    return False


def read(connection: socket.socket) -> bytes:
    said = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while part := connection.recv(65536):
            said += part
    return said


@DOORS
@pytest.mark.parametrize(
    "head",
    [
        lambda: GET + b"A: " + bytes(b"a" * (64 << 20)),
        lambda: GET + b"a" * (8 << 20),
        lambda: b"GET /" + b"a" * (8 << 20),
        lambda: GET + b"A: b\r\n" * 101 + b"\r\n",
        lambda: GET + b"".join(b"A%d: b\r\n" % n for n in range(1_000_000)),
        lambda: GET + (b"A: " + b"a" * 2000 + b"\r\n") * 40 + b"\r\n",
        lambda: GET + b"A: " + b"a" * 70_000 + b"\r\n\r\n",
    ],
    ids=["64 MiB", "a name", "a target", "101", "a million", "80 KiB in 40", "70 KB in one"],
)
def test_a_head_that_is_too_large_is_refused(
    server: Server, door: str, head: Callable[[], bytes]
) -> None:
    said = b""
    with server.dial(door) as connection:
        attack = threading.Thread(target=lambda: said_by.append(send(connection, head())))
        said_by: list[bytes] = []
        attack.start()
        while attack.is_alive():
            assert server.is_well()
            attack.join(0.05)
        said = said_by[0]
    assert said.startswith(b"HTTP/1.1 431 ") or not said, said[:200]  # "": cut while it sent
    assert server.is_well()


@DOORS
def test_a_head_within_the_bounds_is_answered(server: Server, door: str) -> None:
    with server.dial(door) as connection:
        connection.sendall(GET + b"A: " + b"a" * 60_000 + b"\r\n" + b"B: b\r\n" * 90)
        connection.sendall(b"Connection: close\r\n\r\n")
        assert read(connection).startswith(b"HTTP/1.1 200 ")


@DOORS
@pytest.mark.parametrize(
    "rest",
    [b"0\r\nA: " + b"a" * (8 << 20), b"1;" + b"a" * (8 << 20)],
    ids=["trailer", "chunk's extension"],
)
def test_parts_after_the_head_are_bounded_too(server: Server, door: str, rest: bytes) -> None:
    start = b"POST /v1/health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with server.dial(door) as connection:
        assert is_cut(connection, start, rest)


def close_all(connections: list[socket.socket]) -> None:
    for each in connections:
        each.close()


def all_cut(server: Server, connections: list[socket.socket]) -> list[bytes]:
    """What each was told before it was cut; the server answers meanwhile."""
    said = []
    for each in connections:
        each.settimeout(PATIENCE_S)
        said.append(read(each))
        if len(said) % 20 == 0:
            assert server.is_well()
    return said


@pytest.mark.timeout(180)
def test_connections_that_say_little_or_nothing_are_cut(server: Server) -> None:
    half, idle, slow, plain, drip = [], [], [], [], []
    try:
        for _ in range(200):
            half.append(server.dial("tcp"))
            half[-1].sendall(GET)
            idle.append(server.dial("unix"))
            plain.append(socket.create_connection(server.tls))
        for _ in range(20):
            slow.append(server.dial("tls"))
            slow[-1].sendall(GET[:10])
        drip.append(server.dial("unix"))
        drip[-1].sendall(GET)
        stop = threading.Event()

        def trickle() -> None:
            with contextlib.suppress(OSError):
                while not stop.wait(0.2):
                    drip[-1].sendall(b"A: b\r\n"[:1])

        threading.Thread(target=trickle, daemon=True).start()
        assert server.is_well()
        for connections, told in ((half, b"408"), (slow, b"408"), (drip, b"408")):
            for said in all_cut(server, connections):  # the oldest of an address without a word
                assert not said or said.split(b" ")[1] == told, said
        assert not any(all_cut(server, idle))
        all_cut(server, plain)
        stop.set()
        with server.dial("tls") as connection:
            connection.sendall(GET + b"Connection: close\r\n\r\n")
            assert read(connection).startswith(b"HTTP/1.1 200 ")
    finally:
        close_all([*half, *idle, *slow, *plain, *drip])


def test_clients_that_mean_well_are_served_beside_a_flood(server: Server) -> None:
    flood = [socket.create_connection(server.tls) for _ in range(300)]
    try:
        for _ in range(5):
            with server.dial("tls") as connection:
                connection.sendall(GET + b"Connection: close\r\n\r\n")
                assert read(connection).startswith(b"HTTP/1.1 200 ")
        wait_until(server.is_well)
        server.client.jobs("default", limit=1)
    finally:
        close_all(flood)


def test_a_body_that_is_sent_after_its_answer_is_not_read_for_ever(server: Server) -> None:
    start = b"POST /v1/health HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999\r\n\r\n"
    with server.dial("tcp") as connection:
        assert is_cut(connection, start, bytes(8 << 20))


REFUSED = b"GET /v1/projects/default/jobs HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("door", ["tcp", "tls"])
@pytest.mark.parametrize(
    ("start", "rest"),
    [
        (
            b"POST /agent/v1/messages?gang=x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"1\r\na\r\n" * 10_000,
        ),
        (b"", REFUSED * 10_000),
        (GET + b"Connection: close\r\n\r\n", bytes(65536)),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes(65536)),
    ],
    ids=["chunks of a byte", "requests at once", "after an answer", "HTTP/2"],
)
def test_much_data_without_a_token_is_cut(
    server: Server, door: str, start: bytes, rest: bytes
) -> None:
    cut: list[bool] = []
    with server.dial(door) as connection:
        attack = threading.Thread(target=lambda: cut.append(is_cut(connection, start, rest)))
        attack.start()
        while attack.is_alive():
            assert server.is_well()
            attack.join(0.05)
    assert cut == [True]


@pytest.mark.parametrize("door", ["tcp", "tls"])
def test_more_requests_at_once_than_a_client_sends_are_not_all_answered(
    server: Server, door: str
) -> None:
    few, many = (GET + b"\r\n") * 5, (GET + b"\r\n") * 200
    with server.dial(door) as connection:
        connection.sendall(few + GET + b"Connection: close\r\n\r\n")
        assert read(connection).count(b"HTTP/1.1 200 ") == 6
    with server.dial(door) as connection:
        assert send(connection, many).count(b"HTTP/1.1 200 ") < 100
    assert server.is_well()


def hold(server: Server, address: str, count: int, held: list[socket.socket]) -> None:
    """Hold connections from this address without a handshake."""
    for _ in range(count):
        held.append(socket.create_connection(server.tls, source_address=(address, 0)))


@pytest.mark.timeout(180)
def test_many_nodes_of_one_address_get_through_at_once(server: Server) -> None:
    """300 nodes behind one address connect at the same time, while an attacker of the same address
    and one of another hold connections, and take new ones when these are cut. Each node is answered
    at its first try.
    """
    held: list[socket.socket] = []
    nodes: list[socket.socket] = []
    over, answers = threading.Event(), list[bytes]()

    def attack(address: str, count: int) -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                hold(server, address, count, held)
            over.wait(1.0)

    attackers = [
        threading.Thread(target=attack, args=each)
        for each in (("127.0.0.1", 70), ("127.0.0.2", 200))
    ]
    try:
        for each in attackers:
            each.start()
        wait_until(lambda: len(held) >= 270)
        nodes.extend(socket.create_connection(server.tls) for _ in range(300))

        def ask(connection: socket.socket) -> None:
            connection.settimeout(PATIENCE_S)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            with contextlib.suppress(OSError), context.wrap_socket(connection) as node:
                node.sendall(GET + b"Connection: close\r\n\r\n")
                answers.append(read(node)[:12])

        asking = [threading.Thread(target=ask, args=(each,)) for each in nodes]
        for each in asking:
            each.start()
        assert server.is_well()
        for each in asking:
            each.join(PATIENCE_S)
    finally:
        over.set()
        for each in attackers:
            each.join()
        close_all([*held, *nodes])
    assert answers == [b"HTTP/1.1 200"] * 300
