"""The micro-batch: the largest number of samples that fits one forward pass, equal on all ranks,
found once per GPU type.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cavvy.train.device import TrainDevice
from cavvy.train.parallel.reduce import local

SPARE = 0.08  # share of memory reserved for fragments and larger workspaces of kernels
NO_MEMORY = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "HIPBLAS_STATUS_ALLOC_FAILED",
)


class OutOfMemory(RuntimeError):
    """A single sample does not fit, or one rank of a split model ran out of memory.

    `fits`: the micro-batches that fit, by their keys; {} without any.
    """

    def __init__(self, text: str, fits: dict[str, int] | None = None) -> None:
        super().__init__(text)
        self.fits = fits or {}


@dataclass(slots=True)
class MicroBatch:
    """The current size. `known` has one size per GPU type, and goes into checkpoints."""

    key: str
    known: dict[str, int]

    @property
    def size(self) -> int:
        """0 until the size is found."""
        return self.known.get(self.key, 0)

    def settle(self, size: int) -> None:
        self.known[self.key] = size

    def shrink(self, used: int) -> None:
        """Handle a rank that ran out of memory with `used` samples.

        Raises: OutOfMemory: the size cannot shrink further.
        """
        if used <= 1:
            raise OutOfMemory(
                "a single sample does not fit into memory; try Plan(recompute=True) or more shards"
            )
        self.settle(used // 2)


def is_no_memory(error: BaseException) -> bool:
    """Whether this is a failed allocation, or follows from one: by type or, as libraries report it,
    by its words.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
    return said or (
        error.__cause__ is not None and is_no_memory(error.__cause__)
    )  # a pipeline's stage wraps it


def find(
    most: int,
    device: TrainDevice,
    attempt: Callable[[int], None],
    coming_bytes: int,
    least: Callable[[int], int],
) -> int:
    """The largest size up to `most` that fits by measurement of small ones; the same answer on all
    ranks.

    Sizes that are expected not to fit are never tried: ranks of a split model wait for each other
    within a pass, so a failing rank would leave the others waiting. Memory is assumed to grow
    evenly from 2 to 4 samples on. `attempt(n)` runs a forward and backward pass over n samples;
    `coming_bytes` is the optimizer's future memory; `least` returns the smallest of all ranks'
    numbers.
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
    """Memory that the optimizers will still allocate: two moments for each parameter without a
    state.
    """
    every = ((p, o) for o in optimizers for group in o.param_groups for p in group["params"])
    return sum(2 * local(p).nbytes for p, o in every if p.requires_grad and p not in o.state)
