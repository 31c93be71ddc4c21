"""Reads the order of a torch sampler or batch sampler. The order is the same on all ranks and in
all attempts.
"""

from itertools import chain
from threading import Lock
from typing import Any

import numpy as np
import torch

_LOCK = Lock()  # Several threads read data, but a sampler can be set to only one epoch at a time.


def count_indices(sampler: Any, global_batch: int) -> int:
    """Return the number of samples in an epoch."""
    return len(sampler) * (global_batch if _yields_batches(sampler) else 1)


def list_indices(sampler: Any, epoch: int, seed: int, global_batch: int, length: int) -> Any:
    """Return all indices of an epoch, as an array. The sampler is seeded through its attribute
    `generator` or its method `set_epoch`.

    Raises: ValueError: the size of a batch differs from the global batch, the length of the epoch
    differs from the length of the first epoch, or the order of the sampler is not fixed.
    """
    with _LOCK:
        parts: tuple[Any, ...] = (sampler, getattr(sampler, "sampler", None))
        for each in parts:
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
            if hasattr(each, "generator"):
                each.generator = torch.Generator().manual_seed(seed % 2**63)
        listed = list(sampler)
        can_be_set = any(
            hasattr(each, name) for each in parts for name in ("set_epoch", "generator")
        )
        if not can_be_set and list(sampler) != listed:
            raise ValueError(
                f"{type(sampler).__name__} yields a new order each time, so the order cannot be "
                "resumed: give the sampler a method set_epoch(epoch), or an attribute `generator` "
                "for its random numbers"
            )
    if _yields_batches(sampler):
        if odd := next((len(batch) for batch in listed if len(batch) != global_batch), None):
            raise ValueError(
                f"the batch sampler yields a batch of {odd} samples: each batch must be a global "
                f"batch of {global_batch} samples (drop_last=True leaves out the rest)"
            )
        listed = list(chain(*listed))
    if len(listed) != length:
        raise ValueError(
            f"the sampler yields {len(listed)} samples in epoch {epoch}, but its length is {length}"
        )
    return np.array(listed)


def _yields_batches(sampler: Any) -> bool:
    return hasattr(sampler, "batch_size")
