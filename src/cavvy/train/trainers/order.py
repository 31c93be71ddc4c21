"""The order of samples as torch samplers. The global batches are the same for any number of
ranks.
"""

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import Sampler

from cavvy.train.data import Data


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
