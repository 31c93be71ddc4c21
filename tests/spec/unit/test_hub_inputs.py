"""Inputs of the Hugging Face Hub: a strict stand-in of the Hub and of the hosts of its files, the
server's side, and the node's side, which gets no token.
"""

import errno
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any, ClassVar

import msgspec
import pytest

from cavvy.agent.allowed_folders import AllowedFolders
from cavvy.agent.data import fetch
from cavvy.agent.data.transfer import TransferProgress
from cavvy.agent.http_client import TransferFailed
from cavvy.agent.work.folder import CannotBuild, inside
from cavvy.control.agents.transfers import SignedObjects
from cavvy.store.objects.base import ObjectDenied, ObjectMissing, ObjectTryAgain
from cavvy.store.objects.hub import HubRepository
from cavvy.store.objects.locations import find_sizes

COMMIT, TOKEN = "a" * 40, "hf_secret"
BIG = bytes(range(256)) * 4096  # 1 MiB
FILES = {"config.json": b"{}", "deep/tokens.txt": b"a b c", "model.safetensors": BIG, "empty": b""}
LARGE = ("model.safetensors",)
REPO = "org/name"


class Hub(BaseHTTPRequestHandler):
    """The Hub, and the host of large files at another port, which refuses the token."""

    protocol_version = "HTTP/1.1"
    lock: ClassVar[Lock] = Lock()
    seen: ClassVar[list[tuple[int, str, str]]] = []  # port, path, Range
    faults: ClassVar[Counter[str]] = Counter()  # how often each is still to happen
    private: ClassVar[bool] = False
    cdn_port: ClassVar[int] = 0

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        port = self.server.server_address[1]
        span = self.headers.get("Range", "")
        with self.lock:
            self.seen.append((port, self.path, span))
        if port == self.cdn_port:
            assert self.headers.get("Authorization") is None, "a key of the project left the Hub"
            self._send_file()
        elif self._fails("429"):
            self._say(429, b"slow down", {"Retry-After": "1"})
        elif self.private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._say(401, b"{}")
        elif self.path == f"/api/models/{REPO}/revision/main?blobs=true":
            self._say(200, json.dumps({"sha": COMMIT, "siblings": list_siblings()}).encode())
        elif self.path.startswith(f"/{REPO}/resolve/{COMMIT}/"):
            self._resolve(self.path.rpartition(f"{COMMIT}/")[2])
        elif self.path.startswith("/moved/"):
            self._send_bytes(FILES[self.path.removeprefix("/moved/")])
        else:
            self._say(404, b"{}")

    def _resolve(self, name: str) -> None:
        if name not in FILES:
            self._say(404, b"{}")
        elif name in LARGE:
            to = f"http://127.0.0.1:{self.cdn_port}/{name}?Signature=abc"
            self._say(302, b"", {"Location": to, "X-Linked-Etag": '"x"', "ETag": '"y"'})
        elif name == "config.json":
            self._say(307, b"", {"Location": "/moved/config.json"})
        else:
            self._send_bytes(FILES[name])

    def _send_file(self) -> None:
        name = self.path.strip("/").partition("?")[0]
        if self._fails("expired"):
            self._say(403, b"<Code>AccessDenied</Code>")
        elif self._fails("broken"):
            span = self.headers.get("Range", "")
            begin = int(span.removeprefix("bytes=").partition("-")[0] or 0)
            self.send_response(206 if span else 200)
            self.send_header("Content-Length", str(len(FILES[name])))
            self.end_headers()
            self.wfile.write(FILES[name][begin : begin + 1000])
            self.close_connection = True
        else:
            wrong = self._fails("wrong")
            self._send_bytes(bytes(len(FILES[name])) if wrong else FILES[name])

    def _send_bytes(self, data: bytes) -> None:
        span = self.headers.get("Range", "")
        if not span or self.faults["no ranges"]:
            self._say(200, data)
            return
        begin, _, end = span.removeprefix("bytes=").partition("-")
        if int(begin) >= len(data):
            self._say(416, b"")
            return
        last = min(int(end or len(data)), len(data) - 1)
        about = {"Content-Range": f"bytes {begin}-{last}/{len(data)}"}
        self._say(206, data[int(begin) : last + 1], about)

    def _fails(self, fault: str) -> bool:
        with self.lock:
            left = self.faults[fault]
            self.faults[fault] = max(0, left - 1)
            return left > 0

    def _say(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def list_siblings() -> list[dict[str, Any]]:
    found = []
    for name, data in FILES.items():
        row: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": "b" * 40}
        if name in LARGE:
            digest = hashlib.sha256(data).hexdigest()
            row["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 130}
        found.append(row)
    return found


class Server:
    """What the node asks of the control plane, without the network between them."""

    def __init__(self, objects: SignedObjects) -> None:
        self.objects = objects

    def read(self, method: str, route: str = "", ask: object = None, **query: Any) -> Any:
        if route == "/signed":
            return msgspec.to_builtins(self.objects.sign_get(query["path"]))
        return msgspec.to_builtins(self.objects.page(query["after"]))

    def ask(self, method: str, route: str = "", body: object = None, **query: Any) -> bytes:
        assert (method, route) == ("GET", "/bytes")
        return self.objects.read(query["path"], query["offset"], query["length"])


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Hub) for _ in range(2)]
    for each in servers:
        each.daemon_threads = True
        Thread(target=each.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    Hub.cdn_port = servers[1].server_address[1]
    yield f"http://127.0.0.1:{servers[0].server_address[1]}"
    for each in servers:
        each.shutdown()
        each.server_close()


@pytest.fixture(autouse=True)
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    Hub.seen.clear()
    Hub.faults.clear()
    Hub.private = False
    monkeypatch.setattr("cavvy.agent.http_client.FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(fetch, "CACHED", 1 << 16)
    monkeypatch.setattr(fetch, "RANGE", 1 << 18)


Bring = Callable[..., Path]


@pytest.fixture
def bring(root: str, tmp_path: Path) -> Bring:
    """Bring a repository to a new folder of a job; the jobs have one cache."""

    def fetch_all(url: str = f"hf://{REPO}@main/", token: str = "", job: str = "job") -> Path:
        place = HubRepository(url, token=token, endpoint=root)
        target = tmp_path / job
        target.mkdir()
        told: list[str] = []
        fetch.fetch_files(
            AllowedFolders([str(target)]),
            str(tmp_path / "cache"),
            str(target / "m"),
            lambda: Server(SignedObjects(place, place.key)),  # type: ignore[arg-type,return-value]  # a fake
            TransferProgress("input", told.append),
        )
        return target / "m"

    return fetch_all


def read_all(folder: Path) -> dict[str, bytes]:
    paths = [each for each in folder.rglob("*") if each.is_file()]
    return {str(each.relative_to(folder)): each.read_bytes() for each in paths}


def test_a_repository_is_brought_in_parts_and_checked(bring: Bring) -> None:
    assert read_all(bring()) == FILES
    spans = [span for port, _, span in Hub.seen if port == Hub.cdn_port]
    assert sorted(spans) == sorted(
        f"bytes={at}-{at + (1 << 18) - 1}" for at in range(0, 1 << 20, 1 << 18)
    )
    assert not any("revision" in path for _, path, _ in Hub.seen[1:]), "it is listed once"


def test_the_token_stays_at_the_hub(bring: Bring) -> None:
    Hub.private = True
    assert read_all(bring(token=TOKEN)) == FILES
    with pytest.raises(ObjectDenied, match="set the project's secret HF_TOKEN"):
        bring(job="other")


def test_later_jobs_take_weights_from_the_cache(bring: Bring, tmp_path: Path) -> None:
    first = bring() / "model.safetensors"
    (cached,) = (tmp_path / "cache" / "blobs").iterdir()
    assert cached.name == hashlib.sha256(BIG).hexdigest()
    assert os.stat(first).st_mode & 0o777 == 0o444
    Hub.seen.clear()
    second = bring(job="two") / "model.safetensors"
    assert second.read_bytes() == BIG
    assert all(port != Hub.cdn_port for port, _, _ in Hub.seen)
    cached.chmod(0o644)
    cached.write_bytes(BIG[:-1] + b"!")  # work has changed it
    third = bring(job="three") / "model.safetensors"
    assert third.read_bytes() == BIG
    cached.unlink()
    os.mkfifo(cached)
    assert (bring(job="four") / "model.safetensors").read_bytes() == BIG


@pytest.mark.parametrize("fault", ["broken", "expired", "no ranges"])
def test_a_transfer_goes_on_after_a_fault(bring: Bring, fault: str) -> None:
    Hub.faults[fault] = 2
    assert read_all(bring()) == FILES


def test_wrong_content_is_refused_and_not_kept(bring: Bring, tmp_path: Path) -> None:
    Hub.faults["wrong"] = 1
    with pytest.raises(TransferFailed, match="damaged in transit"):
        bring()
    assert not (tmp_path / "job" / "m" / "model.safetensors").exists()
    assert not list((tmp_path / "cache").rglob("*"))


def test_a_disk_that_takes_parts_of_the_bytes_loses_none(
    bring: Bring, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda file, data, at: write(file, data[: len(data) // 2 + 1], at)
    )
    assert read_all(bring()) == FILES


def test_a_full_disk_keeps_no_part_and_ends_the_other_files(
    bring: Bring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(file: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(OSError, match="No space left"):
        bring()
    assert not list(tmp_path.rglob("*.cavvy-part"))
    meter = TransferProgress("input", print)
    meter.stop()
    with pytest.raises(TransferFailed, match="stopped"):
        meter.moved(1)


def test_the_cache_gives_no_rights_that_the_file_did_not_have(bring: Bring) -> None:
    before = os.umask(0o077)
    try:
        found = bring() / "model.safetensors"
    finally:
        os.umask(before)
    assert os.stat(found).st_mode & 0o777 == 0o400


@pytest.mark.parametrize("name", ["a\0b", "a\ud800", "../x", "/x", "."])
def test_a_node_makes_no_file_with_an_odd_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(CannotBuild):
        inside(str(tmp_path), name)


def test_a_busy_hub_is_asked_again_later(bring: Bring, root: str) -> None:
    Hub.faults["429"] = 1
    with pytest.raises(ObjectTryAgain, match="status 429"):
        HubRepository(f"hf://{REPO}/", endpoint=root).list("")


@pytest.mark.parametrize(
    "row",
    [
        {"rfilename": 1, "size": 1},
        {"rfilename": "a"},
        {"rfilename": "a", "size": -1},
        {"rfilename": "", "size": 1},
        {"rfilename": "a\0b", "size": 1},
        {"rfilename": "a\ud800", "size": 1},
        {"rfilename": "a", "size": 1, "lfs": "x"},
        {"rfilename": "a", "size": 1, "lfs": {"size": 1}},
        {"rfilename": "a", "size": 1, "lfs": {"size": 1, "sha256": "../x"}},
        "a",
        None,
    ],
)
def test_a_wrong_list_is_not_believed(
    root: str, row: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.list_siblings", lambda: [row])
    with pytest.raises(ObjectTryAgain, match="cannot be read"):
        HubRepository(f"hf://{REPO}", endpoint=root).list("")


def test_a_repository_of_many_files_is_measured(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are signed for a hundred files at a time."""
    monkeypatch.setattr(f"{__name__}.FILES", {f"{i:05}": b"x" * 300 for i in range(8000)})
    url = f"hf://{REPO}/"
    keys = {"HF_ENDPOINT": root}
    assert find_sizes([url], keys, lambda: datetime.now(UTC), 30) == {url: 2}
    page = SignedObjects(HubRepository(url, endpoint=root), "").page("")
    assert len(page.files) == 100
    assert page.next == "00099"


def test_what_is_asked_is_one_commit_of_one_repository(root: str) -> None:
    place = HubRepository(f"hf://{REPO}/deep", endpoint=root)
    page = SignedObjects(place, place.key).page("")
    assert [(each.path, each.size) for each in page.files] == [("tokens.txt", 5)]
    assert f"/{REPO}/resolve/{COMMIT}/deep/tokens.txt" in Hub.seen[-1][1]
    assert place.get("model.safetensors", 10, 20) == BIG[10:30]
    with pytest.raises(ObjectMissing):
        place.sign_get("other", 1)
    with pytest.raises(ObjectMissing):
        HubRepository("hf://org/none", endpoint=root).list("")
    with pytest.raises(ObjectDenied, match="does not list it"):
        HubRepository(f"hf://{REPO}", endpoint=root, targets="").list("")


@pytest.mark.parametrize(
    "url", ["hf://org", "hf://org/", "hf://../x/y", "hf://a/b@x?y", "hf:///a", "hf://a/b@%2F"]
)
def test_what_names_no_repository_is_refused(url: str) -> None:
    with pytest.raises(ObjectDenied, match="is no repository"):
        HubRepository(url)
