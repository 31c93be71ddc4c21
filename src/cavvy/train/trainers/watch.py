"""Decides when the trainer of another library saves and exits, which of its checkpoints are
complete, and the order of its samples, which is the same for any number of ranks.
"""

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch.distributed as dist
from torch.utils.data import Sampler

from cavvy.train.checkpoint.async_saver import LEAVE, AsyncSaver
from cavvy.train.checkpoint.notice import leave
from cavvy.train.checkpoint.store import FILES, MARK, StoredCheckpoint, commit, read_mark
from cavvy.train.data import Data
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


class SampleOrder(Sampler[int]):
    """The indices of one epoch for all ranks, in whole global batches. Samples that remain at the
    end of an epoch are left out. Different samples are left out in each epoch.

    Raises: ValueError: the data is smaller than one global batch.
    """

    def __init__(
        self, samples: int, *, global_batch: int, seed: int = 0, shuffle: bool = True
    ) -> None:
        self.data = Data(range(samples), global_batch=global_batch, seed=seed, shuffle=shuffle)
        self.epoch = 0
        self._per_epoch = samples - samples % global_batch
        if not self._per_epoch:
            raise ValueError(
                f"the data has {samples} samples, fewer than a global batch of {global_batch}"
            )

    def __len__(self) -> int:
        return self._per_epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def indices(self) -> list[int]:
        start = self.epoch * len(self.data.source)
        chosen: list[int] = self.data.indices(range(start, start + self._per_epoch)).tolist()
        return chosen


class RankBatches(Sampler[list[int]]):
    """The batches of `batch` samples for this rank. The batches start at `position`, which counts
    the samples of all ranks and epochs, and end with the epoch.
    """

    def __init__(self, samples: int, *, batch: int, global_batch: int, **options: Any) -> None:
        self.order = SampleOrder(samples, global_batch=global_batch, **options)
        self.batch, self.global_batch, self.position = batch, global_batch, 0

    @property
    def count(self) -> int:
        """The number of batches per rank that make up a global batch.

        Raises: ValueError: the global batch is not a multiple of the samples in one batch of all
        ranks.
        """
        return count_batches(self.global_batch, self.batch, _rank()[1])

    def __len__(self) -> int:
        return len(self.order) // self.global_batch * self.count

    def __iter__(self) -> Iterator[list[int]]:
        rank, ranks = _rank()
        epoch, first = divmod(self.position, len(self.order))
        self.order.set_epoch(epoch)
        indices = self.order.indices()
        for start in range(first + rank * self.batch, len(indices), ranks * self.batch):
            yield indices[start : start + self.batch]


def count_batches(global_batch: int, batch: int, ranks: int) -> int:
    """Return the number of batches that each rank accumulates for one global batch.

    Raises: ValueError: the global batch is not a multiple of the samples in one batch of all ranks.
    """
    count, rest = divmod(global_batch, batch * ranks)
    if rest or not count:
        raise ValueError(
            f"{ranks} ranks with batches of {batch} samples cannot make a global batch of "
            f"{global_batch}, which stays the same when training resumes: use a batch size that "
            f"divides {global_batch} / {ranks}"
        )
    return count


def _rank() -> tuple[int, int]:
    """Return this rank's number and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
