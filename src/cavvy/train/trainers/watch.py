"""Decides when the trainer of another library saves and exits, and which of its checkpoints are
complete.
"""

from pathlib import Path
from time import perf_counter
from typing import Any

from cavvy.train.checkpoint.async_saver import LEAVE, AsyncSaver
from cavvy.train.checkpoint.notice import leave
from cavvy.train.checkpoint.store import FILES, MARK, StoredCheckpoint, commit, read_mark
from cavvy.train.world import RankWorld


class TrainerWatch:
    """Listens for notices and changes of the checkpoint interval while a trainer runs.

    `save_every` has the same meaning as in `Run`. All ranks must share the folder and call each
    method.
    """

    def __init__(self, save_every: "float | str" = "auto") -> None:
        self._every = save_every
        self._saver: AsyncSaver | None = None
        self._said, self._asked = 0, 0.0

    def begin(self, folder: "str | Path") -> None:
        """Start to listen, unless this object listens already. Call this method after the trainer
        has joined the ranks and has set its own signal handlers. Incomplete checkpoints that have
        the names of Cavvy's checkpoints are removed.
        """
        if self._saver is None:
            self._world = RankWorld("cpu")
            self._saver = AsyncSaver(folder, self._world, self._every)
            self._saver.store.clean()

    def is_save_due(self) -> bool:
        """Return whether the trainer must save now, after a step. The returned value is the same on
        all ranks.
        """
        assert self._saver is not None
        self._said = self._world.agree([self._saver.wish()])[0]
        self.start_clock()
        return self._said > 0

    def start_clock(self) -> None:
        """Measure the cost of the next save from now on. Call this method after other work that
        precedes a save, such as an evaluation.
        """
        self._asked = perf_counter()

    def saved(self, path: Path, step: int, facts: dict[str, Any]) -> None:
        """Mark a checkpoint as complete after all ranks have written their files.

        Raises: SystemExit: with the exit code for "run me again", after a preemption notice.
        """
        assert self._saver is not None
        self._world.agree([0])
        if self._world.is_first:
            commit(StoredCheckpoint(path, step, {"step": step, **facts, FILES: _sizes(path)}))
            self._saver.store.forget_old(step)
        self._saver.count(perf_counter() - self._asked)
        if self._said == LEAVE:
            self._world.agree([0])
            self.end()
            leave()
        self._said = 0

    def end(self) -> None:
        """Stop listening, and restore the signal handlers. Later calls do nothing."""
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close()


def find_newest(folder: "str | Path") -> StoredCheckpoint | None:
    """Return the newest complete checkpoint in a folder, or None. A checkpoint is ignored if the
    size of one of its files has changed since it was written.
    """
    paths = [mark.parent for mark in Path(folder).glob(f"*/{MARK}")]
    found = [
        StoredCheckpoint(path, facts["step"], facts) for path in paths if (facts := read_mark(path))
    ]
    whole = [each for each in found if each.facts[FILES].items() <= _sizes(each.path).items()]
    return max(whole, key=lambda each: each.step, default=None)


def _sizes(path: Path) -> dict[str, int]:
    files = [each for each in path.rglob("*") if each.is_file() and not each.match(f"{MARK}*")]
    return {str(each.relative_to(path)): each.stat().st_size for each in files}
