"""Handing a checkpoint over and bringing one back: nothing half, nothing older than what is
there.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.checkpoint_calls import StillLoop, make_calm_folder

from cavvy.agent import checkpoint_sync as module
from cavvy.agent.checkpoint_sync import LAST_TRIES, VOIDS, CheckpointSync
from cavvy.agent.http_client import TransferFailed
from cavvy.agent.sidecar import SidecarPlace
from cavvy.agent.work import (
    checkpoint_files,
    checkpoint_hand_over,
    checkpoint_restore,
    checkpoint_upload,
)
from cavvy.agent.work.checkpoint_files import SHORTEST_S, CheckpointWatcher, born_ns
from cavvy.store.checkpoint_folders import NEWEST_NS


def make_config(tmp_path: Path, rank: int = 0) -> Any:
    (tmp_path / "home").mkdir(exist_ok=True)
    (tmp_path / "home" / "claim").write_text("nonce\n")
    return SimpleNamespace(
        rank=rank,
        gang="g",
        home=str(tmp_path / "home"),
        private=str(tmp_path / "home"),
        folder=str(tmp_path),
        address="unix:/nowhere",
        token="t",
        pin="",
        storage=None,
    )


class Hands(CheckpointSync):
    """Its processes are told of and begin nothing; `asked` is how each would copy first."""

    refuses = ""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.asked: list[bool] = []
        self.ended = 0
        self.folder = tmp_path / "ckpt"
        self.folder.mkdir()

        def hand(config: object, folder: str, *, copy_first: bool, **more: object) -> int:
            self.asked.append(copy_first)
            return 0

        monkeypatch.setattr(module, "hand_over", hand)
        loop: Any = StillLoop()
        place = SidecarPlace(loop, make_config(tmp_path, rank), self.say)
        super().__init__(place, str(self.folder), every_s=None)

    def say(self, kind: str, **fields: Any) -> None:
        self.said.append((kind, fields))

    def done(self) -> None:
        self.ended += 1

    def write(self, text: str) -> None:
        """A new state that has been still between two looks."""
        (self.folder / "model").write_text(text)
        self._look()
        self._look()

    def _run(self, call: Callable[[], int]) -> str:
        if not self.refuses:
            call()
            self._process = SimpleNamespace(kill=lambda: None)  # type: ignore[assignment]
        return self.refuses

    def over(self, **result: object) -> None:
        if result:
            self._wrote(json.dumps(result).encode() + b"\n")
        self._gone()

    def save(self, number: int = 1, wrote_s: float = 0.0) -> None:
        found = checkpoint_files.fingerprint(checkpoint_files.list_folder(str(self.folder)))
        facts = {
            "files": 1,
            "bytes": 3,
            "sent": 3,
            "seconds": 1.5,
            "wrote_s": wrote_s,
            "newest_ns": 10**18,
        }
        self.over(state="saved", number=number, print=found, **facts)


def test_what_is_safe_is_told_and_not_handed_over_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint_sync = Hands(tmp_path, monkeypatch)
    checkpoint_sync.write("one")
    checkpoint_sync._look()
    assert checkpoint_sync.asked == [False], "one at a time"
    checkpoint_sync.save(wrote_s=SHORTEST_S)
    [(kind, fields)] = checkpoint_sync.said
    assert (kind, fields["number"], fields["sent"], fields["cost_s"]) == (
        "checkpoint",
        1,
        3,
        SHORTEST_S,
    )
    assert fields["newest_at"].startswith("2001-09-09T01:46:40")
    checkpoint_sync._look()
    checkpoint_sync._look()
    assert checkpoint_sync.asked == [False]
    checkpoint_sync.finish(checkpoint_sync.done)
    assert (checkpoint_sync.asked, checkpoint_sync.ended, checkpoint_sync.seconds) == (
        [False],
        1,
        1.5,
    )


def test_a_cost_that_could_not_be_measured_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint_sync = Hands(tmp_path, monkeypatch)
    checkpoint_sync.write("one")
    checkpoint_sync.save(wrote_s=SHORTEST_S / 2)
    assert "cost_s" not in checkpoint_sync.said[0][1]


def test_files_that_change_each_time_are_copied_first_and_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint_sync = Hands(tmp_path, monkeypatch)
    for tries in range(VOIDS + 1):
        checkpoint_sync.write(str(tries))
        checkpoint_sync.over(state="void", reason="model")
        assert len(checkpoint_sync.said) == (tries + 1 >= VOIDS)
    assert checkpoint_sync.asked == [False, *[True] * VOIDS]
    assert checkpoint_sync.said[0][1]["text"].startswith("model changed during every upload")
    checkpoint_sync.write("safe")
    checkpoint_sync.save()
    checkpoint_sync.write("another")
    assert checkpoint_sync.asked[-1] is False


def test_what_the_work_wrote_last_is_tried_three_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing changes it any more, so nothing is copied first."""
    checkpoint_sync = Hands(tmp_path, monkeypatch)
    checkpoint_sync.write("one")
    checkpoint_sync.over(state="void", reason="model")
    checkpoint_sync.finish(checkpoint_sync.done)
    for _ in range(LAST_TRIES):
        assert checkpoint_sync.ended == 0
        checkpoint_sync.over(state="void", reason="model")
    assert checkpoint_sync.asked == [False] * (1 + LAST_TRIES)
    assert checkpoint_sync.ended == 1
    assert checkpoint_sync.said[-1][1]["text"].endswith(
        "could not be uploaded in time; no checkpoint of this attempt was saved"
    )


def test_a_last_try_that_works_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_sync = Hands(tmp_path, monkeypatch)
    checkpoint_sync.write("one")
    checkpoint_sync.finish(checkpoint_sync.done)
    assert (checkpoint_sync.asked, checkpoint_sync.ended) == ([False], 0)
    checkpoint_sync.over()  # the process died without a word
    assert (checkpoint_sync.asked, checkpoint_sync.ended) == ([False, False], 0)
    checkpoint_sync.save()
    assert (checkpoint_sync.ended, checkpoint_sync.said[-1][0]) == (1, "checkpoint")


def test_an_end_that_is_cut_short_says_what_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint_sync = Hands(tmp_path, monkeypatch)
    checkpoint_sync.write("one")
    checkpoint_sync.save(number=7)
    checkpoint_sync.write("second")
    checkpoint_sync.finish(checkpoint_sync.done)
    checkpoint_sync.kill()
    checkpoint_sync.over()
    assert checkpoint_sync.ended == 1
    assert checkpoint_sync.said[-1][1]["text"].endswith("in time; the newest saved checkpoint is 7")


def test_a_refusal_ends_the_handing_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_sync = Hands(tmp_path, monkeypatch)
    checkpoint_sync.write("one")
    checkpoint_sync.over(state="refused", reason="the claim is another's")
    assert (
        checkpoint_sync.said[-1][1]["text"]
        == "no more checkpoints will be uploaded: the claim is another's"
    )
    checkpoint_sync.write("two")
    checkpoint_sync.finish(checkpoint_sync.done)
    assert (checkpoint_sync.asked, checkpoint_sync.ended) == ([False], 1)


def test_a_process_that_cannot_begin_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint_sync = Hands(tmp_path, monkeypatch)
    checkpoint_sync.refuses = "no more processes"
    checkpoint_sync.write("one")
    checkpoint_sync.finish(checkpoint_sync.done)
    assert checkpoint_sync.ended == 1


def test_another_rank_says_once_that_its_files_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint_sync = Hands(tmp_path, monkeypatch, rank=1)
    for text in ("one", "two"):
        checkpoint_sync.write(text)
    checkpoint_sync.finish(checkpoint_sync.done)
    assert (checkpoint_sync.asked, checkpoint_sync.ended, len(checkpoint_sync.said)) == ([], 1, 1)
    assert checkpoint_sync.said[0][1]["text"].startswith(
        "rank 1 writes to its own checkpoint folder"
    )


def test_a_file_that_vanishes_before_it_is_opened_is_in_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Work that removes its old checkpoints does so at any moment."""
    folder = make_calm_folder(tmp_path, monkeypatch, "old")
    plain = checkpoint_files.list_folder

    def late(path: str, **kinds: Any) -> Any:
        found = plain(path, **kinds)
        (folder / "old").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(checkpoint_files, "list_folder", late)
    checkpoint_hand_over.hand_over(
        make_config(tmp_path), str(folder), copy_first=False, since_ns=0, began_ns=0
    )
    assert json.loads(capfd.readouterr().out)["state"] == "same"


class StandInServer:
    """The control plane, as far as checkpoints are asked for: answers in their order, and
    contents by hash.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *newest: object) -> None:
        self.newest = list(newest)
        self.contents: dict[str, bytes] = {}
        server = self

        class Line:
            def __init__(self, config: object) -> None: ...

            def read(self, method: str, route: str, *more: object, **named: object) -> bytes:
                assert (method, route) == ("GET", "checkpoints/latest")
                return json.dumps({"checkpoint": server.newest.pop(0)}).encode()

        def fetch_to(line: object, name: str, path: str) -> None:
            if name not in self.contents:
                raise TransferFailed("gone")
            Path(path).write_bytes(self.contents[name])

        monkeypatch.setattr(checkpoint_restore, "BlockingClient", Line)
        monkeypatch.setattr(checkpoint_restore, "fetch_to", fetch_to)

    def file(self, path: str, content: bytes | None = b"new") -> dict[str, object]:
        name = hashlib.sha256(content or b"lost").hexdigest()
        if content is not None:
            self.contents[name] = content
        return {"path": path, "sha256": name, "size": 3, "mode": 0o640, "mtime_ns": 10**18}


def newest(*files: dict[str, object], attempt: int = 2) -> dict[str, object]:
    return {"attempt": attempt, "number": 7, "bytes": 3 << 19, "files": list(files)}


def make_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (folder / "mine").write_text("old")
    return folder


def test_a_checkpoint_takes_the_folders_place_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, folder = StandInServer(monkeypatch), make_folder(tmp_path)
    link = {"path": "last", "link": "sub/model"}
    server.newest = [newest(server.file("sub/model"), link)]
    told = checkpoint_restore.restore(make_config(tmp_path), str(folder))
    assert told == "resuming from checkpoint 7 of attempt 2: 2 files, 1.5 MiB"
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == [
        "last",
        "sub",
        "sub/model",
    ]
    seen = (folder / "sub" / "model").stat()
    assert (seen.st_mode & 0o777, seen.st_mtime_ns) == (0o640, 10**18)
    assert (folder / "last").readlink() == Path("sub/model")


def test_what_cannot_be_brought_whole_leaves_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer checkpoint may have taken its place meanwhile, so that it is asked for again, and
    not for ever.
    """
    server, folder = StandInServer(monkeypatch), make_folder(tmp_path)
    torn = newest(server.file("a"), server.file("b", None))
    server.newest = [torn] * checkpoint_restore.RESTORES
    with pytest.raises(TransferFailed):
        checkpoint_restore.restore(make_config(tmp_path), str(folder))
    assert (server.newest, [path.name for path in folder.iterdir()]) == ([], ["mine"])
    server.newest = [torn, newest(server.file("a"))]
    assert checkpoint_restore.restore(make_config(tmp_path), str(folder)).startswith(
        "resuming from checkpoint 7"
    )
    assert [path.name for path in folder.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("last", "attempt", "brought"), [("2", 2, False), ("1", 2, True), ("-1", 0, True)]
)
def test_a_shared_folder_is_made_what_a_later_attempt_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str, attempt: int, brought: bool
) -> None:
    server, folder = StandInServer(monkeypatch), make_folder(tmp_path)
    (tmp_path / "attempt").write_text(last)
    server.newest = [newest(server.file("a"), attempt=attempt)]
    told = checkpoint_restore.settle(make_config(tmp_path), str(folder), 3)
    assert bool(told) is brought
    assert (folder / "mine").exists() is not brought
    assert (tmp_path / "attempt").read_text() == "3"


@pytest.mark.parametrize(
    ("filled", "attempt", "brought"), [(True, 0, False), (True, 1, True), (False, 0, True)]
)
def test_a_shared_folder_that_no_attempt_had_is_the_first_checkpoint_if_it_holds_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filled: bool, attempt: int, brought: bool
) -> None:
    server, folder = StandInServer(monkeypatch), make_folder(tmp_path)
    if not filled:
        (folder / "mine").unlink()
    server.newest = [newest(server.file("a"), attempt=attempt)]
    assert bool(checkpoint_restore.settle(make_config(tmp_path), str(folder), 3)) is brought


def test_a_shared_folder_that_could_not_be_brought_is_no_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, folder = StandInServer(monkeypatch), make_folder(tmp_path)
    (tmp_path / "attempt").write_text("1")
    server.newest = [newest(server.file("b", None))] * checkpoint_restore.RESTORES
    with pytest.raises(TransferFailed):
        checkpoint_restore.settle(make_config(tmp_path), str(folder), 3)
    assert (tmp_path / "attempt").read_text() == "1", (
        "the other ranks wait, and the next attempt tries again"
    )


def test_nothing_is_brought_where_nothing_was_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, folder = StandInServer(monkeypatch, None), make_folder(tmp_path)
    assert checkpoint_restore.restore(make_config(tmp_path), str(folder)) == ""
    assert (server.newest, (folder / "mine").read_text()) == ([], "old")


@pytest.mark.parametrize("path", ["../out", "/etc/out", "a/../../out"])
def test_a_path_that_leaves_the_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    server, folder = StandInServer(monkeypatch), make_folder(tmp_path)
    server.newest = [newest(server.file(path))]
    with pytest.raises(Exception, match="is not in the working folder"):
        checkpoint_restore.restore(make_config(tmp_path), str(folder))
    assert (folder / "mine").exists()


def test_a_file_of_the_same_size_that_was_written_again_is_another(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (folder / "a").write_text("one")
    os.utime(folder / "a", (10, 10))
    entries = checkpoint_files.list_folder(str(folder))
    saving = checkpoint_upload.CheckpointUpload(make_config(tmp_path), str(folder), entries)
    try:
        with (folder / "a").open("r+") as file:
            file.write("two")
        with pytest.raises(checkpoint_upload.FileChanged):
            saving.hash()
    finally:
        os.close(saving.get_file(entries[0]))


def test_a_hash_is_remembered_only_of_a_file_that_has_been_still(tmp_path: Path) -> None:
    """One that was written a moment ago may be written again within one tick of the clock, and
    look the same.
    """
    folder, config = tmp_path / "ckpt", make_config(tmp_path)
    folder.mkdir()

    def names() -> dict[str, str]:
        saving = checkpoint_upload.CheckpointUpload(
            config, str(folder), checkpoint_files.list_folder(str(folder))
        )
        saving.hash()
        for number in saving._open.values():
            os.close(number)
        return saving._names

    def known() -> set[str]:
        return set(json.loads((tmp_path / "home" / "hashes.json").read_text()))

    (folder / "still").write_text("one")
    (folder / "fresh").write_text("one")
    os.utime(folder / "still", (10, 10))
    first = names()
    assert (first["still"], known()) == (first["fresh"], {"still"})
    with (folder / "still").open("r+") as file:
        file.write("two")
    os.utime(folder / "still", (20, 20))
    assert names()["still"] == hashlib.sha256(b"two").hexdigest(), (
        "it is as large as before, and the same file"
    )


def test_a_file_that_is_created_at_once_shows_how_long_its_writing_took(tmp_path: Path) -> None:
    """The kernel dates a new file a few milliseconds back."""
    if born_ns(str(tmp_path)) is None:
        pytest.skip("this file system does not record when a file was created")
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        watcher = CheckpointWatcher(str(folder))
        with (folder / "model").open("w", buffering=1) as file:
            file.write("one\n")
            time.sleep(2 * SHORTEST_S)
            file.write("two\n")
        assert watcher.look(last=True)["sent"] == 8


def test_a_file_that_was_restored_just_now_shows_no_duration(tmp_path: Path) -> None:
    """Its content is dated long ago, but the kernel dates its creation with the current tick."""
    if born_ns(str(tmp_path)) is None:
        pytest.skip("this file system does not record when a file was created")
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "model").write_text("one")
        os.utime(folder / "model", (20, 20))
        watcher = CheckpointWatcher(str(folder))
        time.sleep(2 * SHORTEST_S)
        (folder / "model").write_text("two and three")
        assert "cost_s" not in watcher.look(last=True)


class RefusingServer(BaseHTTPRequestHandler):
    """Lacks no file, and refuses every checkpoint for its content."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        told: tuple[int, dict[str, object]] = (422, {"message": "the path is too long: 'x'"})
        if self.path.startswith("/agent/v1/blobs/missing"):
            told = 200, {"missing": [], "direct": False}
        body = json.dumps(told[1]).encode()
        self.send_response(told[0])
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None: ...


def test_a_checkpoint_that_the_control_plane_refuses_is_told_and_not_sent_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_calm_folder(tmp_path, monkeypatch)
    config = make_config(tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), RefusingServer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        config.address = f"http://127.0.0.1:{server.server_port}"
        checkpoint_hand_over.hand_over(
            config, str(folder), copy_first=False, since_ns=0, began_ns=0
        )
        server.shutdown()
        thread.join()
    assert json.loads(capfd.readouterr().out) == {
        "state": "failed",
        "reason": "the control plane refused checkpoints: the path is too long: 'x'",
    }


@pytest.mark.parametrize("is_link", [False, True])
def test_a_name_that_is_not_utf8_is_named_and_the_rest_is_saved(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    is_link: bool,
) -> None:
    folder, name = make_calm_folder(tmp_path, monkeypatch), os.fsdecode(b"b\xff")
    if is_link:
        (folder / "link").symlink_to(name)
    else:
        (folder / name).write_text("x")
    monkeypatch.setattr(checkpoint_upload.CheckpointUpload, "send", lambda self: (1, 1))
    checkpoint_hand_over.hand_over(
        make_config(tmp_path), str(folder), copy_first=False, since_ns=0, began_ns=0
    )
    told = json.loads(capfd.readouterr().out)
    assert (told["state"], told["files"]) == ("saved", 1)
    assert told["unnamed"] == repr("link" if is_link else name)


def test_a_time_far_in_the_future_is_stored_as_the_latest_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control plane accepts no later time: the times of such files are mistakes."""
    folder = make_calm_folder(tmp_path, monkeypatch)
    os.utime(folder / "a", (1e10, 1e10))
    entries = checkpoint_files.list_folder(str(folder))
    upload = checkpoint_upload.CheckpointUpload(make_config(tmp_path), str(folder), entries)
    upload.hash()
    [file] = upload.describe()["files"]  # type: ignore[misc]
    assert file["mtime_ns"] == NEWEST_NS
    assert checkpoint_upload.newest(entries) == NEWEST_NS
