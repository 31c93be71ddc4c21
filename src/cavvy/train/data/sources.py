"""The interface to data formats, and the order of a torch sampler. A source is any object that has
a length and returns the sample at an index.

A reader is a function that opens a path or URL and returns a `Source`. A reader is registered under
a name, which is written before the colon, such as "mds" in "mds:/data/shards". All sources are
shuffled, split over ranks and resumed in the same way.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from threading import Lock
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch


@runtime_checkable
class Source(Protocol):
    """A collection of samples that can be read by index, for example a torch `Dataset`, a list, or
    a file with random access.

    If reading many samples together is faster than reading single samples, a source can have
    `__getitems__(indices)`, which returns a list of samples.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Tensors:
    """Tensors in memory. The first dimension of each tensor is the sample. One indexing operation
    reads a whole batch.

    A sample is a dict if the tensors were passed by name, otherwise a tuple.
    """

    def __init__(self, *tensors: Any, **names: Any) -> None:
        if bool(tensors) == bool(names):
            raise ValueError("pass tensors either by position or by name")
        self._names = tuple(names)
        self._tensors = tuple(torch.as_tensor(t) for t in (tensors or names.values()))
        lengths = {len(t) for t in self._tensors}
        if len(lengths) != 1:
            raise ValueError(f"the tensors have different lengths: {sorted(lengths)}")

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitem__(self, index: int) -> Any:
        return self._shape(tuple(t[index] for t in self._tensors))

    def fetch_batch(self, indices: Sequence[int]) -> Any:
        chosen = torch.as_tensor(indices)
        return self._shape(tuple(t[chosen] for t in self._tensors))

    def _shape(self, values: tuple[Any, ...]) -> Any:
        return dict(zip(self._names, values, strict=True)) if self._names else values


Reader = Callable[..., Source]
_READERS: dict[str, Reader] = {}


def register_reader(name: str, reader: Reader) -> None:
    """Register `reader(path, **options)`, which opens "NAME:path"."""
    _READERS[name] = reader


def open_source(where: Any, **options: Any) -> Source:
    """Return a source unchanged, or open "NAME:path" with the registered reader.

    Raises: ValueError: no reader has this name. TypeError: the object has no length or cannot
    return a sample by its index, or there are options but no reader.
    """
    if options and not isinstance(where, str):
        raise TypeError(
            f"unknown option {next(iter(options))!r}: only the reader of a path such as "
            "'mds:/data/shards' receives further options"
        )
    if isinstance(where, torch.utils.data.TensorDataset):
        return Tensors(*where.tensors)
    if isinstance(where, str):
        name, _, path = where.partition(":")
        if name not in _READERS:
            known = ", ".join(sorted(_READERS)) or "none"
            raise ValueError(
                f"no reader is known for {where!r} (known: {known}); pass a dataset, or register "
                "a reader with register_reader"
            )
        return _READERS[name](path, **options)
    if not (hasattr(where, "__len__") and hasattr(where, "__getitem__")):
        raise TypeError(
            f"{type(where).__name__} has no length or does not return samples by index, so its "
            "order cannot be resumed on another number of ranks; write the data as indexed shards "
            "first"
        )
    return where  # type: ignore[no-any-return]  # both methods were checked above


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
