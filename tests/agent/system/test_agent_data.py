"""Transfers of the agent against a storage that breaks off, forgets, changes and lies."""

import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cavvy.agent import http_client
from cavvy.agent.allowed_folders import AllowedFolders
from cavvy.agent.data import fetch, stream, transfer, upload
from cavvy.agent.http_client import BlockingClient, StorageTimeout, TransferFailed
from cavvy.agent.work import checkpoint_restore, prepare
from cavvy.agent.work.folder import CannotBuild

pytestmark = pytest.mark.system
DATA = bytes(range(256)) * 16384  # 4 MiB
CONFIG: Any = SimpleNamespace(hides="", separates=False)


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
    monkeypatch.setattr(http_client, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(http_client, "LAST_DELAY_S", 0.001)
    server = Storage()
    yield server
    server.shutdown()
    server.server_close()


class StandInServer:
    """The control plane's answers."""

    def __init__(self, storage: Storage, **entry: object) -> None:
        signed = {"method": "GET", "url": storage.url, "headers": {}}
        md5 = hashlib.md5(DATA).hexdigest()
        self.storage = storage
        self.entry = {
            "path": "",
            "size": len(DATA),
            "tag": '"v1"',
            "md5": md5,
            "signed": signed,
            **entry,
        }
        self.asked: list[object] = []

    def __call__(self, config: object, route: str, tell: object = None) -> "StandInServer":
        return self

    def read(
        self, method: str, route: str = "", ask: object = None, **query: object
    ) -> dict[str, object]:
        self.asked.append((route, ask))
        if route == "/signed":
            return {"method": "GET", "url": self.storage.url + "?fresh", "headers": {}}
        if route == "/parts":
            assert isinstance(ask, dict)
            return {
                "method": "PUT",
                "url": f"{self.storage.url}/{ask['path']}/{ask['part']}",
                "headers": {},
            }
        if method == "POST" and not route:
            return {"upload": "u", "part_bytes": 1 << 20, "relay": False}
        return {"files": [self.entry], "next": ""}

    def ask(
        self, method: str, route: str = "", body: bytes | None = None, **query: object
    ) -> bytes:
        self.asked.append((route, query))
        return DATA[int(str(query["offset"])) :][: int(str(query["length"]))]


def bring(monkeypatch: pytest.MonkeyPatch, server: StandInServer, target: Path) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(fetch, "TransferClient", server)
    config: Any = SimpleNamespace(cache=str(target.parent / "cache"))
    folders = AllowedFolders([str(target.parent)])
    fetch.fetch_input(config, folders, 0, "s3://x/y", str(target), told.append)
    return told


def test_a_break_is_gone_on_from(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.faults = ["break", "503", "break", ""]
    told = bring(monkeypatch, StandInServer(storage), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == DATA
    half = len(DATA) // 2
    last = len(DATA) - 1
    assert storage.seen == [
        f"/object 0-{last}",
        f"/object {half}-{last}",
        f"/object {half}-{last}",
        f"/object {half + half // 2}-{last}",
    ]
    assert told[-1].startswith("input s3://x/y: 1 file, 4.0 MiB in ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_is_there_already_is_not_fetched(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(DATA)
    bring(monkeypatch, StandInServer(storage), tmp_path / "file")
    assert storage.seen == []
    (tmp_path / "file").write_bytes(DATA[:-1] + b"x")
    bring(monkeypatch, StandInServer(storage), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == DATA


def test_an_expired_request_is_signed_anew(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.faults = ["403"]
    bring(monkeypatch, StandInServer(storage), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == DATA
    assert storage.seen[-1].startswith("/object?fresh ")


def test_a_server_without_ranges(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.faults = ["no ranges"]
    bring(monkeypatch, StandInServer(storage, size=None, md5="", tag=""), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == DATA


@pytest.mark.parametrize(
    ("entry", "faults", "told"),
    [
        ({"md5": "0" * 32}, [], "its checksum differs"),
        ({"tag": '"v0"'}, [], " changed while it was copied"),
        ({}, ["404"], "no longer exists"),
        ({}, ["503"] * 20, "answered with status 503"),
        ({}, ["403"] * 20, "answered with status 403"),
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
    with pytest.raises(TransferFailed, match=told) as found:
        bring(monkeypatch, StandInServer(storage, **entry), tmp_path / "file")
    assert isinstance(found.value, StorageTimeout) is told.endswith("503"), (
        "the others are not helped by another try"
    )
    assert not (tmp_path / "file").exists()


def test_what_a_node_does_not_reach_comes_through_the_control_plane(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "RELAY", 1 << 20)
    server = StandInServer(
        storage, signed={"method": "GET", "url": "http://127.0.0.1:1/none", "headers": {}}
    )
    bring(monkeypatch, server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == DATA
    assert [asked for asked in server.asked if "/bytes" in str(asked)][1] == (
        "/bytes",
        {"path": "", "offset": 1 << 20, "length": 1 << 20},
    )
    assert storage.seen == []


def test_a_path_that_leaves_the_target_is_refused(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(CannotBuild, match="is not in"):
        bring(monkeypatch, StandInServer(storage, path="../evil"), tmp_path / "in")
    assert not (tmp_path / "evil").exists()


def test_parts_are_sent_again_and_then_completed(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").write_bytes(DATA[: (2 << 20) + 5])
    storage.faults = ["503", "403"]
    server, told = StandInServer(storage), list[str]()
    monkeypatch.setattr(upload, "TransferClient", server)
    meter = upload.send_output(
        CONFIG,
        AllowedFolders([str(tmp_path)]),
        0,
        str(tmp_path / "out"),
        "s3://x/y",
        told.append,
        {},
    )
    assert (
        b"".join(storage.parts[f"/object/a/{part}"] for part in (1, 2, 3)) == DATA[: (2 << 20) + 5]
    )
    route, ask = server.asked[-1]  # type: ignore[misc]  # a pair
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

    class Older(StandInServer):
        def read(
            self, method: str, route: str = "", ask: object = None, **query: object
        ) -> dict[str, object]:
            if route == "/parts":
                path.write_bytes(DATA[: 1 << 20])  # meanwhile
            return super().read(method, route, ask, **query)

        def _ask(self, patience: object, method: str, route: str, body: bytes) -> bytes:
            assert route == "/abort"
            dropped.append(json.loads(body))
            raise TransferFailed("the control plane refused the request (status 404)")

        abort = http_client.TransferClient.abort

    monkeypatch.setattr(upload, "TransferClient", Older(storage))
    with pytest.raises(upload.OutputChanged, match="shorter"):
        upload.send_output(
            CONFIG, AllowedFolders([str(tmp_path)]), 0, str(path), "s3://x/a", print, {}
        )
    assert dropped == [{"path": "", "upload": "u"}]

    def read(offset: int, length: int) -> bytes:
        raise EOFError(offset)  # stands for whatever a reader raises

    monkeypatch.setattr(transfer, "TransferClient", Older(storage))
    with pytest.raises(EOFError):
        transfer.send_file(None, "name", len(DATA), read)  # type: ignore[arg-type]  # as above
    assert dropped[1:] == [{"upload": "u"}]


def test_what_is_written_while_the_work_runs_is_sent_when_it_is_still_and_once(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, known = tmp_path / "out", dict[str, list[int]]()
    out.mkdir()
    monkeypatch.setattr(upload, "TransferClient", StandInServer(storage))

    def look(still_s: float = 2.0) -> list[str]:
        storage.parts.clear()
        upload.send_output(
            CONFIG,
            AllowedFolders([str(tmp_path)]),
            0,
            str(out),
            "s3://x/y",
            print,
            known,
            still_s=still_s,
        )
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
    with pytest.raises(TransferFailed, match="does not exist"):
        upload.send_output(
            CONFIG,
            AllowedFolders([str(tmp_path)]),
            0,
            str(tmp_path / "none"),
            "s3://x/y",
            print,
            {},
        )


def read_stream(
    monkeypatch: pytest.MonkeyPatch, server: StandInServer, tmp_path: Path, size: int = len(DATA)
) -> bytes:
    """What comes through the pipe, to its end or up to `size` bytes."""
    pipe = tmp_path / "in" / "pipe"
    stream.make_pipe(AllowedFolders([str(tmp_path)]), str(pipe))
    monkeypatch.setattr(stream, "TransferClient", server)
    made = stream.InputStream(None, AllowedFolders([str(tmp_path)]), 0, "s3://x/y", str(pipe), -1)  # type: ignore[arg-type]  # as above
    thread = threading.Thread(target=made.run)
    thread.start()
    with pipe.open("rb") as file:
        got = file.read(size)
        if size == len(DATA):
            assert file.read() == b""
    thread.join(20)
    assert not thread.is_alive()
    return got


def test_a_stream_goes_on_after_breaks(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.faults = ["break", "503", "403", "break"]
    assert read_stream(monkeypatch, StandInServer(storage), tmp_path) == DATA
    assert storage.seen[-1].startswith("/object?fresh ")


def test_a_stream_comes_through_the_control_plane(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = StandInServer(
        storage, signed={"method": "GET", "url": "http://127.0.0.1:1/none", "headers": {}}
    )
    assert read_stream(monkeypatch, server, tmp_path) == DATA
    assert storage.seen == []


def test_who_reads_only_the_beginning_ends_the_stream(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_stream(monkeypatch, StandInServer(storage), tmp_path, 1000) == DATA[:1000]


class DeafDesk(StandInServer):
    """Every request that it signs is to a storage that takes the connection and never answers."""

    def __init__(self, port: int) -> None:
        signed = {"method": "GET", "url": f"http://127.0.0.1:{port}/object", "headers": {}}
        self.entry = {"path": "deep/a", "size": 5, "tag": "", "md5": "", "signed": signed}
        self.signed = signed
        self.asked = []

    def read(
        self, method: str, route: str = "", ask: object = None, **query: object
    ) -> dict[str, object]:
        self.asked.append((route, ask))
        if route == "/parts":
            return dict(self.signed, method="PUT")
        if method == "POST":
            return {"upload": "u", "part_bytes": 1 << 20, "relay": False}
        return (
            self.signed
            if method == "GET" and "after" not in query
            else {"files": [self.entry], "next": ""}
        )

    def abort(self, ask: dict[str, object]) -> None:
        self.asked.append(("/abort", ask))


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeafDesk]:
    for name, value in {
        "TIMEOUT_S": 0.1,
        "TOLD_EVERY_S": 0.05,
        "FIRST_DELAY_S": 0.001,
        "LAST_DELAY_S": 0.001,
    }.items():
        monkeypatch.setattr(http_client, name, value)
    with socket.create_server(
        ("127.0.0.1", 0), backlog=64
    ) as server:  # the kernel takes connections for it
        server = DeafDesk(server.getsockname()[1])
        for module in (fetch, upload, stream, transfer):
            monkeypatch.setattr(module, "TransferClient", server)
        began = time.monotonic()
        yield server
        assert time.monotonic() - began > 0.4  # five waits of 0.1 s


class Ended(Exception):
    """Where a stream would wait, with its pipes open, for the end of the work."""


def fail_stream(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """How a stream that fails tells its agent."""

    def pause() -> None:
        raise Ended

    monkeypatch.setattr(stream.signal, "pause", pause)
    pipe, (channel, writer) = tmp_path / "in" / "pipe", os.pipe()
    stream.make_pipe(AllowedFolders([str(tmp_path)]), str(pipe))
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    config: Any = SimpleNamespace(
        folder=str(tmp_path), home=str(tmp_path), private=str(tmp_path), placed=[]
    )
    try:
        with pytest.raises(Ended):
            stream.stream_inputs(config, [(0, "s3://x/y", str(pipe))], writer)
        *_, last = os.read(channel, 65536).splitlines()
    finally:
        for file in (reader, channel, writer):
            os.close(file)
    told: dict[str, Any] = json.loads(last)
    return told


def test_a_stream_whose_storage_never_answers_ends_as_a_copy_does(
    deaf: DeafDesk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = fail_stream(monkeypatch, tmp_path)
    assert told["outcome"] == "network"
    assert told["reason"].startswith(
        "the input s3://x/y could not be streamed: deep/a: a request to 127.0.0.1:"
    )


@pytest.mark.parametrize(
    ("status", "outcome", "reason"),
    [
        pytest.param("404", "exit", "pipe no longer exists", id="404-exit"),
        pytest.param("503", "network", "the storage answered with status 503", id="503-network"),
    ],
)
def test_a_stream_that_is_refused_is_the_tasks_fault_and_one_that_is_put_off_is_not(
    storage: Storage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: str,
    outcome: str,
    reason: str,
) -> None:
    storage.faults = [status] * 9
    monkeypatch.setattr(stream, "TransferClient", StandInServer(storage))
    told = fail_stream(monkeypatch, tmp_path)
    assert told["outcome"] == outcome
    assert told["reason"].endswith(reason)


def test_an_input_whose_storage_never_answers_is_told_of_and_given_up(
    deaf: DeafDesk, tmp_path: Path
) -> None:
    told: list[str] = []
    where = deaf.signed["url"].split("/")[2]  # type: ignore[attr-defined]  # a text
    config: Any = SimpleNamespace(cache=str(tmp_path / "cache"))
    folders = AllowedFolders([str(tmp_path)])
    with pytest.raises(
        StorageTimeout, match=rf"deep/a: a request to {where} failed: no answer for 0.1 s$"
    ):
        fetch.fetch_input(config, folders, 0, "s3://x/y", str(tmp_path / "in"), told.append)
    waits = f"input s3://x/y waits: deep/a: a request to {where} failed: no answer for 0.1 s (for "
    assert told
    assert all(each.startswith(waits) for each in told)
    assert not (tmp_path / "in" / "deep" / "a").exists()


def test_an_output_whose_storage_never_answers_is_told_of_and_given_up(
    deaf: DeafDesk, tmp_path: Path
) -> None:
    told: list[str] = []
    (tmp_path / "a").write_bytes(b"12345")
    with pytest.raises(StorageTimeout, match=r"no answer for 0\.1 s"):
        upload.send_output(
            CONFIG,
            AllowedFolders([str(tmp_path)]),
            0,
            str(tmp_path / "a"),
            "s3://x/y",
            told.append,
            {},
        )
    assert told[0].startswith("output s3://x/y waits: ")
    assert deaf.asked[-1] == ("/abort", {"path": "", "upload": "u"})


def test_a_checkpoint_whose_bucket_never_answers_is_told_of_and_given_up(
    deaf: DeafDesk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    answer = {
        "checkpoint": {
            "attempt": 1,
            "number": 1,
            "bytes": 5,
            "direct": True,
            "files": [{"path": "a", "sha256": "0" * 64, "mode": 0o644, "mtime_ns": 1}],
        }
    }
    monkeypatch.setattr(
        checkpoint_restore.BlockingClient,
        "read",
        lambda *args, **named: json.dumps(answer).encode(),
    )
    with pytest.raises(
        StorageTimeout, match=r"checkpoint file 000000000000: .* failed: no answer for 0\.1 s"
    ):
        checkpoint_restore.restore(None, str(tmp_path / "ckpt"), told.append)  # type: ignore[arg-type]  # as above
    assert "no answer for 0.1 s (for " in told[0]


def test_a_file_of_a_checkpoint_that_its_bucket_does_not_take_is_given_up(deaf: DeafDesk) -> None:
    told: list[str] = []
    with pytest.raises(StorageTimeout, match="checkpoint file 000000000000: a request to"):
        transfer.send_file(None, "0" * 64, 5, lambda at, size: b"12345", told.append)  # type: ignore[arg-type]  # as above
    assert told
    assert deaf.asked[-1] == ("/abort", {"upload": "u"})


def test_a_bucket_that_has_lost_a_file_is_not_asked_again(storage: Storage, tmp_path: Path) -> None:
    class Lost(StandInServer):
        def read(
            self, method: str, route: str = "", ask: object = None, **query: object
        ) -> dict[str, object]:
            return {"method": "GET", "url": self.storage.url, "headers": {"Range": "bytes=0-"}}

    storage.faults = ["404", "503"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "TransferClient", Lost(storage))
        with pytest.raises(TransferFailed, match="checkpoint file 000000000000 no longer exists"):
            transfer.fetch_file(None, "0" * 64, str(tmp_path / "a"))  # type: ignore[arg-type]  # as above
    assert storage.faults == ["503"]


@pytest.mark.parametrize("troubles", [3, 100])
def test_a_control_plane_whose_storage_is_silent_is_asked_again_for_a_while(
    troubles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TOLD_EVERY_S": 0.0, "FIRST_DELAY_S": 0.001, "LAST_DELAY_S": 0.001}.items():
        monkeypatch.setattr(http_client, name, value)
    trouble = b'{"code": "data-trouble", "message": "127.0.0.1:9 does not answer: timed out"}'
    answers = [(503, trouble)] * troubles + [(200, b"good")]
    told: list[str] = []
    monkeypatch.setattr(BlockingClient, "ask", lambda *args: Answer(*answers.pop(0)))
    line = BlockingClient(None)  # type: ignore[arg-type]  # as above
    if troubles == 3:
        assert line.read("GET", "checkpoints/latest", tell=told.append) == b"good"
    else:
        with pytest.raises(StorageTimeout, match=r"127\.0\.0\.1:9 does not answer"):
            line.read("GET", "checkpoints/latest", tell=told.append)
        assert len(answers) == 101 - http_client.TRIES - 1
    assert told[0] == "127.0.0.1:9 does not answer: timed out (for 0 s now)"


class Answer:
    def __init__(self, status: int, body: bytes) -> None:
        self.status, self._body = status, body

    def read(self) -> bytes:
        return self._body


def test_what_is_told_is_one_line_however_files_are_named() -> None:
    ours, theirs = os.pipe()
    transfer.tell_to(theirs, "waits")("a\nsetup\n" + "é" * 5000)
    os.close(theirs)
    with open(ours, "rb") as file:
        told = file.read()
    assert told.startswith(b"waits a setup ")
    assert told.count(b"\n") == 1
    assert len(told) == transfer.LINE + 1


def test_a_silent_storage_is_no_failure_of_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, outcome in (
        (StorageTimeout("no answer for 60 s"), "network"),
        (TransferFailed("it is gone"), "setup"),
    ):

        def fail(*args: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(fetch, "fetch_input", fail)
        work: Any = SimpleNamespace(
            inputs=[SimpleNamespace(source="s3://x/y", target="in")],
            streams=[],
            mounted=[],
            outputs=[],
            image=None,
        )
        config: Any = SimpleNamespace(
            folder=str(tmp_path), home=str(tmp_path), private=str(tmp_path), placed=[]
        )
        bring_inputs: Any = prepare.bring_inputs
        monkeypatch.setattr(
            prepare,
            "_prepare",
            lambda *args: bring_inputs(config, work, args[-1]),  # noqa: B023
        )
        ours, theirs = os.pipe()
        assert prepare.prepare(config, work, {}, theirs) == 1
        os.close(theirs)
        with open(ours, "rb") as file:
            told = json.loads(file.read())
        assert (told["outcome"], told["reason"]) == (
            outcome,
            f"the input s3://x/y cannot be copied: {error}",
        )
