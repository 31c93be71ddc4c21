"""Transfers of the agent against a storage that breaks off, forgets, changes and lies."""

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from remuda.agent.data import fetch, send, stream, vault, web
from remuda.agent.data.web import CannotMove
from remuda.agent.work.folder import CannotBuild

pytestmark = pytest.mark.system
DATA = bytes(range(256)) * 16384  # 4 MiB


class Storage(ThreadingHTTPServer):
    """One object, and a script of what goes wrong with the coming requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.data = DATA
        self.tag = '"v1"'
        self.faults: list[str] = []
        self.seen: list[str] = []
        self.parts: dict[str, bytes] = {}
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/object"


class Handler(BaseHTTPRequestHandler):
    server: Storage

    def do_GET(self) -> None:
        low, _, high = self.headers["Range"].removeprefix("bytes=").partition("-")
        self.server.seen.append(f"{self.path} {low}-{high}")
        fault = self.server.faults.pop(0) if self.server.faults else ""
        if fault.isdigit():
            self.send_error(int(fault))
            return
        if self.headers.get("If-Match", self.server.tag) != self.server.tag:
            self.send_error(412)
            return
        body = self.server.data[int(low) : int(high) + 1 if high else None]
        if fault == "no ranges":
            body = self.server.data
        self.send_response(200 if fault == "no ranges" else 206)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if fault == "break" else body)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        fault = self.server.faults.pop(0) if self.server.faults else ""
        if fault.isdigit():
            self.send_error(int(fault))
            return
        self.server.parts[self.path] = body
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.md5(body).hexdigest()}"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        return


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    monkeypatch.setattr(web, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(web, "LAST_DELAY_S", 0.001)
    server = Storage()
    yield server
    server.shutdown()
    server.server_close()


class Desk:
    """The control plane's answers."""

    def __init__(self, storage: Storage, **entry: object) -> None:
        signed = {"method": "GET", "url": storage.url, "headers": {}}
        md5 = hashlib.md5(DATA).hexdigest()
        self.storage = storage
        self.entry = {"path": "", "size": len(DATA), "tag": '"v1"', "md5": md5, "signed": signed, **entry}
        self.asked: list[object] = []

    def __call__(self, config: object, route: str) -> "Desk":
        return self

    def read(self, method: str, route: str = "", ask: object = None, **query: object) -> dict[str, object]:
        self.asked.append((route, ask))
        if route == "/signed":
            return {"method": "GET", "url": self.storage.url + "?fresh", "headers": {}}
        if route == "/parts":
            assert isinstance(ask, dict)
            return {"method": "PUT", "url": f"{self.storage.url}/{ask['path']}/{ask['part']}", "headers": {}}
        if method == "POST" and not route:
            return {"upload": "u", "part_bytes": 1 << 20, "relay": False}
        return {"files": [self.entry], "next": ""}

    def ask(self, method: str, route: str = "", body: bytes | None = None, **query: object) -> bytes:
        self.asked.append((route, query))
        return DATA[int(str(query["offset"])) :][: int(str(query["length"]))]


def bring(monkeypatch: pytest.MonkeyPatch, desk: Desk, target: Path) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(fetch, "Desk", desk)
    fetch.fetch_input(None, 0, "s3://x/y", str(target), told.append)  # type: ignore[arg-type]  # the desk needs none
    return told


def test_a_break_is_gone_on_from(storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.faults = ["break", "503", "break", ""]
    told = bring(monkeypatch, Desk(storage), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == DATA
    half = len(DATA) // 2
    last = len(DATA) - 1
    assert storage.seen == [
        f"/object 0-{last}", f"/object {half}-{last}", f"/object {half}-{last}", f"/object {half + half // 2}-{last}",
    ]  # fmt: skip
    assert told[-1].startswith("input s3://x/y: 1 file, 4.0 MiB in ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_is_there_already_is_not_fetched(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(DATA)
    bring(monkeypatch, Desk(storage), tmp_path / "file")
    assert storage.seen == []
    (tmp_path / "file").write_bytes(DATA[:-1] + b"x")
    bring(monkeypatch, Desk(storage), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == DATA


def test_an_expired_request_is_signed_anew(storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.faults = ["403"]
    bring(monkeypatch, Desk(storage), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == DATA
    assert storage.seen[-1].startswith("/object?fresh ")


def test_a_server_without_ranges(storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.faults = ["no ranges"]
    bring(monkeypatch, Desk(storage, size=None, md5="", tag=""), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == DATA


@pytest.mark.parametrize(
    ("entry", "faults", "told"),
    [
        ({"md5": "0" * 32}, [], "its checksum differs"),
        ({"tag": '"v0"'}, [], "was changed while it was copied"),
        ({}, ["404"], "is not there any more"),
        ({}, ["503"] * 20, "answers with status 503"),
    ],
)
def test_what_is_not_as_it_is_stored_gets_no_name(
    storage: Storage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    entry: dict[str, object],
    faults: list[str],
    told: str,
) -> None:
    storage.faults = list(faults)
    with pytest.raises(CannotMove, match=told):
        bring(monkeypatch, Desk(storage, **entry), tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_what_a_node_does_not_reach_comes_through_the_control_plane(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "RELAY", 1 << 20)
    desk = Desk(storage, signed={"method": "GET", "url": "http://127.0.0.1:1/none", "headers": {}})
    bring(monkeypatch, desk, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == DATA
    assert [asked for asked in desk.asked if "/bytes" in str(asked)][1] == (
        "/bytes", {"path": "", "offset": 1 << 20, "length": 1 << 20},
    )  # fmt: skip
    assert storage.seen == []


def test_a_path_that_leaves_the_target_is_refused(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(CannotBuild, match="does not lie in"):
        bring(monkeypatch, Desk(storage, path="../evil"), tmp_path / "in")
    assert not (tmp_path / "evil").exists()


def test_parts_are_sent_again_and_then_completed(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").write_bytes(DATA[: (2 << 20) + 5])
    storage.faults = ["503", "403"]
    desk, told = Desk(storage), list[str]()
    monkeypatch.setattr(send, "Desk", desk)
    meter = send.send_output(None, 0, str(tmp_path / "out"), "s3://x/y", told.append, {})  # type: ignore[arg-type]  # as above
    assert b"".join(storage.parts[f"/object/a/{part}"] for part in (1, 2, 3)) == DATA[: (2 << 20) + 5]
    route, ask = desk.asked[-1]  # type: ignore[misc]  # a pair
    assert route == "/complete"
    assert json.loads(json.dumps(ask))["tags"] == [
        f'"{hashlib.md5(storage.parts[f"/object/a/{part}"]).hexdigest()}"' for part in (1, 2, 3)
    ]
    assert told == []  # in the first seconds
    assert (meter.files, meter.bytes) == (1, (2 << 20) + 5)


def test_parts_of_what_comes_to_nothing_are_dropped(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, dropped = tmp_path / "a", list[object]()
    path.write_bytes(DATA)

    class Older(Desk):
        def read(self, method: str, route: str = "", ask: object = None, **query: object) -> dict[str, object]:
            if route == "/parts":
                path.write_bytes(DATA[: 1 << 20])  # meanwhile
            if route == "/abort":
                dropped.append(ask)
                raise CannotMove("the control plane refuses it (status 404)")
            return super().read(method, route, ask, **query)

        abort = web.Desk.abort

    monkeypatch.setattr(send, "Desk", Older(storage))
    with pytest.raises(send.Changed, match="shorter"):
        send.send_output(None, 0, str(path), "s3://x/a", print, {})  # type: ignore[arg-type]  # as above
    assert dropped == [{"path": "", "upload": "u"}]

    def read(offset: int, length: int) -> bytes:
        raise EOFError(offset)  # stands for whatever a reader raises

    monkeypatch.setattr(vault, "Desk", Older(storage))
    with pytest.raises(EOFError):
        vault.send_file(None, "name", len(DATA), read)  # type: ignore[arg-type]  # as above
    assert dropped[1:] == [{"upload": "u"}]


def test_what_is_written_while_the_work_runs_is_sent_when_it_is_still_and_once(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, known = tmp_path / "out", dict[str, list[int]]()
    out.mkdir()
    monkeypatch.setattr(send, "Desk", Desk(storage))

    def look(still_s: float = 2.0) -> list[str]:
        storage.parts.clear()
        send.send_output(None, 0, str(out), "s3://x/y", print, known, still_s=still_s)  # type: ignore[arg-type]  # as above
        return sorted(storage.parts)

    (out / "old").write_bytes(b"old")
    os.utime(out / "old", (1, 1))
    (out / "fresh").write_bytes(b"fresh")
    (out / "dangling").symlink_to("nothing")
    assert look() == ["/object/old/1"]
    assert look() == []
    assert look(still_s=0) == ["/object/fresh/1"]
    assert look(still_s=0) == []
    (out / "old").write_bytes(b"another")
    assert look(still_s=0) == ["/object/old/1"]


def test_an_output_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CannotMove, match="does not exist"):
        send.send_output(None, 0, str(tmp_path / "none"), "s3://x/y", print, {})  # type: ignore[arg-type]  # as above


def read_stream(monkeypatch: pytest.MonkeyPatch, desk: Desk, tmp_path: Path, size: int = len(DATA)) -> bytes:
    """What comes through the pipe, to its end or up to `size` bytes."""
    pipe = tmp_path / "in" / "pipe"
    stream.make_pipe(str(pipe))
    monkeypatch.setattr(stream, "Desk", desk)
    made = stream.Stream(None, 0, "s3://x/y", str(pipe), -1)  # type: ignore[arg-type]  # as above
    thread = threading.Thread(target=made.run)
    thread.start()
    with pipe.open("rb") as file:
        got = file.read(size)
        if size == len(DATA):
            assert file.read() == b""
    thread.join(20)
    assert not thread.is_alive()
    return got


def test_a_stream_goes_on_after_breaks(storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.faults = ["break", "503", "403", "break"]
    assert read_stream(monkeypatch, Desk(storage), tmp_path) == DATA
    assert storage.seen[-1].startswith("/object?fresh ")


def test_a_stream_comes_through_the_control_plane(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(storage, signed={"method": "GET", "url": "http://127.0.0.1:1/none", "headers": {}})
    assert read_stream(monkeypatch, desk, tmp_path) == DATA
    assert storage.seen == []


def test_who_reads_only_the_beginning_ends_the_stream(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_stream(monkeypatch, Desk(storage), tmp_path, 1000) == DATA[:1000]
