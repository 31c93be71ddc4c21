"""Which files of a checkpoint folder are whole while the work goes on writing."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cavvy.agent.work.checkpoint_choice import (
    FileChoice,
    LookResult,
    choose_files,
    find_writers,
)
from cavvy.agent.work.checkpoint_files import list_folder


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
    opened = {entry.path: os.open(folder / entry.path, os.O_RDONLY) for entry in first}
    try:
        change()
        look = LookResult(
            first,
            list_folder(str(folder)),
            find_status=lambda entry: os.fstat(opened[entry.path]),
            writers=find_writers({entry.inode for entry in first}),
            before=[{"path": path, "sha256": "old", "size": 3} for path in before],
            extends=lambda entry, row: False,
            **more,
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
