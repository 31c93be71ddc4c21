"""Global batches of a fixed size, in the same order for all ranks. The position in the data is a
single number.

Samples are numbered over all epochs. With N samples in the data set, position p is in epoch `p div
N`, and is the sample `p mod N` of the shuffled order of this epoch. A global batch is
`global_batch` consecutive positions, and each rank takes its share of these positions. Therefore
any number of ranks can continue from any position, with the same samples and the same random
augmentations. The numbering of positions is taken from Grain's ElasticIterator. Unlike
ElasticIterator, `Data` accepts batches that are not divisible by the number of ranks, and a
sample's position is the seed of its augmentations. Grain shuffles, prefetches, and runs the worker
processes.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_collate

from cavvy.train.data.sources import Source, count_indices, list_indices
from cavvy.train.loss import takes_several
from cavvy.train.seeds import list_states, mix, sow_host

ROUNDS = 4  # rounds of the shuffle's cipher, the same number as in Grain's own shuffle
PLAIN = (str, bytes, int, float, complex, type(None))  # values without samples of their own
_DRAWS = Lock()  # All threads of a process share the global random generators.
LISTED = 2**22  # an epoch with at most this many samples has its order stored as a list


@dataclass(slots=True)
class Batch:
    """One rank's share of a global batch."""

    values: Any  # tensors in the same structure as a sample; their first dimension is the sample
    size: int  # number of samples on this rank
    total: int  # number of samples on all ranks together
    largest: int  # number of samples on the rank that has the most
    # (number of batches that this process has read) x 2**32 + steps; equal on all ranks
    number: int = 0

    def pieces(self, count: int) -> list[tuple[Any, int]]:
        """Split the batch into `count` parts, and return each part together with its number of
        samples. A part without samples gets one sample as a placeholder, and its number of samples
        stays 0, so that the rank can run a pass on the part.
        """
        if count == 1:
            return [(self.values, self.size)]
        self.check()
        bounds = pairwise(self.size * n // count for n in range(count + 1))
        return [
            (cut(self.values, *((a, b) if b > a else (0, 1)), self.size), b - a) for a, b in bounds
        ]

    def check(self) -> None:
        """Check that the batch can be split into parts with fewer samples.

        Raises: ValueError: the batch contains a value whose samples are unknown.
        """
        rows = max(self.size, 1)
        for value in tree_leaves(self.values):
            if isinstance(value, torch.Tensor | np.ndarray):
                odd = value.shape[:1] != (rows,) and f"tensor of shape {tuple(value.shape)}"
            else:
                odd = not isinstance(value, PLAIN) and type(value).__name__
            if odd:
                raise ValueError(
                    f"a batch of {rows} samples contains a {odd} and cannot be split into "
                    f"micro-batches. The first dimension of each tensor must be {rows}. Each list "
                    f"of other values must have {rows} members"
                )


@dataclass(frozen=True, slots=True)
class BatchShare:
    """Describes which part of each global batch one rank reads."""

    rank: int
    ranks: int
    global_batch: int

    @property
    def bounds(self) -> tuple[int, int]:
        return self.rank * self.global_batch // self.ranks, (
            self.rank + 1
        ) * self.global_batch // self.ranks

    @property
    def largest(self) -> int:
        return -(-self.global_batch // self.ranks)


class Data:
    """A source, and the order of its samples. `position` is the number of samples that steps have
    used. `ahead` counts the samples that were read after this position.
    """

    def __init__(
        self,
        source: Source,
        *,
        global_batch: int,
        transform: Callable[..., Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        sampler: Any = None,
        seed: int = 0,
        shuffle: bool = True,
        new_order: bool = False,
    ) -> None:
        if len(source) == 0 or global_batch < 1:
            raise ValueError(
                f"the data has {len(source)} samples, and the global batch is {global_batch}; both "
                "must be at least 1"
            )
        self.source, self.global_batch, self.seed, self.shuffle = (
            source,
            global_batch,
            seed,
            shuffle,
        )
        self.transform, self._collate, self._new_order = transform, collate, new_order
        self._sampler = sampler
        self.length = len(source) if sampler is None else count_indices(sampler, global_batch)
        self._random = transform is not None and takes_several(transform)
        self.position = self.ahead = 0
        # whether reading a sample draws numbers from the global random generators
        self.is_random = False
        self._listed: tuple[int, Any] = (-1, None)

    @property
    def is_in_memory(self) -> bool:
        plain = self.transform is None and self._collate is None
        return plain and hasattr(self.source, "fetch_batch")

    @property
    def epoch(self) -> float:
        """The number of epochs read so far, for example 2.5."""
        return self.position / self.length

    @property
    def order(self) -> dict[str, Any]:
        """The settings that determine the order of the samples."""
        sampler = None if self._sampler is None else type(self._sampler).__name__
        order = {"samples": self.length, "seed": self.seed, "shuffle": self.shuffle}
        return {**order, "sampler": sampler}

    def resume(self, position: int, order: dict[str, Any]) -> None:
        """Continue from the position and in the order stored in a checkpoint.

        Raises: ValueError: the order of this data differs from the order in the checkpoint.
        """
        odd = [name for name, value in self.order.items() if order.get(name, value) != value]
        if odd and not self._new_order:
            text = " and ".join(
                f"{name} was {order[name]} and is now {self.order[name]}" for name in odd
            )
            raise ValueError(
                f"the data has changed since the checkpoint: {text}. From sample {position} on, "
                "samples would be repeated or left out. Use the same data, seed and shuffle, or "
                "accept repeated and omitted samples with run.data(..., new_order=True)"
            )
        self.position = position

    def use(self) -> None:
        """Advance the position past the samples that were read, because a step has used these
        samples.
        """
        self.position, self.ahead = self.position + self.ahead, 0

    def indices(self, positions: range) -> Any:
        """Return the indices of the samples at these positions, as an array."""
        length = self.length
        first, last = positions[0] // length, positions[-1] // length
        if first != last:  # An epoch ends here.
            border = (first + 1) * length
            parts = (range(positions[0], border), range(border, positions[-1] + 1))
            return np.concatenate([self.indices(part) for part in parts])
        low, high = positions[0] - first * length, positions[-1] + 1 - first * length
        if self._sampler is not None or (self.shuffle and 1 < length <= LISTED):
            return self._order(first)[low:high]
        if not self.shuffle or length == 1:
            return np.arange(low, high)
        seed = (self.seed + first) % 2**32
        shuffle = load_grain().experimental.index_shuffle
        return np.array(
            [shuffle(p, max_index=length - 1, seed=seed, rounds=ROUNDS) for p in range(low, high)]
        )

    def fetch(self, positions: range) -> Any:
        """Return the samples at these positions as one batch, after the transform is applied."""
        chosen = self.indices(positions)
        if self.is_in_memory:
            # is_in_memory checks it
            return self.source.fetch_batch(chosen)  # type: ignore[attr-defined]
        collate, pairs = (
            self._collate or default_collate,
            zip(chosen.tolist(), positions, strict=True),
        )
        if self.is_random:
            with _DRAWS:
                return collate([self._draw(index, position) for index, position in pairs])
        many = getattr(self.source, "__getitems__", None)
        if many is None:
            return collate([self._apply(self.source[index], position) for index, position in pairs])
        samples = zip(many(chosen.tolist()), positions, strict=True)
        return collate([self._apply(sample, position) for sample, position in samples])

    def find_random(self) -> None:
        """Read the next sample, to find out whether reading draws numbers from the global random
        generators. If so, each sample is then read with generators that are seeded by its position.
        """
        if not self.is_in_memory:
            start, before = self.position + self.ahead, list_states()
            self.fetch(range(start, start + 1))
            self.is_random |= list_states() != before

    def read(
        self,
        share: BatchShare,
        until: int,
        *,
        workers: int = 0,
        threads: int = 2,
        prefetch: int = 2,
    ) -> Generator[Any]:
        """Yield one rank's batches, starting after the samples that were read. The last batch is
        the last whole global batch that ends at or before position `until`.
        """
        if share.global_batch < share.ranks:
            raise ValueError(
                f"a global batch of {share.global_batch} is too small for {share.ranks} ranks"
            )
        low, high = share.bounds
        start, size = self.position + self.ahead, share.global_batch
        count = max((until - start) // size, 0)

        def fetch(step: int) -> Any:
            first = start + step * size
            return self.fetch(range(first + low, first + high))

        if (
            self.is_in_memory
        ):  # Threads that read would only compete with the training loop for the interpreter.
            yield from map(fetch, range(count))
            return
        grain = load_grain()
        steps = grain.MapDataset.range(count).map(
            lambda step: _pack(fetch(step)) if workers else fetch(step)
        )
        options = grain.ReadOptions(
            num_threads=threads, prefetch_buffer_size=max(prefetch, threads) if threads else 0
        )
        ready = steps.to_iter_dataset(options)
        if workers:
            ready = ready.mp_prefetch(
                grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=prefetch)
            )
        batches = iter(ready)
        try:
            yield from map(_unpack, batches) if workers else batches
        finally:
            batches.close()

    def _order(self, epoch: int) -> Any:
        # This is read only once, because another thread may change it.
        listed, order = self._listed
        if listed != epoch:
            order = self._make_order(epoch)
            self._listed = (epoch, order)
        return order

    def _make_order(self, epoch: int) -> Any:
        if self._sampler is not None:
            seed = mix(self.seed, epoch)
            return list_indices(self._sampler, epoch, seed, self.global_batch, self.length)
        random = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
        return random.permutation(self.length)

    def _draw(self, index: int, position: int) -> Any:
        sow_host(mix(self.seed, position))
        return self._apply(self.source[index], position)

    def _apply(self, sample: Any, position: int) -> Any:
        if self.transform is None:
            return sample
        if not self._random:
            return self.transform(sample)
        return self.transform(
            sample, np.random.Generator(np.random.Philox(key=[self.seed, position]))
        )


def move(values: Any, device: Any, *, pin: bool, channels_last: bool) -> Any:
    """Move a batch to the device. With `pin`, the copy runs in the background."""

    if device.type == "cpu" and not channels_last:
        return values

    def one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if device.type != "cpu":
            value = (value.pin_memory() if pin and device.type != "mps" else value).to(
                device, non_blocking=pin
            )
        if channels_last and value.dim() == 4 and value.is_floating_point():
            value = value.contiguous(memory_format=torch.channels_last)
        return value

    return tree_map(one, values)


def _pack(values: Any) -> Any:
    """Convert the tensors of a worker's batch to arrays, because a worker's tensor can be read only
    while the worker runs.
    """

    def one(value: Any) -> Any:
        return (
            value.numpy()
            if isinstance(value, torch.Tensor) and value.dtype != torch.bfloat16
            else value
        )

    return tree_map(one, values)


def _unpack(values: Any) -> Any:
    return tree_map(
        lambda value: torch.from_numpy(value) if isinstance(value, np.ndarray) else value, values
    )


def cut(values: Any, low: int, high: int, size: int) -> Any:
    """Return the samples of a batch of `size` samples from `low` (included) to `high` (excluded).
    The samples are cut out of tensors, and out of lists that contain one plain value, for example a
    name, for each sample.
    """

    def is_column(value: Any) -> bool:
        plain = isinstance(value, list | tuple) and all(isinstance(each, PLAIN) for each in value)
        return plain and len(value) == size

    def one(value: Any) -> Any:
        return value if isinstance(value, PLAIN) else value[low:high]

    return tree_map(one, values, is_leaf=is_column)


@cache
def load_grain() -> Any:
    """Return the package `grain`, with `grain.experimental`. Raises ModuleNotFoundError."""
    from absl import logging as absl

    before = absl.get_verbosity()
    absl.set_verbosity(absl.ERROR)
    try:
        import grain
        import grain.experimental
    finally:
        absl.set_verbosity(before)
    return grain
