"""What leaves a node while its work runs and when it ends: which files are due, and what is said
where they fail.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.checkpoint_calls import StillLoop

from cavvy.agent.allowed_folders import AllowedFolders
from cavvy.agent.data import output_sync as module
from cavvy.agent.data import transfer, upload
from cavvy.agent.data.output_sync import STILL_S, OutputSync, send_changed
from cavvy.agent.data.paths import find_output, remember, remember_sent
from cavvy.agent.data.transfer import TransferProgress
from cavvy.agent.data.upload import OutputChanged, is_due, send_file
from cavvy.agent.http_client import TransferFailed
from cavvy.agent.sidecar import SidecarPlace
from cavvy.agent.work.folder import CannotBuild


class Looks(OutputSync):
    """Its processes are told of and begin nothing."""

    refuses = ""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.stills: list[float] = []
        self.ended = 0
        config, work = (
            SimpleNamespace(home="/home", private="/home"),
            SimpleNamespace(mirrored={0: 60.0, 1: 30.0}),
        )

        def send(config: object, work: object, still_s: float, *, quiet: bool) -> int:
            self.stills.append(still_s)
            return 0

        monkeypatch.setattr(module, "send_changed", send)
        place = SidecarPlace(StillLoop(), config, self.say)  # type: ignore[arg-type]
        super().__init__(place, work)  # type: ignore[arg-type]

    def say(self, kind: str, name: str, text: str) -> None:
        self.said.append(f"{name}: {text}")

    def done(self) -> None:
        self.ended += 1

    def _run(self, call: Callable[[], int]) -> str:
        if not self.refuses:
            call()
            self._process = SimpleNamespace(kill=lambda: None)  # type: ignore[assignment]
        return self.refuses

    def over(self, problem: str | None = "", files: int = 1) -> None:
        """The process ends, having said this; None: it says nothing."""
        if problem is not None:
            self._wrote(json.dumps({"files": files, "problem": problem, "seconds": 3.5}).encode())
        self._gone()


def test_the_last_look_comes_after_the_work_and_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = Looks(monkeypatch)
    assert looks._every_s == 30
    looks._tick()
    looks._tick()  # one at a time
    assert looks.stills == [STILL_S]
    looks.finish(looks.done)
    assert (looks.stills, looks.ended) == ([STILL_S], 0)
    looks.over()
    assert (looks.stills, looks.ended) == ([STILL_S, 0.0], 0), (
        "what was written during the look before is not safe"
    )
    looks.over()
    assert (looks.stills, looks.ended, looks.said) == ([STILL_S, 0.0], 1, [])
    assert looks.seconds == 3.5


def test_a_node_that_goes_soon_has_its_outputs_sent_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = Looks(monkeypatch)
    looks.hurry()
    assert looks.stills == [STILL_S]
    looks.finish(looks.done)
    looks.over()
    looks.hurry()
    assert looks.stills == [STILL_S, 0.0]


@pytest.mark.parametrize(
    ("problem", "told"),
    [("gs://b: refused", "gs://b: refused"), (None, "it was killed")],
)
def test_last_changes_that_do_not_arrive_are_told(
    monkeypatch: pytest.MonkeyPatch, problem: str | None, told: str
) -> None:
    looks = Looks(monkeypatch)
    looks.finish(looks.done)
    looks.over(problem)
    assert looks.ended == 1
    assert looks.said == [f"unsafe: the last changes to the outputs may be missing: {told}"]


def test_a_look_that_is_cut_short_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    looks._tick()
    looks.finish(looks.done)
    looks.kill()
    looks.over(None)
    assert (looks.stills, looks.ended) == ([STILL_S], 1)
    assert looks.said[-1].endswith("may be missing: no time was left to send the changes")


def test_a_last_look_that_cannot_begin_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    looks.refuses = "no more processes"
    looks.finish(looks.done)
    assert looks.ended == 1
    assert looks.said[-1].endswith("may be missing: no more processes")


def test_a_problem_is_told_once_for_as_long_as_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    for problem, told in (("a", 1), ("a", 1), ("b", 2), ("", 2), ("b", 3)):
        looks._tick()
        looks.over(problem, files=0)
        assert len(looks.said) == told
    assert looks.said[0] == "unsafe: outputs could not be sent: a; retrying every 30 s"
    assert looks.seconds == 0, "of looks that had something to send"


@pytest.mark.parametrize(
    ("age_s", "known", "still_s", "due"),
    [
        (10, None, 2, True),
        (1, None, 2, False),
        (1, None, 0, True),
        (10, "same", 2, False),
        (10, "same", 0, False),
        (10, "size", 0, True),
        (10, "time", 0, True),
        (-10, None, 2, True),  # its time is in the future: a clock was set
    ],
)
def test_what_is_sent_has_changed_and_is_still(
    tmp_path: Path, age_s: float, known: str | None, still_s: float, due: bool
) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"123")
    os.utime(path, (time.time() - age_s,) * 2)
    at = path.stat().st_mtime_ns
    kept = {"same": [3, at], "size": [4, at], "time": [3, at - 1], None: [0, 0]}[known]
    assert (
        is_due(
            AllowedFolders([str(tmp_path)]),
            str(path),
            "model",
            {"model": kept, "other": [3, at]},
            still_s,
        )
        is due
    )


def test_a_file_that_is_gone_is_told_of_only_when_nothing_writes_any_more(tmp_path: Path) -> None:
    assert not is_due(AllowedFolders([str(tmp_path)]), str(tmp_path / "gone"), "gone", {}, 2)
    assert is_due(AllowedFolders([str(tmp_path)]), str(tmp_path / "gone"), "gone", {}, 0)


def make_transfer(source: str, target: str) -> SimpleNamespace:
    return SimpleNamespace(source=source, target=target)


def make_work(*inputs: tuple[str, str], output: tuple[str, str]) -> Any:
    return SimpleNamespace(
        inputs=[make_transfer(*each) for each in inputs],
        outputs=[make_transfer(*output)],
        volumes=[],
        image=None,
        mirrored={0: 1.0},
    )


def make_config(tmp_path: Path) -> Any:
    (tmp_path / "work").mkdir()
    return SimpleNamespace(
        home=str(tmp_path), private=str(tmp_path), folder=str(tmp_path / "work"), placed=[]
    )


def test_what_was_brought_from_the_very_place_is_known_to_be_there(tmp_path: Path) -> None:
    config, far = make_config(tmp_path), "s3://b/x"
    brought = tmp_path / "work" / "data"
    brought.mkdir()
    (brought / "a").write_text("1")
    remember(config, 0, str(brought))
    seen = (brought / "a").stat()
    known = {"a": [1, seen.st_mtime_ns]}
    assert find_output(config, make_work((far, "data"), output=("data", far)), 0) == (
        str(brought),
        known,
    )
    assert find_output(config, make_work((far, "data"), output=("data", "s3://b/y")), 0) == (
        str(brought),
        {},
    )
    assert find_output(config, make_work((far, "other"), output=("data", far)), 0) == (
        str(brought),
        {},
    )
    there = f"{tmp_path}/inputs/0"
    assert find_output(config, make_work((far, "/data"), output=("/data", far)), 0) == (
        there,
        known,
    )
    assert find_output(config, make_work((far, "/data"), output=("/data", "s3://b/y")), 0) == (
        there,
        {},
    )
    assert find_output(config, make_work(output=("/else", far)), 0) == ("/else", {})
    with pytest.raises(CannotBuild):
        find_output(config, make_work(output=("../else", far)), 0)


def test_what_was_sent_goes_before_what_was_brought(tmp_path: Path) -> None:
    config, far = make_config(tmp_path), "s3://b/x"
    (tmp_path / "brought-0.json").write_text(json.dumps({"a": [1, 1], "b": [2, 2]}))
    remember_sent(config, 0, {"a": [9, 9]})
    _, known = find_output(config, make_work((far, "data"), output=("data", far)), 0)
    assert known == {"a": [9, 9], "b": [2, 2]}


def test_an_output_that_fails_keeps_the_others_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path)
    targets = ["s3://b/0", "s3://b/1", "s3://b/2"]
    work = SimpleNamespace(
        inputs=[],
        volumes=[],
        image=None,
        checkpoint=None,
        setup=None,
        outputs=[make_transfer(str(at), each) for at, each in enumerate(targets)],
        mirrored=dict.fromkeys(range(3), 1.0),
    )
    for name in ("0", "1"):
        (tmp_path / "work" / name).write_text(name)
    asked: list[tuple[int, object]] = []

    def send(
        config: object,
        folders: object,
        index: int,
        path: str,
        target: str,
        tell: Callable[[str], None],
        known: Any,
        **how: object,
    ) -> Any:
        asked.append((index, how["still_s"]))
        known[f"sent {index}"] = [1, 1]
        if index == 0:
            raise TransferFailed("refused")
        return SimpleNamespace(files=2, end=lambda: tell("two files"))

    monkeypatch.setattr(module, "send_output", send)
    given: Any = work
    assert send_changed(config, given, 2.0, quiet=False) == 0
    assert asked == [(0, 2.0), (1, 2.0)], "the third is not there yet"
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert lines[0] == {"moved": "two files"}
    assert (lines[1]["files"], lines[1]["problem"]) == (2, "s3://b/0: refused")
    for index in (0, 1):
        known = json.loads((tmp_path / f"sent-{index}.json").read_text())
        assert known == {f"sent {index}": [1, 1]}, "what did arrive is not sent again"


class Storage:
    """What a file is sent to: by four bytes, through the control plane. `meanwhile` happens at
    the first of them.
    """

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.meanwhile = meanwhile
        self.taken = b""
        self.aborted: list[object] = []

    def read(self, method: str, route: str, ask: dict[str, object]) -> dict[str, object]:
        assert (method, route) == ("POST", "")
        return {"upload": "u", "part_bytes": 4, "relay": True}

    def ask(self, method: str, route: str, data: bytes, **where: object) -> bytes:
        assert where["offset"] == len(self.taken)
        if not self.taken:
            self.meanwhile()
        self.taken += data
        return b""

    def abort(self, ask: dict[str, object]) -> None:
        self.aborted.append(ask["upload"])


SendTo = Callable[[Storage, Path], tuple[dict[str, list[int]], int]]


@pytest.fixture
def send_to(monkeypatch: pytest.MonkeyPatch) -> SendTo:
    def send(storage: Storage, path: Path) -> tuple[dict[str, list[int]], int]:
        known: dict[str, list[int]] = {}
        meter = TransferProgress("output", lambda text: None)
        config, folders = (
            SimpleNamespace(hides="", separates=False),
            AllowedFolders([str(path.parent)]),
        )
        monkeypatch.setattr(upload, "TransferClient", lambda *_: storage)
        try:
            send_file(config, folders, 0, str(path), "model", meter, known)  # type: ignore[arg-type]
        except OutputChanged:
            return known, -1
        return known, meter.files

    return send


def test_a_file_counts_as_sent_where_it_stayed_what_it_was(tmp_path: Path, send_to: SendTo) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"0123456789")
    storage = Storage()
    seen = path.stat()
    assert send_to(storage, path) == ({"model": [10, seen.st_mtime_ns]}, 1)
    assert (storage.taken, storage.aborted) == (b"0123456789", [])


@pytest.mark.parametrize("content", [b"9876543210", b"0123", b"0123456789ab"])
def test_a_file_that_is_written_while_it_is_sent_is_not_there_yet(
    tmp_path: Path, content: bytes, send_to: SendTo
) -> None:
    """Half of it would be of one moment, half of another; its parts are dropped."""
    path = tmp_path / "model"
    path.write_bytes(b"0123456789")
    os.utime(path, (10, 10))
    storage = Storage(lambda: path.write_bytes(content))
    assert send_to(storage, path) == ({}, -1)
    assert storage.aborted == ["u"]


class Reply:
    """An answer of a bucket that breaks off where it is told to."""

    def __init__(self, status: int, data: bytes, breaks: bool = False) -> None:
        self.status, self.length = status, len(data)
        self._data = [data[:3] if breaks else data, b""]

    def __enter__(self) -> "Reply":
        return self

    def __exit__(self, *_: object) -> None: ...

    def read(self, size: int) -> bytes:
        return self._data.pop(0)


CONTENT = b"0123456789"


@pytest.mark.parametrize(
    ("replies", "asked", "good"),
    [
        ([Reply(200, CONTENT)], ["bytes=0-"], True),
        (
            [Reply(200, CONTENT, breaks=True), Reply(206, CONTENT[3:])],
            ["bytes=0-", "bytes=3-"],
            True,
        ),
        (
            [Reply(200, CONTENT, breaks=True), Reply(200, CONTENT)],
            ["bytes=0-", "bytes=3-"],
            True,
        ),  # it knows no ranges
        ([Reply(200, b"something else")], ["bytes=0-"], False),
        (
            [Reply(200, CONTENT, breaks=True), Reply(206, CONTENT[4:])],
            ["bytes=0-", "bytes=3-"],
            False,
        ),
    ],
)
def test_what_a_bucket_has_is_taken_for_a_checkpoint_only_if_it_is_that(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    replies: list[Reply],
    asked: list[str | None],
    good: bool,
) -> None:
    ranges: list[str | None] = []
    left = list(replies)

    def request(signed: object, *, headers: dict[str, str]) -> Reply:
        ranges.append(headers.get("Range"))
        return left.pop(0)

    monkeypatch.setattr(
        transfer,
        "TransferClient",
        lambda *_: SimpleNamespace(read=lambda *_: {"url": "https://bucket"}),
    )
    monkeypatch.setattr(transfer, "request", request)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    path, name = tmp_path / "part", hashlib.sha256(CONTENT).hexdigest()
    config: Any = None
    if good:
        transfer.fetch_file(config, name, str(path))
        assert path.read_bytes() == CONTENT
    else:
        with pytest.raises(TransferFailed, match="its checksum differs"):
            transfer.fetch_file(config, name, str(path))
        assert not path.exists()
    assert ranges == asked
