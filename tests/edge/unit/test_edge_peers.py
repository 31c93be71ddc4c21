"""Devices of a site that take files from each other, of which one may lie, stall or be no member."""

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

pytest.importorskip("tuf", reason="the extra `edge` is not installed: make setup-dev")

from tests.edge.unit.test_model_repository import Site

from cavvy.capabilities.edge.on_device import peers as module
from cavvy.capabilities.edge.on_device.documents import PeersTold, read_peers
from cavvy.capabilities.edge.on_device.peers import PROOF, PeerFiles, PeerServer, make_proof
from cavvy.capabilities.edge.on_device.slots import ModelSlots
from cavvy.capabilities.edge.on_device.update import fetch_with

WEIGHTS = bytes(range(256)) * 1024
DIGEST = sha256(WEIGHTS).hexdigest()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[PeerServer]:
    path = tmp_path / "theirs"
    path.write_bytes(WEIGHTS)
    server = PeerServer(("127.0.0.1", 0), lambda digest: str(path) if digest == DIGEST else None)
    for key in ("before", "yesterday", "today", "today"):
        server.take_key(key)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def address(server: HTTPServer) -> str:
    return f"127.0.0.1:{server.server_address[1]}"


def fetch(site: Site, folder: Path, given: PeerFiles) -> list[str]:
    """Return the SHA-256 of the files that the server had to send."""
    fetch_with(site, str(folder), "m", 1, None, given)  # type: ignore[arg-type]
    path = ModelSlots(f"{folder}/models/m").find(1)
    assert path is not None
    assert Path(path).read_bytes() == WEIGHTS
    assert not list(folder.rglob("*.peer"))
    return site.sent


def make_site() -> Site:
    site = Site()
    site.publish(1, contents={"m.onnx": WEIGHTS, "labels.txt": b"few"})
    return site


def test_a_device_takes_files_from_another_one_and_small_ones_from_the_server(
    tmp_path: Path, peer: PeerServer, capsys: pytest.CaptureFixture[str]
) -> None:
    site = make_site()
    for number, key in enumerate(("yesterday", "today")):
        given = PeerFiles([address(peer)], key)
        assert DIGEST not in fetch(site, tmp_path / str(number), given)
    assert site.sent, "the small file"
    assert "1 of 2 files came from other devices" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["before", "", "wrong"])
def test_only_members_of_the_site_get_files(tmp_path: Path, peer: PeerServer, key: str) -> None:
    assert DIGEST in fetch(make_site(), tmp_path / "mine", PeerFiles([address(peer)], key))
    for path, status in ((f"/files/{DIGEST}", 403), ("/files/../card.json", 403), ("/", 403)):
        line = http.client.HTTPConnection("127.0.0.1", peer.server_address[1])
        line.request("GET", path, headers={PROOF: make_proof(key, DIGEST)})
        assert line.getresponse().status == status
        line.close()
    line = http.client.HTTPConnection("127.0.0.1", peer.server_address[1])
    other = "0" * 64
    line.request("GET", f"/files/{other}", headers={PROOF: make_proof("today", other)})
    assert line.getresponse().status == 404
    line.close()


class Liar(BaseHTTPRequestHandler):
    body, length, status, asked = b"", "", 200, 0

    def do_GET(self) -> None:
        type(self).asked += 1
        self.send_response(self.status)
        self.send_header("Content-Length", self.length)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("body", "length", "status"),
    [
        (WEIGHTS[::-1], str(len(WEIGHTS)), 200),
        (WEIGHTS[:100], str(len(WEIGHTS)), 200),
        (WEIGHTS + b"more" * 10**6, str(10**12), 200),
        (b"", "x", 200),
        (b"", "0", 500),
    ],
    ids=["other bytes", "cut", "more", "no length", "an error"],
)
def test_a_device_that_lies_costs_one_try_and_the_server_sends_the_file(
    tmp_path: Path, body: bytes, length: str, status: int
) -> None:
    Liar.body, Liar.length, Liar.status, Liar.asked = body, length, status, 0
    with HTTPServer(("127.0.0.1", 0), Liar) as liar:
        threading.Thread(target=liar.serve_forever, args=(0.01,), daemon=True).start()
        sent = fetch(make_site(), tmp_path / "mine", PeerFiles([address(liar)], "today"))
        liar.shutdown()
    # what came first was right if there is more than enough of it
    assert (DIGEST in sent) is (body[: len(WEIGHTS)] != WEIGHTS)
    assert Liar.asked == 1


def test_a_device_that_stalls_or_is_gone_is_left_and_addresses_are_checked(
    tmp_path: Path, peer: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        given = [f"127.0.0.1:{each.getsockname()[1]}" for each in (silent, gone)]
        odd = ["example.com:80", "x\r\ny:1", "127.0.0.1", "127.0.0.1:99999", ""]
        asked = PeerFiles([*odd, *given, address(peer)], "today")
        assert DIGEST not in fetch(make_site(), tmp_path / "mine", asked)


@pytest.mark.parametrize(
    ("head", "more"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 ", b"O"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"x"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(WEIGHTS), b"x"),
    ],
    ids=["answers before the answer", "a head", "the head of a chunk", "a body"],
)
def test_a_device_whose_answer_does_not_end_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: bytes, more: bytes
) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 0.3)
    monkeypatch.setattr(module, "_LEAST_RATE", 1024)
    left = threading.Event()

    def trickle(source: socket.socket) -> None:
        line, _ = source.accept()
        with line, contextlib.suppress(OSError):
            line.sendall(head)
            while not left.wait(0.02):
                line.sendall(more)

    with socket.create_server(("127.0.0.1", 0)) as source:
        threading.Thread(target=trickle, args=(source,), daemon=True).start()
        given = PeerFiles([f"127.0.0.1:{source.getsockname()[1]}"], "today")
        assert DIGEST in fetch(make_site(), tmp_path / "mine", given)
        left.set()


def test_a_device_gives_few_files_at_once_and_leaves_callers_that_say_nothing(
    peer: PeerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 0.2)
    open_ones = [socket.create_connection(peer.server_address) for _ in range(4)]  # type: ignore[arg-type]
    for each in open_ones:
        each.sendall(b"GET /fi")
        assert each.recv(1) == b"", "the connection was ended"
        each.close()
    assert DIGEST not in fetch(make_site(), tmp_path / "mine", PeerFiles([address(peer)], "today"))


def test_the_server_sends_a_file_whose_fetch_from_another_device_was_cut(
    tmp_path: Path, peer: PeerServer
) -> None:
    """In nights that are too short, it would otherwise begin anew for ever."""
    slot = ModelSlots(f"{tmp_path}/models/m").prepare(1)
    Path(slot, f"{DIGEST}.peer").write_bytes(WEIGHTS[:-1])
    assert DIGEST in fetch(make_site(), tmp_path, PeerFiles([address(peer)], "today"))


@pytest.mark.parametrize("told", [None, [], {"at": 3, "key": 5}, {"at": {"m": "x"}}])
def test_what_the_server_tells_wrongly_about_peers_is_left_out(told: object) -> None:
    assert read_peers(told) == PeersTold()
