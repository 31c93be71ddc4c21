"""The micro-batch: the largest number of samples that fits into memory in one forward pass. The
micro-batch is the same on all ranks, and is determined once per GPU type.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cavvy.train.device import TrainDevice
from cavvy.train.parallel.reduce import local

SPARE = 0.08  # share of memory reserved for fragmentation and for larger kernel workspaces
NO_MEMORY = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "HIPBLAS_STATUS_ALLOC_FAILED",
)


class OutOfMemory(RuntimeError):
    """Raised if a single sample does not fit into memory, or one rank of a split model ran out of
    memory.

    `fits` maps keys to the sizes of micro-batches that fit. `fits` is empty if no micro-batch is
    known to fit.
    """

    def __init__(self, text: str, fits: dict[str, int] | None = None) -> None:
        super().__init__(text)
        self.fits = fits or {}


@dataclass(slots=True)
class MicroBatch:
    """The current micro-batch. `known` contains one size for each key and is saved in
    checkpoints."""

    key: str
    known: dict[str, int]

    @property
    def size(self) -> int:
        """The number of samples in a micro-batch; 0 until a size is found."""
        return self.known.get(self.key, 0)

    def settle(self, size: int) -> None:
        self.known[self.key] = size

    def shrink(self, used: int) -> None:
        """Halve the micro-batch after a rank ran out of memory with `used` samples.

        Raises: OutOfMemory: `used` is already 1.
        """
        if used <= 1:
            raise OutOfMemory(
                "a single sample does not fit into memory; try Plan(recompute=True) or more shards"
            )
        self.settle(used // 2)


def is_no_memory(error: BaseException) -> bool:
    """Return whether this error is a failed memory allocation, or was caused by one. Some libraries
    report a failed allocation only in the message of a RuntimeError.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
    return said or (
        error.__cause__ is not None and is_no_memory(error.__cause__)
    )  # A pipeline stage wraps the error in another one.


def find(
    most: int,
    device: TrainDevice,
    attempt: Callable[[int], None],
    coming_bytes: int,
    least: Callable[[int], int],
) -> int:
    """Predict the largest size up to `most` that fits, from the memory use of small sizes. The
    predicted size is the same on all ranks.

    A size that is not expected to fit is never tried. Ranks of a split model wait for each other
    within a pass, so after a failure of one rank all other ranks would wait forever. From 2 samples
    on, memory is assumed to grow linearly; the growth is measured between 2 and 4 samples.
    `attempt(n)` runs a forward and backward pass over n samples, `coming_bytes` is the memory that
    the optimizer will still allocate, and `least` returns the minimum of a number over all ranks.
    """
    total = device.memory_bytes
    if least(0 if total is None else 1) == 0 or most <= 4:
        return most
    assert total is not None
    peaks = []
    for size in (2, 4):
        device.reset_peak()
        attempt(size)
        peaks.append(device.peak_bytes())
    each = max((peaks[1] - peaks[0]) / 2, 1.0)
    room = total * (1 - SPARE) - coming_bytes - peaks[1]
    return least(max(min(most, 4 + int(room / each)), 1))


def optimizer_bytes(optimizers: list[Any]) -> int:
    """Return the number of bytes that the optimizers have yet to allocate: two moments, such as
    those of Adam, for each parameter without optimizer state.
    """
    every = ((p, o) for o in optimizers for group in o.param_groups for p in group["params"])
    return sum(2 * local(p).nbytes for p, o in every if p.requires_grad and p not in o.state)
