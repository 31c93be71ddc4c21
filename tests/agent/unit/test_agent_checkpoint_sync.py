"""When a checkpoint is whole: it was still between two looks, and the same before and after its
files were opened.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.checkpoint_calls import StillLoop, make_calm_folder

from cavvy.agent.allowed_folders import AllowedFolders
from cavvy.agent.checkpoint_sync import CheckpointSync
from cavvy.agent.data.upload import list_files
from cavvy.agent.ends import AgentState
from cavvy.agent.http_client import StorageTimeout
from cavvy.agent.runner import RankRunner
from cavvy.agent.sidecar import SidecarPlace
from cavvy.agent.verdict import FailureCause
from cavvy.agent.work import checkpoint_files, checkpoint_hand_over, checkpoint_upload


class CountingSaver(CheckpointSync):
    started = 0

    def _start(self) -> None:
        self.started += 1


def make_config(tmp_path: Path, folder: Path | None = None) -> Any:
    (tmp_path / "home").mkdir()
    return SimpleNamespace(
        rank=0,
        gang="g",
        home=str(tmp_path / "home"),
        private=str(tmp_path / "home"),
        folder=str(folder or tmp_path),
        address="unix:/nowhere",
        token="t",
        pin="",
        storage=None,
    )


def make_saver(home: Path, folder: Path, say: Any) -> CountingSaver:
    loop: Any = StillLoop()
    place = SidecarPlace(loop, make_config(home), say)
    return CountingSaver(place, str(folder), every_s=None)


def test_a_folder_that_changes_between_looks_waits(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    said: list[object] = []
    checkpoint_sync = make_saver(tmp_path, folder, lambda *a, **k: said.append(a))
    for number in range(3):  # a file that grows is not whole at any look
        (folder / "model").write_text("x" * (number + 1))
        checkpoint_sync._tick()
        assert checkpoint_sync.started == 0
    checkpoint_sync._tick()
    assert checkpoint_sync.started == 1
    assert said == []


def test_what_begins_while_the_files_are_opened_waits_for_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_calm_folder(tmp_path, monkeypatch)
    plain = checkpoint_upload.CheckpointUpload.__init__

    def slow(self: checkpoint_upload.CheckpointUpload, *args: Any, **fields: Any) -> None:
        plain(self, *args, **fields)
        (folder / "b").write_text(
            "second"
        )  # half of the next checkpoint is there before the first is sent

    monkeypatch.setattr(checkpoint_upload.CheckpointUpload, "__init__", slow)
    sent: list[bool] = []
    monkeypatch.setattr(
        checkpoint_upload.CheckpointUpload, "send", lambda self: sent.append(True) or (1, 1)
    )
    checkpoint_hand_over.hand_over(
        make_config(tmp_path), str(folder), copy_first=False, since_ns=0, began_ns=0
    )
    said = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (said["state"], said["files"], said["print"], sent) == ("saved", 1, "", [True])


@pytest.mark.parametrize(("copies", "told"), [(True, "preempted"), (False, "exit")])
def test_a_copy_of_outputs_that_a_notice_cuts_short_is_no_failure_of_the_work(
    copies: bool, told: str
) -> None:
    runner: Any = RankRunner.__new__(RankRunner)
    runner._home_entries = None
    runner._heard_notice, runner._work = False, None
    asked: list[str] = []
    ended: list[tuple[str, int | None]] = []
    runner._steps = SimpleNamespace(
        gpu_excess="",
        finishing=True,
        process=object() if copies else None,
        interrupted=False,
        ask=lambda: asked.append(""),
    )
    runner._loop, runner._kill_timer = StillLoop(), None
    runner._state = AgentState.WORKING
    runner._ending = None
    runner._cause = FailureCause()
    runner._config = SimpleNamespace(taken=None)
    runner._conclude = lambda outcome, code, reason: ended.append((outcome, code))
    runner._end("preempted", "the provider is reclaiming the node", 30.0, 5.0)
    runner.failed("exit", 74, "its outputs could not be copied")
    runner.ran(0, 0)
    assert ended == [(told, 74), ("succeeded", 0)], "a copy that is done in time makes it succeed"
    assert asked == [], "what the work wrote has until the end"


def test_a_file_that_is_written_to_after_it_was_listed_is_not_of_that_moment(
    tmp_path: Path,
) -> None:
    """Its content alone is whole, but it is not what stood beside the other files."""
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (folder / "a").write_text("one")
    config: Any = SimpleNamespace(
        home=str(tmp_path), private=str(tmp_path), folder=str(tmp_path), placed=[]
    )
    entries = checkpoint_files.list_folder(str(folder))
    saving = checkpoint_upload.CheckpointUpload(config, str(folder), entries)
    try:
        saving.hash()
        with (folder / "a").open("r+") as file:
            file.write("another")
        with pytest.raises(checkpoint_upload.FileChanged):
            saving.hash()
    finally:
        os.close(saving.get_file(entries[0]))


def test_a_bucket_that_is_silent_is_told_of_once_and_tried_again_and_the_end_does_not_wait_for_it_twice(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    said: list[tuple[str, str]] = []
    loop: Any = StillLoop()

    def say(kind: str, **fields: Any) -> None:
        said.append((fields["name"], fields["text"]))

    place = SidecarPlace(loop, make_config(tmp_path), say)
    checkpoint_sync = CountingSaver(place, str(folder), every_s=None)
    (folder / "model").write_text("x")
    checkpoint_sync._heard({"state": "waits", "reason": "no answer for 60 s"})
    assert said.pop() == ("waits", "the checkpoint is not safe yet: no answer for 60 s")
    for tries in (1, 2):
        checkpoint_sync._look()
        checkpoint_sync._look()
        checkpoint_sync._heard({"state": "silent", "reason": "the bucket is away"})
        checkpoint_sync._over()
        assert said == [
            (
                "unsafe",
                "the checkpoint is not safe: the bucket is away; retrying",
            )
        ]
        assert checkpoint_sync.started >= tries
    ended: list[bool] = []
    checkpoint_sync.finish(lambda: ended.append(True))
    assert ended == [True], "its process did not begin, so that nothing is waited for"
    checkpoint_sync._tries, started = 1, checkpoint_sync.started  # as if it had begun
    checkpoint_sync._over()  # silent again
    checkpoint_sync._finish(lambda: ended.append(True))
    assert (ended, checkpoint_sync.started) == ([True, True], started)
    assert said[-1][1].startswith("the last changes to the checkpoint folder could not be uploaded")


def test_a_file_that_is_in_no_checkpoint_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    said: list[dict[str, Any]] = []
    saver = make_saver(
        tmp_path, folder, lambda kind, **fields: said.append({"kind": kind} | fields)
    )
    now = [0.0]
    monkeypatch.setattr("cavvy.agent.work.unsafe_files.time.monotonic", lambda: now[0])
    saved = {"state": "saved", "print": "", "number": 1, "files": 1, "bytes": 1, "sent": 1}
    saved |= {"seconds": 0.1, "newest_ns": 1, "wrote_s": 0.0}

    def upload(files: dict[str, str], /, **result: Any) -> list[tuple[str, str]]:
        said.clear()
        now[0] += 200.0
        saver._heard(result | {"unsafe": files})
        saver._over()
        return [(each["kind"], each.get("text", "")) for each in said]

    assert upload({"states.h5": "open"}, **saved) == [("checkpoint", "")]
    assert upload({"states.h5": "open"}, state="same") == []
    told = (
        "states.h5 in the checkpoint folder has never been safe: the program keeps it open and "
        "writes to it; close it after each save, or write a new file and rename it when it is "
        "complete"
    )
    assert upload({"states.h5": "open"}, state="same") == [("event", told)]
    assert upload({"states.h5": "open"}, **saved) == [("checkpoint", told)]  # said once
    assert upload({}, **saved) == [("checkpoint", "")]


def test_handing_over_to_a_silent_bucket_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_calm_folder(tmp_path, monkeypatch)

    def fail(self: checkpoint_upload.CheckpointUpload) -> tuple[int, int]:
        if self._tell is not None:
            self._tell("no answer for 60 s")
        raise StorageTimeout("given up")

    monkeypatch.setattr(checkpoint_upload.CheckpointUpload, "send", fail)
    for quiet, told in ((False, ["waits", "silent"]), (True, ["silent"])):
        home = tmp_path / str(quiet)
        home.mkdir()
        checkpoint_hand_over.hand_over(
            make_config(home, tmp_path),
            str(folder),
            copy_first=False,
            since_ns=0,
            began_ns=0,
            quiet=quiet,
        )
        said = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
        assert [each["state"] for each in said] == told
        assert said[-1]["reason"] == "given up"


def test_a_folder_that_cannot_be_listed_is_told_and_makes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, plain = make_calm_folder(tmp_path, monkeypatch), os.open
    (folder / "sub/locked").mkdir(parents=True)

    def refuse(path: Any, *more: Any, **named: Any) -> int:
        if path == "locked":
            raise PermissionError(13, "Permission denied", path)
        return plain(path, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    told: list[str] = []
    config, loop = make_config(tmp_path), StillLoop()
    place = SidecarPlace(loop, config, lambda kind, **f: told.append(f["text"]))  # type: ignore[arg-type]
    saver = CountingSaver(place, str(folder), every_s=None)
    for _ in range(3):
        saver._look()
    assert (saver.started, told) == (
        0,
        ["the checkpoint folder cannot be uploaded: [Errno 13] Permission denied: 'sub/locked'"],
    )
    checkpoint_hand_over.hand_over(config, str(folder), copy_first=False, since_ns=0, began_ns=0)
    assert json.loads(capfd.readouterr().out) == {
        "state": "failed",
        "reason": "[Errno 13] Permission denied: 'sub/locked'",
    }
    with pytest.raises(PermissionError, match="sub/locked"):
        list_files(AllowedFolders([str(tmp_path)]), str(folder), "s3://bucket/", told.append)


def test_what_cannot_be_read_or_goes_while_it_is_opened_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_calm_folder(tmp_path, monkeypatch)
    plain = os.open
    for error, told in (
        (PermissionError(13, "Permission denied"), "failed"),
        (FileNotFoundError(2, "gone"), "same"),
    ):

        def refuse(path: Any, *more: Any, error: OSError = error, **named: Any) -> int:
            if path == "a":
                raise error
            return plain(path, *more, **named)

        home = tmp_path / told
        home.mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refuse)
            checkpoint_hand_over.hand_over(
                make_config(home, tmp_path), str(folder), copy_first=False, since_ns=0, began_ns=0
            )
        said = json.loads(capfd.readouterr().out.splitlines()[-1])
        assert said["state"] == told
    said_to_user: list[str] = []
    checkpoint_sync = make_saver(tmp_path, folder, lambda kind, **f: said_to_user.append(f["text"]))
    for _ in range(2):
        checkpoint_sync._heard({"state": "failed", "reason": "Permission denied: a"})
        checkpoint_sync._over()
    assert said_to_user == ["the checkpoint is not safe: Permission denied: a; retrying"]
