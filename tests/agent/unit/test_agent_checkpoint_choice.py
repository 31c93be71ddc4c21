"""Which files of a checkpoint folder are whole while the work goes on writing."""

import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cavvy.agent.work.checkpoint_choice import (
    STATUS_BYTES,
    FileChoice,
    LookResult,
    choose_files,
)
from cavvy.agent.work.checkpoint_files import RESTLESS, CheckpointWatcher, list_folder
from cavvy.agent.work.checkpoint_upload import CheckpointUpload
from cavvy.agent.work.open_files import find_open


@pytest.fixture
def files() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def write(path: Path, text: str = "whole") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def choose(
    folder: Path,
    change: Callable[[], object] = lambda: None,
    before: tuple[str, ...] = (),
    **more: Any,
) -> FileChoice:
    first = list_folder(str(folder))
    opened = {
        entry.path: os.open(folder / entry.path, os.O_RDONLY) for entry in first if not entry.link
    }
    try:
        change()
        look = LookResult(
            first,
            list_folder(str(folder)),
            find_status=lambda entry: os.fstat(opened[entry.path]),
            writers=find_open(
                {entry.inode: opened[entry.path] for entry in first if not entry.link}
            )[0],
            before=[{"path": path, "sha256": "old", "size": 3, "mtime_ns": 1} for path in before],
            read_start=lambda entry: os.pread(opened[entry.path], 16, 0),
            **{"extends": lambda entry, row: False} | more,
        )
        return choose_files(look)
    finally:
        for file in opened.values():
            os.close(file)


def paths(choice: FileChoice) -> list[str]:
    return [entry.path for entry in choice.taken]


def test_a_log_that_grows_is_taken_up_to_where_it_was(tmp_path: Path, files: ExitStack) -> None:
    write(tmp_path / "model")
    log = files.enter_context((tmp_path / "log").open("a"))
    log.write("one")
    log.flush()

    def grow() -> None:
        log.write("two")
        log.flush()

    choice = choose(tmp_path, grow)
    assert (paths(choice), choice.growing) == (["log", "model"], {"log"})
    assert [entry.size for entry in choice.taken] == [3, 5]


def test_a_file_that_is_open_for_writing_stays_as_the_newest_checkpoint_has_it(
    tmp_path: Path, files: ExitStack
) -> None:
    """With the files beside it, which may belong to it."""
    write(tmp_path / "other")
    model = files.enter_context((tmp_path / "model").open("w"))
    model.write("half")
    model.flush()
    choice = choose(tmp_path, before=("model", "other"))
    assert (paths(choice), [row["path"] for row in choice.kept]) == ([], ["model", "other"])
    assert paths(choose(tmp_path)) == ["other"], "a new file that is being written waits"


def test_a_file_that_stays_open_is_in_no_checkpoint(tmp_path: Path, files: ExitStack) -> None:
    write(tmp_path / "model")
    files.enter_context(write(tmp_path / "states.h5").open("r+"))
    assert choose(tmp_path).unsafe == {"states.h5"}
    assert choose(tmp_path, before=("states.h5",)).unsafe == set()


def test_a_large_file_that_is_overwritten_in_the_only_copy_is_named(tmp_path: Path) -> None:
    def look() -> str:
        return str(watcher.look(last=True).get("text", ""))

    data = "x" * STATUS_BYTES
    write(tmp_path / "last.pt", data)
    watcher = CheckpointWatcher(str(tmp_path))
    for name in ("log", "new"):
        write(tmp_path / name, data)
    os.replace(tmp_path / "new", tmp_path / "last.pt")
    assert look() == ""
    write(tmp_path / "log", data + data)  # it grows
    write(tmp_path / "status", "x")
    assert look() == ""
    write(tmp_path / "status", "y")
    write(tmp_path / "last.pt", data)
    assert look().startswith("last.pt in the checkpoint folder is overwritten in place")
    write(tmp_path / "status", "z")
    assert look()  # as long as it exists
    (tmp_path / "last.pt").unlink()
    assert look() == ""


def test_a_folder_that_never_rests_has_checkpoints_while_nothing_is_written(
    tmp_path: Path, files: ExitStack
) -> None:
    def save(step: int) -> bool:
        write(tmp_path / "new", f"{step}").replace(tmp_path / "state")
        os.utime(tmp_path / "state", ns=(step, step))
        return bool(watcher.look())

    watcher = CheckpointWatcher(str(tmp_path))
    saved = [save(step) for step in range(1, 2 * RESTLESS + 1)]
    assert saved == [*[False] * (RESTLESS - 1), True] * 2
    opened = files.enter_context((tmp_path / "state").open("a"))
    os.replace(tmp_path / "state", tmp_path / "log")  # a file that stays open
    assert not any(save(step) for step in range(100, 102 + RESTLESS))
    opened.close()
    assert save(200)
    write(tmp_path / "another part")
    assert not save(201), "a save that takes long adds files"
    watcher = CheckpointWatcher(str(tmp_path), elsewhere=True)
    assert not any(save(step) for step in range(300, 303 + RESTLESS)), "others may be writing"


def test_a_file_that_is_replaced_by_a_rename_is_whole(tmp_path: Path) -> None:
    write(tmp_path / "step")
    new = write(tmp_path / "new")
    assert paths(choose(tmp_path, lambda: new.replace(tmp_path / "step"))) == ["step"]


def test_a_new_folder_that_is_being_filled_waits_unless_a_later_one_exists(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-8" / "model")
    write(tmp_path / "checkpoint-10" / "model")
    choice = choose(tmp_path, lambda: write(tmp_path / "checkpoint-10" / "state"))
    assert (paths(choice), choice.is_all) == (["checkpoint-8/model"], False)


@pytest.mark.parametrize("renamed", [False, True])
def test_what_the_work_wrote_when_it_was_killed_is_whole_only_after_a_rename(
    tmp_path: Path, renamed: bool
) -> None:
    old = write(tmp_path / "old")
    os.utime(old, (1, 1))
    model = write(tmp_path / "new")
    while renamed and model.stat().st_ctime_ns <= model.stat().st_mtime_ns:
        model = model.replace(tmp_path / "model")
    choice = choose(tmp_path, cut_ns=time.time_ns())
    assert paths(choice) == (["model", "old"] if renamed else ["old"])


@pytest.mark.parametrize("is_open", [False, True])
def test_what_was_open_at_an_unanswered_signal_is_torn(tmp_path: Path, is_open: bool) -> None:
    inode = write(tmp_path / "model").stat().st_ino
    torn = frozenset([inode] if is_open else [1])
    choice = choose(tmp_path, before=("model",), torn=torn)
    assert (len(choice.taken), len(choice.kept)) == ((0, 1) if is_open else (1, 0))


def test_two_names_of_one_file_are_both_whole(tmp_path: Path) -> None:
    (tmp_path / "last").hardlink_to(write(tmp_path / "step-4"))
    assert paths(choose(tmp_path)) == ["last", "step-4"]


def test_a_file_that_is_open_in_a_container_is_not_whole(
    tmp_path: Path, files: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes of a container can be those of another user, whose files are not listed."""
    monkeypatch.setattr("cavvy.agent.work.open_files.find_writers", lambda inodes: {})
    write(tmp_path / "whole")
    files.enter_context((tmp_path / "model").open("w"))
    assert paths(choose(tmp_path)) == ["whole"]


@pytest.mark.parametrize("place", ["weights/model", "state.json"])
def test_while_a_file_is_overwritten_no_other_file_of_the_checkpoint_changes(
    tmp_path: Path, files: ExitStack, place: str
) -> None:
    """Also files of other folders may belong together."""
    both = ("state.json", "weights/model")
    for path in both:
        write(tmp_path / path)
    files.enter_context((tmp_path / place).open("r+"))
    write(tmp_path / "checkpoint-8" / "model")
    choice = choose(tmp_path, before=both)
    assert paths(choice) == ["checkpoint-8/model"]
    assert [row["path"] for row in choice.kept] == list(both)
    assert choice.busy == {place}


def test_a_small_file_that_always_changes_holds_up_only_its_own_folder(
    tmp_path: Path, files: ExitStack
) -> None:
    write(tmp_path / "last" / "model")
    files.enter_context(write(tmp_path / "status").open("r+"))
    choice = choose(
        tmp_path, before=("last/model", "status"), restless=frozenset({"status", "last/model"})
    )
    assert (paths(choice), [row["path"] for row in choice.kept]) == (["last/model"], ["status"])


def test_a_folder_that_is_being_removed_stays_as_it_was(tmp_path: Path) -> None:
    write(tmp_path / "best" / "state")
    rest = write(tmp_path / "best" / "optimizer")
    before = ("best/model", "best/optimizer", "best/state")
    choice = choose(tmp_path, rest.unlink, before=before)
    assert (paths(choice), [row["path"] for row in choice.kept]) == ([], list(before))


def test_a_new_folder_that_lacks_files_of_others_like_it_is_not_finished(tmp_path: Path) -> None:
    """And as long as it is not, the folder before it stays, although the work has removed it."""
    write(tmp_path / "checkpoint-10" / "model")
    before = ("checkpoint-6/model", "checkpoint-8/model", "checkpoint-8/state")  # 6 is half removed
    choice = choose(tmp_path, before=before)
    assert (paths(choice), [row["path"] for row in choice.kept]) == ([], list(before[1:]))
    assert paths(choose(tmp_path, before=before, ended=True)) == ["checkpoint-10/model"]
    for path in (write(tmp_path / "checkpoint-10" / "state"), tmp_path / "checkpoint-10" / "model"):
        os.utime(path, (1e9, 1e9))
    assert len(paths(choose(tmp_path, before=before))) == 2


@pytest.mark.parametrize("rest", [("model",), ("model", "state")])
def test_a_new_folder_that_is_half_removed_is_not_taken(
    tmp_path: Path, rest: tuple[str, ...]
) -> None:
    """The work saves faster than the node uploads: the newest checkpoint has none of them."""
    for name in rest:
        write(tmp_path / "checkpoint-8" / name)
    for name in ("model", "state"):
        write(tmp_path / "checkpoint-9" / name)
    change = partial(write, tmp_path / "checkpoint-9" / "more")
    before = ("checkpoint-2/model", "checkpoint-2/state")
    choice = choose(tmp_path, change, before=before)
    whole = rest == ("model", "state")
    assert paths(choice) == (["checkpoint-8/model", "checkpoint-8/state"] if whole else [])
    assert [row["path"] for row in choice.kept] == ([] if whole else [*before])


@pytest.mark.parametrize(
    ("before", "here", "kept"),
    [
        # what the program has removed leaves the checkpoint, but not before a later one is whole
        (("1/model", "2/model", "3/model"), ("2/model", "3/model"), ()),
        (("1/model", "2/model", "3/model"), (), ("3/model",)),
        (("8/model", "6/model"), ("6/model",), ("8/model",)),  # 6 is the best one
        # ranks whose folders belong together
        (("0/step-3/model", "1/step-3/model"), (), ("0/step-3/model", "1/step-3/model")),
        (("0/step-3/model", "1/step-3/model"), ("1/step-3/model",), ("0/step-3/model",)),
        (
            ("0/step-3/model", "0/step-4/model", "1/step-3/model"),
            ("0/step-4/model",),
            ("0/step-3/model", "1/step-3/model"),
        ),
        (
            ("0/step-3/model", "0/step-4/model", "1/step-3/model", "1/step-4/model"),
            ("0/step-4/model", "1/step-4/model"),
            (),
        ),
    ],
)
def test_removed_folders_stay_until_a_later_one_is_whole(
    tmp_path: Path, before: tuple[str, ...], here: tuple[str, ...], kept: tuple[str, ...]
) -> None:
    for path in here:
        os.utime(write(tmp_path / path), (1e9, 1e9))
    new = "0/step-9" if "step" in before[0] else "9"
    write(tmp_path / new / "model")
    change = partial(write, tmp_path / new / "state")
    choice = choose(tmp_path, change, before=before)
    assert {path for path in paths(choice) if new not in path} == {*here}
    assert [row["path"] for row in choice.kept] == [*kept]


def test_removed_files_stay_until_later_ones_are_whole(tmp_path: Path) -> None:
    before = ("4-of-2.pt", "5-of-1.pt", "5-of-2.pt")
    write(tmp_path / "5-of-1.pt")
    choice = choose(tmp_path, partial(write, write(tmp_path / "6-of-1.pt"), "more"), before=before)
    assert (paths(choice), [row["path"] for row in choice.kept]) == (["5-of-1.pt"], ["5-of-2.pt"])


def test_a_new_folder_has_to_rest_as_long_as_it_took_to_fill_it(tmp_path: Path) -> None:
    now = time.time()
    for name, age_s in (("model", 6), ("state", 4)):
        write(tmp_path / "first" / name)
        os.utime(tmp_path / "first" / name, (now - age_s, now - age_s))
    assert len(paths(choose(tmp_path))) == 2
    os.utime(tmp_path / "first" / "model", (now - 30, now - 30))
    assert paths(choose(tmp_path)) == []


@pytest.mark.parametrize("named", [True, False])
def test_a_new_folder_that_a_later_file_names_needs_no_long_look(
    tmp_path: Path, named: bool
) -> None:
    write(tmp_path / "latest", "step-1")
    write(tmp_path / "step-2" / "model")
    os.utime(tmp_path / "latest", (1, 1))
    if named:
        write(tmp_path / "latest", "step-2")
    choice = choose(tmp_path, before=("latest",), since=[])
    assert paths(choice) == (["latest", "step-2/model"] if named else ["latest"])


def test_an_index_that_names_an_unfinished_folder_stays_as_it_was(tmp_path: Path) -> None:
    write(tmp_path / "array" / "c" / "5" / "0")
    write(tmp_path / "array" / "index")
    change = partial(write, tmp_path / "array" / "c" / "5" / "1")
    choice = choose(tmp_path, change, before=("array/c/4/0", "array/index"))
    assert (paths(choice), choice.busy) == ([], {"array/index"})


def test_a_link_to_an_unfinished_folder_stays_as_it_was(tmp_path: Path) -> None:
    write(tmp_path / "step-2" / "model")
    (tmp_path / "latest").symlink_to("step-2")
    change = partial(write, tmp_path / "step-2" / "state")
    assert paths(choose(tmp_path, change, before=("latest",))) == []


@pytest.mark.parametrize(("age_s", "like", "whole"), [(9, "", 0), (11, "", 1), (11, "run-1", 0)])
def test_a_new_folder_that_is_always_being_filled_is_no_single_save(
    tmp_path: Path, age_s: int, like: str, whole: int
) -> None:
    """Unless a folder like it was filled at once."""
    write(tmp_path / "run-2" / "model")
    before = (f"{like}/model",) if like else ()
    choice = choose(
        tmp_path,
        partial(write, tmp_path / "run-2" / "state"),
        before=before,
        filled_s=10.0,
        find_birth=lambda folder: time.time_ns() - age_s * 10**9,
    )
    assert len(paths(choice)) == whole


def test_an_open_database_is_whole_while_nothing_changes_it(tmp_path: Path) -> None:
    base = sqlite3.connect(tmp_path / "study.db", isolation_level=None)
    base.execute("pragma journal_mode = wal")
    base.execute("create table t (x)")
    expected = ["study.db", "study.db-wal"]  # its shared memory is made anew
    assert paths(choose(tmp_path)) == expected
    change = partial(base.execute, "insert into t values (1)")
    assert paths(choose(tmp_path, change)) == paths(choose(tmp_path, change, tuple(expected))) == []
    base.close()


def test_a_log_that_was_open_when_the_work_ended_holds_up_no_other_file(tmp_path: Path) -> None:
    write(tmp_path / "model")
    inode = write(tmp_path / "log").stat().st_ino
    choice = choose(
        tmp_path, before=("log", "model"), torn=frozenset([inode]), extends=lambda entry, row: True
    )
    assert (paths(choice), [row["path"] for row in choice.kept]) == (["model"], ["log"])


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_database_that_is_always_changed_is_copied_whole(tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "work" / "ckpt"
    folder.mkdir(parents=True)
    base = sqlite3.connect(folder / "study.db", isolation_level=None)
    base.execute(f"pragma journal_mode = {mode}")
    base.execute("create table t (x)")
    base.execute("insert into t values (1)")
    config: Any = SimpleNamespace(
        private=str(tmp_path), folder=str(tmp_path / "work"), address="unix:/nowhere"
    )
    upload = CheckpointUpload.look(config, str(folder), None, quiet=True)
    base.execute("insert into t values (2)")
    assert not upload.choose()
    upload.hash()
    for entry, read in upload.list_contents().values():
        (tmp_path / Path(entry.path).name).write_bytes(read(0, entry.size))
    upload.close()
    base.close()
    copied = sqlite3.connect(tmp_path / "study.db")
    assert copied.execute("select x from t").fetchall() == [(1,)]
    copied.close()


@pytest.mark.parametrize("handled", [True, False])
def test_a_shared_folder_names_what_a_signal_left_half_written(
    tmp_path: Path, files: ExitStack, handled: bool
) -> None:
    path = write(tmp_path / "last.pt")
    watcher = CheckpointWatcher(str(tmp_path))
    files.enter_context(path.open("r+"))
    before = signal.signal(signal.SIGTERM, (lambda *_: None) if handled else signal.SIG_DFL)
    files.callback(signal.signal, signal.SIGTERM, before)
    watcher.note_writers()
    os.utime(path, (time.time() + 9,) * 2)  # long after the signal
    assert ("was writing last.pt" in watcher.explain_torn(failed=True)) is not handled
    assert watcher.explain_torn(failed=False) == ""
