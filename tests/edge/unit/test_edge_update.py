"""The update program of a device: a loss of power at any step, also with all that was not yet brought
to the disk, leaves a version to serve, and the update succeeds when it is started again."""

import http.client
import io
import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, BinaryIO

import pytest

pytest.importorskip("tuf", reason="the extra `edge` is not installed: make setup-dev")

from tests.edge.unit.test_model_repository import ServerReply, Site, ask, turn_keys
from tuf.api.exceptions import LengthOrHashMismatchError, RepositoryError

from cavvy.capabilities.edge.deltas import make_delta
from cavvy.capabilities.edge.on_device import server_calls
from cavvy.capabilities.edge.on_device import update as module
from cavvy.capabilities.edge.on_device.delta import ALONE, HEAD, apply_delta
from cavvy.capabilities.edge.on_device.server_calls import read_pieces
from cavvy.capabilities.edge.on_device.slots import ModelSlots, hash_file, plan_of, sync_tree
from cavvy.capabilities.edge.on_device.update import VersionWrong, fetch_with

CHANGES = ("open", "fsync", "rename", "replace", "unlink", "remove", "link", "symlink", "mkdir")
OPEN = os.open  # as it is without a StrictDisk
SAME = b"labels"
OLD = {"m.onnx": b"old weights", "deep/labels.txt": SAME}
NEW = {"m.onnx": b"new weights!", "deep/labels.txt": SAME, "deep/er/more.bin": b"", "x.part": b"x"}


class PowerCut(BaseException):
    """Raised in place of a step, which then has no effect."""


class StrictDisk:
    """Notes what of a folder `fsync` has brought to the disk, and cuts the power at a step. The
    server sends `piece` bytes in each step."""

    piece = 3

    def __init__(self, folder: Path, begin: Path, at: int) -> None:
        self.folder, self.at, self.steps = folder, at, 0
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(begin, folder, symlinks=True)
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._links: dict[int, str] = {}
        self._folders: set[int] = set()
        self._held: dict[int, int] = {}  # descriptors by the number of the file that they hold
        for inner, _, names in os.walk(folder):
            for path in (inner, *(f"{inner}/{name}" for name in names)):
                if not os.path.islink(path):
                    self._note(path)

    def step(self) -> None:
        self.steps += 1
        if self.steps > self.at:
            raise PowerCut

    @contextmanager
    def active(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(ServerReply, "piece", self.piece)
            patch.setattr(ServerReply, "step", staticmethod(self.step))
            for name in CHANGES:
                patch.setattr(os, name, self._wrap(name, getattr(os, name)))
            yield

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            self.step()
            if name == "fsync":
                return self._note(f"/proc/self/fd/{given[0]}")
            return real(*given, **named)

        return call

    def _hold(self, path: str, flags: int = 0) -> int:
        """Return the number of a file, which no other file gets even if this one is removed."""
        descriptor = OPEN(path, os.O_PATH | flags)
        number = os.fstat(descriptor).st_ino
        if number in self._held:
            os.close(descriptor)
        else:
            self._held[number] = descriptor
        return number

    def _note(self, path: str) -> None:
        number = self._hold(path)
        if not os.path.isdir(path):
            self._contents[number] = Path(path).read_bytes()
            return
        self._names[number] = {}
        for each in os.scandir(path):
            inner = self._hold(each.path, os.O_NOFOLLOW)
            self._names[number][each.name] = inner
            if each.is_symlink():
                self._links[inner] = os.readlink(each.path)
            elif each.is_dir():
                self._folders.add(inner)

    def restore(self, to: Path, lost: str) -> None:
        """Write what a device finds after the loss of power: all that was written ("nothing" is
        lost), "all" that was not synced is lost, or the names are there with "empty" files or with
        "zeros" in place of what was not synced."""
        if lost == "nothing":
            shutil.copytree(self.folder, to, symlinks=True)
        elif lost == "all":
            self._rebuild(self.folder.stat().st_ino, to)
        else:
            shutil.copytree(self.folder, to, symlinks=True)
            for inner, _, names in os.walk(self.folder):
                for each in (Path(inner) / name for name in names):
                    if not each.is_symlink():
                        kept = self._contents.get(each.stat().st_ino, b"")
                        full = kept.ljust(each.stat().st_size, b"\0") if lost == "zeros" else kept
                        (to / each.relative_to(self.folder)).write_bytes(full)

    def close(self) -> None:
        for each in self._held.values():
            os.close(each)

    def _rebuild(self, number: int, to: Path) -> None:
        to.mkdir()
        for name, inner in self._names.get(number, {}).items():
            if inner in self._folders:
                self._rebuild(inner, to / name)
            elif inner in self._links:
                (to / name).symlink_to(self._links[inner])
            else:
                (to / name).write_bytes(self._contents.get(inner, b""))


def update(site: Site, folder: Path, number: int) -> None:
    """Do what a device does for a new version that it finds good."""
    slots = ModelSlots(f"{folder}/models/m")
    if slots.find(number) is None:
        fetch_with(site, str(folder), "m", number)  # type: ignore[arg-type]
        slots = ModelSlots(slots.folder)
    if slots.serving != number and slots.begin_trial(number):
        slots.accept(number)


def read(site: Site, folder: Path) -> None:
    ask(site, folder, 1)


def read_served(folder: Path, contents: dict[int, dict[str, bytes]]) -> int:
    """Check that the served version is whole, and return its number."""
    slots = ModelSlots(f"{folder}/models/m")
    if slots.serving:
        main = slots.find(slots.serving)
        assert main is not None, "no version to serve"
        root = main.removesuffix("m.onnx")
        for path, data in contents[slots.serving].items():
            assert Path(root, path).read_bytes() == data
    return slots.serving


def cut_at_each_step(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[Path], None],
    check: Callable[[Path, bool], None],
    kinds: Sequence[str] = ("nothing", "all", "empty", "zeros"),
) -> int:
    """Cut the power at each step of `act`, and check what each kind of loss leaves. Return the
    number of steps."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    begin, steps, cut = folder / "begin", 0, True
    while cut:
        disk, cut = StrictDisk(folder / "now", begin, steps), False
        try:
            with disk.active(monkeypatch):
                act(disk.folder)
        except PowerCut:
            cut = True
        for lost in kinds:
            after = folder / "after"
            disk.restore(after, lost)
            try:
                check(after, cut)
            except Exception as error:
                raise AssertionError(f"step {steps}, {lost} lost") from error
            shutil.rmtree(after)
        disk.close()
        steps += 1
    return steps


def test_the_disk_knows_a_file_with_the_number_of_a_removed_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems give the number of what was removed to the file that is made next."""
    (tmp_path / "begin").mkdir()
    (tmp_path / "begin" / "link").symlink_to("nowhere")
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    disk = StrictDisk(tmp_path / "now", tmp_path / "begin", 10**6)
    (disk.folder / "link").unlink()
    (disk.folder / "file").write_text("told")
    with disk.active(monkeypatch):
        sync_tree(str(disk.folder))
    disk.restore(tmp_path / "after", "all")
    disk.close()
    assert (tmp_path / "after/file").read_text() == "told"
    assert not os.path.lexists(tmp_path / "after/link")


@pytest.mark.parametrize("first", [True, False])
def test_no_loss_of_power_leaves_a_device_without_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    def check(folder: Path, cut: bool) -> None:
        before = (0, 2) if first else (1, 2)
        assert read_served(folder, contents) in (before if cut else (2,))
        update(site, folder, 2)
        assert read_served(folder, contents) == 2

    contents: dict[int, dict[str, bytes]] = {1: OLD, 2: NEW}
    site = Site()
    site.publish(1, contents=OLD)
    site.publish(2, contents=NEW)
    # the signed lists have a test of their own
    monkeypatch.setattr(
        module, "read_manifest", lambda *given: json.loads(site.manifests[f"m/{given[3]}"])
    )
    (tmp_path / "begin" / "models").mkdir(parents=True)
    if not first:
        update(site, tmp_path / "begin", 1)
    steps = cut_at_each_step(tmp_path, monkeypatch, lambda at: update(site, at, 2), check)
    assert steps > 50, "the update was not cut"


GROWN, TUNED = {"m.onnx": b"old weights" * 4}, {"m.onnx": b"new weights" * 4}


def publish_delta(site: Site, spoil: Callable[[bytes], bytes] = lambda delta: delta) -> str:
    """Publish two versions, of which the second one has a delta. Return the delta's SHA-256."""
    old, new = GROWN["m.onnx"], TUNED["m.onnx"]
    pieces = make_delta(io.BytesIO(old), io.BytesIO(new), "m.onnx")
    delta = spoil(b"".join(pieces))
    site.publish(1, contents=GROWN)
    site.publish(2, contents=TUNED, deltas={"m.onnx": (old, delta)})
    return sha256(delta).hexdigest()


def test_no_loss_of_power_while_a_delta_is_fetched_and_used_leaves_a_device_without_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte of the delta is a step of its own, and so is each byte of the file that it makes."""

    def check(folder: Path, cut: bool) -> None:
        assert read_served(folder, contents) in ((1, 2) if cut else (2,))
        update(site, folder, 2)
        assert read_served(folder, contents) == 2
        assert new not in site.sent

    def apply(old: BinaryIO, delta: BinaryIO, size: int) -> Iterator[bytes]:
        for piece in apply_delta(old, delta, size):
            for index in range(len(piece)):
                ServerReply.step()
                yield piece[index : index + 1]

    contents: dict[int, dict[str, bytes]] = {1: GROWN, 2: TUNED}
    site, new = Site(), sha256(TUNED["m.onnx"]).hexdigest()
    monkeypatch.setattr(module, "apply_delta", apply)
    monkeypatch.setattr(
        module, "read_manifest", lambda *given: json.loads(site.manifests[f"m/{given[3]}"])
    )
    delta = publish_delta(site)
    (tmp_path / "begin" / "models").mkdir(parents=True)
    update(site, tmp_path / "begin", 1)
    monkeypatch.setattr(StrictDisk, "piece", 1)
    steps = cut_at_each_step(
        tmp_path, monkeypatch, lambda at: update(site, at, 2), check, ("all", "zeros")
    )
    assert steps > len(site.blobs[delta]) + len(TUNED["m.onnx"]), "the update was not cut"


@pytest.mark.parametrize("wrong", ["bytes", "sent", "missing", "long", "bomb", "base"])
def test_a_file_whose_delta_is_of_no_use_is_fetched_whole(tmp_path: Path, wrong: str) -> None:
    def spoil(delta: bytes) -> bytes:
        if wrong == "bytes":
            return delta[:-1] + bytes([delta[-1] ^ 1])
        return HEAD.pack(1, ALONE, 100, len(bomb)) + bomb if wrong == "bomb" else delta

    site, bomb = Site(), zlib.compress(bytes(10_000))
    name = publish_delta(site, spoil)
    update(site, tmp_path, 1)
    if wrong == "missing":
        del site.blobs[name]
    elif wrong in ("sent", "long"):
        site.blobs[name] = bytes(34) if wrong == "sent" else site.blobs[name] * 100
    elif wrong == "base":
        Path(str(ModelSlots(f"{tmp_path}/models/m").find(1))).write_bytes(b"spoilt")
    update(site, tmp_path, 2)
    assert read_served(tmp_path, {2: TUNED}) == 2
    assert sha256(TUNED["m.onnx"]).hexdigest() in site.sent
    assert not list(tmp_path.rglob("*.made")) + list(tmp_path.rglob("*.delta"))


def test_a_delta_that_the_connection_cut_is_gone_on_with(tmp_path: Path) -> None:
    site = Site()
    name = publish_delta(site)
    update(site, tmp_path, 1)
    whole, site.sent = site.open, []

    def open_cut(path: str, offset: int) -> Any:
        reply = whole(path, offset)
        return ServerReply(reply.read()[:9], reply.status) if "/files/" in path else reply

    site.open = open_cut  # type: ignore[method-assign]
    with pytest.raises(OSError, match="connection ended"):
        update(site, tmp_path, 2)
    site.open = whole  # type: ignore[method-assign]
    update(site, tmp_path, 2)
    assert read_served(tmp_path, {2: TUNED}) == 2
    assert set(site.sent) == {name}


def test_no_loss_of_power_ends_the_trust_in_the_signed_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(folder: Path, cut: bool) -> None:
        if (folder / "root.json").exists():  # the root of trust, once chosen, stays
            with pytest.raises(RepositoryError):
                ask(other, folder, 1)
        assert ask(site, folder, 1)["number"] == 1

    site, other = Site(), Site()
    for each in (site, other):
        each.publish(1)
    (tmp_path / "begin").mkdir()
    monkeypatch.setattr(StrictDisk, "piece", 200)  # each of the lists comes in several pieces
    steps = cut_at_each_step(tmp_path, monkeypatch, lambda at: read(site, at), check, ["all"])
    assert steps > 20, "the reading was not cut"


def test_no_loss_of_power_ends_the_trust_while_a_device_follows_new_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site()
    site.publish(1)
    (tmp_path / "begin").mkdir()
    ask(site, tmp_path / "begin", 1)
    turn_keys(site)
    turn_keys(site)
    site.publish(2)
    monkeypatch.setattr(StrictDisk, "piece", 500)

    def check(folder: Path, cut: bool) -> None:
        assert ask(site, folder, 2)["number"] == 2

    steps = cut_at_each_step(tmp_path, monkeypatch, lambda at: read(site, at), check, ["all"])
    assert steps > 20, "the reading was not cut"


def test_a_loss_of_power_after_the_lists_were_read_lets_no_older_list_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site()
    site.publish(1)
    older = dict(site.files)
    site.publish(2)
    (tmp_path / "begin").mkdir()
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    disk = StrictDisk(tmp_path / "now", tmp_path / "begin", 10**6)
    with disk.active(monkeypatch):
        ask(site, disk.folder, 2)
    disk.restore(tmp_path / "after", "all")
    disk.close()
    site.files = older
    with pytest.raises(RepositoryError):
        ask(site, tmp_path / "after", 1)


def test_a_damaged_file_of_the_served_version_is_not_linked(tmp_path: Path) -> None:
    site = Site()
    site.publish(1, contents=OLD)
    update(site, tmp_path, 1)
    site.publish(2, contents=NEW)
    slots = ModelSlots(f"{tmp_path}/models/m")
    Path(str(slots.find(1))).with_name("deep").joinpath("labels.txt").write_bytes(b"spoilt")
    update(site, tmp_path, 2)
    assert read_served(tmp_path, {2: NEW}) == 2


def test_a_disk_without_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    site = Site()
    site.publish(1, contents=OLD)
    update(site, tmp_path, 1)
    site.publish(2, contents=NEW)
    monkeypatch.setattr(os, "link", refuse)
    update(site, tmp_path, 2)
    assert read_served(tmp_path, {2: NEW}) == 2


def test_a_full_disk_is_told_before_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site()
    site.publish(1, contents=OLD)
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "disk_usage", lambda _: usage)
        with pytest.raises(OSError, match="1 MiB free"):
            update(site, tmp_path, 1)
    update(site, tmp_path, 1)
    assert read_served(tmp_path, {1: OLD}) == 1


def test_a_server_that_sends_something_else_is_refused(tmp_path: Path) -> None:
    site = Site()
    site.publish(1, contents=OLD)
    for digest, data in site.blobs.items():
        site.blobs[digest] = data[::-1]
    with pytest.raises(ValueError, match="another SHA-256"):
        update(site, tmp_path, 1)
    assert not [
        each
        for each in tmp_path.rglob("*")
        if each.is_file() and hash_file(str(each)) in site.blobs
    ]
    for digest, data in site.blobs.items():
        site.blobs[digest] = data[::-1] + b"more" * 1000
    with pytest.raises(ValueError, match="sent more than"):
        update(site, tmp_path, 1)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (VersionWrong("another SHA-256"), 3),
        (LengthOrHashMismatchError("the manifest"), 3),
        (server_calls.DeviceRequestInvalid("the status 400 of a proxy"), 1),
        (ValueError("the page of a portal is no JSON"), 1),
        (OSError("no network, or a full disk"), 1),
    ],
)
def test_only_wrong_bytes_refuse_a_version(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(module, "fetch", fail)
    assert module.main(["folder", "m", "1"]) == code


TRTEXEC = """#!/bin/sh
echo "$@" >>"$0.asked"
[ -z "$FAIL" ] || { echo "no plugin for NonZero" >&2; exit 1; }
cp "${1#--onnx=}" "${2#--saveEngine=}"
"""


def test_an_engine_of_tensorrt_is_built_on_the_device_before_the_version_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trtexec` is a stand-in: no TensorRT is here."""
    site, tool = Site(), tmp_path / "trtexec"
    site.publish(1, contents=OLD)
    site.publish(2, contents=NEW)
    tool.write_text(TRTEXEC)
    tool.chmod(0o755)
    (tmp_path / "edge.json").write_text(json.dumps({"trtexec": str(tool), "confined": False}))
    update(site, tmp_path, 1)
    main = ModelSlots(f"{tmp_path}/models/m").find(1)
    assert main is not None
    plan = Path(plan_of(main))
    assert plan.read_bytes() == OLD["m.onnx"]
    asked = f"--onnx={main} --saveEngine={plan.parent}/work/new --fp16\n"
    assert Path(f"{tool}.asked").read_text() == asked
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(VersionWrong, match="no plugin for NonZero"):
        update(site, tmp_path, 2)
    monkeypatch.delenv("FAIL")
    update(site, tmp_path, 2)
    slots = ModelSlots(f"{tmp_path}/models/m")
    assert slots.serving == 2
    assert Path(plan_of(str(slots.find(2)))).read_bytes() == NEW["m.onnx"]
    assert plan.read_bytes() == OLD["m.onnx"]


def test_a_server_that_trickles_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def wait() -> None:
        nonlocal now
        now += 5.0

    monkeypatch.setattr(server_calls.time, "monotonic", lambda: now)
    reply = ServerReply(b"x" * 10_000, 200)
    monkeypatch.setattr(ServerReply, "piece", 1)
    monkeypatch.setattr(ServerReply, "step", staticmethod(wait))
    with pytest.raises(OSError, match="too slow: 12 bytes came in 60 s"):
        list(read_pieces(reply))  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "9" if self.path == "/cut" else "5")
        self.end_headers()
        self.wfile.write(b"hello")
        self.close_connection = self.path == "/cut"

    def log_message(self, *_: object) -> None:
        pass


def test_a_connection_is_free_after_an_answer_and_a_cut_answer_is_an_error() -> None:
    with HTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        line = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
        for _ in range(2):
            line.request("GET", "/")
            assert b"".join(read_pieces(line.getresponse())) == b"hello"
        line.request("GET", "/cut")
        with pytest.raises(OSError, match="4 bytes early"):
            list(read_pieces(line.getresponse()))
        line.close()
        server.shutdown()
