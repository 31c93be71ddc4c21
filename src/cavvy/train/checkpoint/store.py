"""A folder of checkpoints. The newest complete checkpoint can always be read, with any number of
ranks.

A checkpoint is a folder `step-N` with the files of torch's distributed checkpoint. A checkpoint is
complete when its folder contains `complete.json`. `complete.json` is written last, by a rename,
after the files of all ranks are on disk. Only one save runs at a time. A background thread copies
the state while the next step is computed. Code that changes parameters must call `join` before the
change. If `join` is not called, the copy may contain parts of two different states.
"""

import json
import logging
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save
from torch.utils._pytree import tree_leaves

from cavvy.train.parallel.reduce import local
from cavvy.train.world import RankWorld

log = logging.getLogger("cavvy.train")
MARK = "complete.json"
NAME = re.compile(r"step-(\d{12})")
FILES = "files"  # key of the completion mark: the checksums of all files
SUM = "checksum"  # key of the completion mark: the checksum of all other keys
DAMAGED = ".damaged"  # suffix of the folder of a damaged checkpoint
BLOCK_BYTES = 2**20
THREAD_BYTES = 2**26  # a second writing thread is used for each additional part of this many bytes
MOST_THREADS = 4
# number of complete checkpoints to keep; more than one, because the newest may be unreadable
KEPT = 2


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A complete checkpoint. `facts` contains the state of the checkpoint except for its
    tensors."""

    path: Path
    step: int
    facts: dict[str, Any]


class CheckpointStore:
    """The checkpoints of a run in `folder`. Either all ranks share the folder, or each node has a
    separate folder.

    Args:
        is_keeper: whether this rank maintains the folder; true for the first rank that uses it.
        finish: called when a save is durable in the folder, for example to upload it. `finish`
        receives the names of the files for which this rank is responsible.
    """

    def __init__(
        self,
        folder: Path,
        world: RankWorld,
        is_keeper: bool,
        finish: Callable[[StoredCheckpoint, list[str]], None],
    ) -> None:
        self.folder = folder
        self._world = world
        self._is_keeper = is_keeper
        self._finish = finish
        self._stager: Any = None
        self._staging: Future[Any] | None = None
        self._thread: Thread | None = None
        self._fault: BaseException | None = None
        self.seconds = 0.0  # seconds that the last save took until it was durable
        self.safe_step: int | None = None  # the step of the newest save that this process finished
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def latest(self, below: float = inf) -> StoredCheckpoint | None:
        """Return the newest complete checkpoint before step `below`, or None if there is none."""
        return find_latest(self.folder, below)

    def clean(self) -> None:
        """Remove incomplete saves. All ranks must call this method before any rank writes."""
        for _, path in _list(self.folder) if self._is_keeper else ():
            # A mark that cannot be read does not prove that the save is incomplete.
            with suppress(OSError):
                if _parse_mark(path) is None:
                    if (path / MARK).exists():
                        log.warning("%s has changed, so the checkpoint is removed", path / MARK)
                    shutil.rmtree(path, ignore_errors=True)

    def set_aside(self, step: int) -> None:
        """Rename a damaged checkpoint, so that it is ignored and its step can be saved again.
        Checkpoints that were renamed earlier are deleted.
        """
        path = self.folder / make_name(step)
        if self._is_keeper and path.exists():
            for old in self.folder.glob(f"*{DAMAGED}"):
                shutil.rmtree(old, ignore_errors=True)
            path.rename(path.with_name(path.name + DAMAGED))

    def adopt(self, found: StoredCheckpoint) -> None:
        """Write the completion mark of a checkpoint whose files were downloaded to the folder."""
        if self._is_keeper and read_mark(found.path) != found.facts:
            commit(found, self._world.rank)

    def list_keys(self, found: StoredCheckpoint) -> list[str]:
        """Return the names of all tensors and values in a checkpoint, sorted."""
        return sorted(FileSystemReader(found.path).read_metadata().state_dict_metadata)

    def load(self, found: StoredCheckpoint, state: dict[str, Any]) -> None:
        """Load a checkpoint into the tensors of `state`. The checkpoint can be loaded with any
        number of ranks.
        """
        group = self._world.file_group
        _expect_to_be_alone()
        load(state, checkpoint_id=found.path, process_group=group, no_dist=group is None)

    def save(self, step: int, collect: Callable[[], tuple[dict[str, Any], dict[str, Any]]]) -> bool:
        """Wait for the previous save, then start to save a step. If the files of this step are
        already written, the method only completes the checkpoint. Returns whether `collect` was
        called to get the state and the facts for a new write. All ranks must call this method at
        the same step.
        """
        self.wait()
        begun = perf_counter()
        path = self.folder / make_name(step)
        facts = read_mark(path)
        unsafe, unwritten = self._world.agree([step != self.safe_step, facts is None])
        if not unsafe:
            return False
        written = None
        if unwritten:
            state, facts = collect()
            written = self._write(path, state)
        self._thread = Thread(
            target=self._complete,
            args=(written, StoredCheckpoint(path, step, facts or {}), begun),
            daemon=True,
        )
        self._thread.start()
        return written is not None

    def _write(self, path: Path, state: dict[str, Any]) -> "Future[Any]":
        """Start to write the files of all ranks."""
        self.clean()  # All ranks plan the save before any rank writes.
        if self._is_keeper:
            shutil.rmtree(path, ignore_errors=True)
        # The copy runs on another stream, so this stream must finish first.
        self._world.device.synchronize()
        _expect_to_be_alone()
        answer = async_save(
            state,
            storage_writer=FileSystemWriter(path, thread_count=count_threads(state)),
            process_group=self._world.file_group,
            async_stager=self._kept_stager(),
            no_dist=self._world.file_group is None,
        )
        # Torch returns this type if the copy is asynchronous.
        assert isinstance(answer, AsyncSaveResponse)
        self._staging = answer.staging_completion
        return answer.upload_completion

    def join(self) -> None:
        """Wait until the state is copied or the copy has failed. The caller may change the state
        after this method returns.
        """
        staging, self._staging = self._staging, None
        if staging is not None:
            # The error is not raised here, because the saving thread reports it, too.
            staging.exception()
            if self._world.size > 1:
                # This raises errors that `staging` may not report. Without it, other ranks would
                # match this save with the next one.
                self._stager.synchronize_staging()

    def wait(self) -> bool:
        """Wait until the current save is durable. If the save failed, log a warning and return
        False.
        """
        if self._thread is not None:
            self.join()
            self._thread.join()
            self._thread = None
        fault, self._fault = self._fault, None
        if fault is not None:
            reason = str(fault).strip().rpartition("\n")[2]  # Torch's errors contain a traceback.
            log.warning(
                "a checkpoint could not be saved; the previous checkpoint is kept: %s", reason
            )
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

    def _complete(
        self, written: "Future[Any] | None", done: StoredCheckpoint, begun: float
    ) -> None:
        try:
            if written is not None:
                written.result()
                every = self._world.run_on_all(partial(self._sum_own, done.path))
                own = list(every[self._world.rank])
                files = {name: number for sums in every for name, number in sums.items()}
                done = replace(done, facts={**done.facts, FILES: files})
                self._world.run_on_all(partial(self._commit, done))
            else:  # Other ranks may have written the files.
                own = list(done.facts[FILES]) if self._is_keeper else []
            self._finish(done, own)
            self.safe_step = done.step
            if written is not None:
                self.seconds = perf_counter() - begun
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            self._fault = error

    def _sum_own(self, path: Path) -> dict[str, int]:
        """Return the checksums of the files that this rank has written, by name."""
        mine = f"__{self._world.rank}_"
        names = [each.name for each in path.iterdir() if each.name.startswith(mine)]
        return checksums(path, [*names, ".metadata"] if self._world.is_first else names)

    def _commit(self, done: StoredCheckpoint) -> None:
        """Complete a checkpoint and remove old checkpoints."""
        if self._is_keeper:
            commit(done, self._world.rank)
            self.forget_old(done.step)

    def forget_old(self, newest: int) -> None:
        """Remove complete checkpoints up to the step `newest`, except the newest of them; KEPT is
        the number of checkpoints that remain.
        """
        complete = [
            (step, path) for step, path in _list(self.folder) if step <= newest and read_mark(path)
        ]
        for _, path in complete[:-KEPT]:
            # The mark is removed first, so that a partly removed folder is not complete.
            (path / MARK).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


def find_latest(folder: Path, below: float = inf) -> StoredCheckpoint | None:
    for step, path in reversed(_list(folder)):
        facts = read_mark(path) if step < below else None
        if facts is not None:
            return StoredCheckpoint(path, step, facts)
    return None


def count_threads(state: Any) -> int:
    """Return the number of threads with which a rank writes its part of the state. Each thread
    writes one file.
    """
    tensors = (leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor))
    size = sum(local(tensor).nbytes for tensor in tensors)
    return max(1, min(MOST_THREADS, int(size // THREAD_BYTES)))


def checksums(path: Path, names: Sequence[str]) -> dict[str, int]:
    """Return a dictionary that maps the names of these files to their CRC-32.

    Raises: OSError: a file cannot be read.
    """
    sums = {}
    for name in names:
        number = 0
        with (path / name).open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                number = zlib.crc32(block, number)
        sums[name] = number
    return sums


def find_damage(found: StoredCheckpoint, names: Sequence[str]) -> dict[str, str]:
    """Return a dictionary that maps each damaged file in `names` to its fault."""
    damage = {}
    for name in names:
        try:
            now = checksums(found.path, [name])[name]
        except OSError as error:
            damage[name] = str(error)
        else:
            if found.facts[FILES][name] not in (now, None):
                damage[name] = f"{name} has changed"
    return damage


def make_name(step: int) -> str:
    """Return the name of the folder of a checkpoint."""
    return f"step-{step:012d}"


def commit(done: StoredCheckpoint, rank: int = 0) -> None:
    """Write the completion mark of a checkpoint atomically, after all of its other files."""
    half = done.path / f"{MARK}.{rank}.half"
    with half.open("w") as file:
        file.write(dump_facts(done.facts))
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(done.path)  # The files must be durable before the mark is written.
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


def read_mark(path: Path) -> dict[str, Any] | None:
    """Return the facts of a checkpoint, or None if the checkpoint is not complete."""
    try:
        facts = _parse_mark(path)
        if facts is not None and FILES not in facts:
            add_files(facts, [each.name for each in path.iterdir()])
    except OSError:
        return None
    return facts


def _parse_mark(path: Path) -> dict[str, Any] | None:
    """Return the facts in the completion mark, or None if the mark is missing or damaged.

    Raises: OSError: the file cannot be read.
    """
    try:
        return parse_facts((path / MARK).read_text())
    except (FileNotFoundError, UnicodeDecodeError):
        return None


def parse_facts(text: str) -> dict[str, Any] | None:
    """Return the facts in the text of a completion mark, or None if the text is damaged."""
    try:
        facts = json.loads(text)
    except ValueError:
        return None
    # Marks of earlier versions have no checksum.
    number = facts.pop(SUM, None) if isinstance(facts, dict) else 0
    return facts if number in (None, _sum_facts(facts)) else None


def dump_facts(facts: dict[str, Any]) -> str:
    """Return the text of a completion mark, with the checksum of the facts."""
    return json.dumps({**facts, SUM: _sum_facts(facts)})


def _sum_facts(facts: Any) -> int:
    return zlib.crc32(json.dumps(facts).encode()) if isinstance(facts, dict) else -1


def add_files(facts: dict[str, Any], names: Iterable[str]) -> None:
    """Write the names of a checkpoint's files into `facts`, the description of this checkpoint.
    Only checkpoints of an earlier version of Cavvy, which have no checksums, need this function.
    """
    files = (name for name in sorted(names) if name != MARK and not name.endswith(".half"))
    facts[FILES] = dict.fromkeys(files)


def _expect_to_be_alone() -> None:
    """Silence torch's warning that there is no process group. A single process needs no process
    group.
    """
    warnings.filterwarnings(
        "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
    )
