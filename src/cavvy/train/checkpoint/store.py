"""A folder of checkpoints whose newest complete one is always readable, on any number of ranks.

Each is a folder `step-N` with the files of torch's distributed checkpoint, and is complete when
`complete.json` is in it: that file is written last, by a rename, after all ranks' files are on
disk. One save is in flight at a time. Its copy of the state is made by one kept stager while the
next step computes; code that changes parameters calls `join` first, or the copy would mix two
states without an error.
"""

import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any

from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from cavvy.train.world import RankWorld

log = logging.getLogger("cavvy.train")
MARK = "complete.json"
NAME = re.compile(r"step-(\d{12})")
KEPT = 2  # complete checkpoints to keep; the newest may turn out to be on a broken disk


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A complete checkpoint; `facts` holds everything except tensors."""

    path: Path
    step: int
    facts: dict[str, Any]


class CheckpointStore:
    """The checkpoints of a run in `folder`, which all ranks share, or of which each node has its
    own copy.
    """

    def __init__(
        self,
        folder: Path,
        world: RankWorld,
        finished: Callable[[StoredCheckpoint], None] | None = None,
    ) -> None:
        self.folder = folder
        self._world = world
        self._finished = finished
        self._stager: Any = None
        self._staging: Future[Any] | None = None
        self._thread: Thread | None = None
        self._fault: BaseException | None = None
        self.seconds = 0.0  # time until the last save was durable
        self.safe_step: int | None = (
            None  # step of the newest save of this process; known to the first rank
        )
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def latest(self) -> StoredCheckpoint | None:
        """The newest complete checkpoint."""
        return find_latest(self.folder)

    def clean(self) -> None:
        """Remove incomplete saves of an earlier process. Call it on one rank, before any rank
        writes."""
        for path in self.folder.iterdir():
            if NAME.fullmatch(path.name) and _read_mark(path) is None:
                shutil.rmtree(path, ignore_errors=True)

    def load(self, found: StoredCheckpoint, state: dict[str, Any]) -> None:
        """Fill the tensors of `state` in place, regardless of the ranks that saved them."""
        group = self._world.file_group
        _expect_to_be_alone()
        load(state, checkpoint_id=found.path, process_group=group, no_dist=group is None)

    def save(self, step: int, state: dict[str, Any], facts: dict[str, Any]) -> None:
        """Start a save; waits for the previous one, if it still runs. Call it on all ranks at the
        same step.
        """
        self.wait()
        begun = perf_counter()
        path = self.folder / f"step-{step:012d}"
        if _read_mark(path) is not None:
            return
        self._world.device.synchronize()  # the stager copies on its own stream
        _expect_to_be_alone()
        answer = async_save(
            state,
            checkpoint_id=path,
            process_group=self._world.file_group,
            async_stager=self._kept_stager(),
            no_dist=self._world.file_group is None,
        )
        assert isinstance(answer, AsyncSaveResponse)  # a stager of threads is always ready
        self._staging = answer.staging_completion
        done = StoredCheckpoint(path, step, facts)
        self._thread = Thread(
            target=self._complete, args=(answer.upload_completion, done, begun), daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Wait until the copy of the state has been made or has failed; after that the state may
        change."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.exception()  # the thread of the save gets the same error and reports it
            if (
                self._world.size > 1
            ):  # other ranks wait in that save and would match it with this rank's next one: raise
                self._stager.synchronize_staging()  # `staging` itself may not report an early error

    def wait(self) -> bool:
        """Wait until the save in flight is durable; False if it failed (which was reported)."""
        if self._thread is not None:
            self.join()
            self._thread.join()
            self._thread = None
        fault, self._fault = self._fault, None
        if fault is not None:
            log.warning("a checkpoint could not be saved, the previous one stays: %s", fault)
        return fault is None

    def close(self) -> None:
        self.wait()
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def _kept_stager(self) -> Any:
        if self._stager is None:
            fast = self._world.device.kind in ("cuda", "rocm")
            self._stager = DefaultStager(StagingOptions(fast, False, True, fast))
        return self._stager

    def _complete(self, written: "Future[Any]", done: StoredCheckpoint, begun: float) -> None:
        try:
            written.result()
            if self._world.is_first:
                commit(done)
                self.safe_step = done.step
            if self._finished is not None:
                self._finished(done)
            if self._world.is_first:
                self._forget_old(done.step)
            self.seconds = perf_counter() - begun
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            self._fault = error

    def _forget_old(self, newest: int) -> None:
        complete = [
            (step, path) for step, path in _list(self.folder) if step <= newest and _read_mark(path)
        ]
        for _, path in complete[:-KEPT]:
            (path / MARK).unlink()  # first, so that a partly removed checkpoint does not count
            shutil.rmtree(path, ignore_errors=True)


def find_latest(folder: Path) -> StoredCheckpoint | None:
    for step, path in reversed(_list(folder)):
        facts = _read_mark(path)
        if facts is not None:
            return StoredCheckpoint(path, step, facts)
    return None


def commit(done: StoredCheckpoint) -> None:
    """Write the mark of a complete checkpoint, last and atomically."""
    half = done.path / (MARK + ".half")
    with half.open("w") as file:
        json.dump(done.facts, file)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(done.path)  # the names of the files, before the mark that lists them
    half.rename(done.path / MARK)
    _sync_folder(done.path)
    _sync_folder(done.path.parent)


def _sync_folder(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _list(folder: Path) -> list[tuple[int, Path]]:
    found = [(NAME.fullmatch(p.name), p) for p in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(match[1]), path) for match, path in found if match)


def _read_mark(path: Path) -> dict[str, Any] | None:
    try:
        facts = json.loads((path / MARK).read_text())
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def _expect_to_be_alone() -> None:
    """One process without a group is valid here, but torch warns about it."""
    warnings.filterwarnings(
        "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
    )
