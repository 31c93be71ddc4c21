"""Counts the samples of a traced step."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._C import _functorch
from torch.utils._pytree import tree_leaves
from torch.utils.data._utils import fetch


class SampleCount:
    """Counts the samples of a micro-batch. The number is the size of the first dimension of the
    model's input, or of the second dimension if layers expect the samples there. If the data loader
    loaded fewer samples than this size, the number of loaded samples is used. For example, a data
    loader counts graphs, but the first dimension counts the nodes of all graphs. In
    `torch.func.vmap`, each element of the mapped dimension is a sample. If the input is a list of
    tensors that the model stacks, such as pictures, each tensor of the list is a sample.
    """

    def __init__(self) -> None:
        self._first = 0  # samples of the model's input
        self._sizes: tuple[int, ...] = ()  # of the input's first two dimensions
        self._listed = 0, 0  # number of tensors in the input's list, and their dimensions
        # loaded since the last run of a model, and loaded for the step
        self._fresh, self._loaded = 0, 0
        self._ran = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count the samples that data loaders load in this context."""
        with ExitStack() as stack:
            for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
                stack.enter_context(patch.object(kind, "fetch", self._counted(kind.fetch)))
            yield

    def _counted(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def load(fetcher: Any, index: Any) -> Any:
            count = len(index) if fetcher.auto_collation else 0
            self._fresh = count if self._ran else self._fresh + count
            self._loaded, self._ran = self._loaded + count, False
            return before(fetcher, index)

        return load

    def restart(self) -> None:
        """Forget the input of passes that are not a part of the step."""
        self._first = 0

    def keep(self) -> Callable[[], None]:
        """Return a function that restores the input that this object has seen until now."""
        kept = self._first, self._sizes, self._listed

        def restore() -> None:
            self._first, self._sizes, self._listed = kept

        return restore

    def see(self, module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        """Read the input of a module that is about to run."""
        self._ran = True
        tensors = [
            leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and leaf.dim()
        ]
        if not tensors:
            return
        # If the model gets only keyword arguments, its first module with a tensor input is used.
        if not self._first:
            self._first, self._sizes = _count_mapped(module, tensors[0]), tensors[0].shape[:2]
            self._loaded = self._fresh
            listed = given[0] if given and isinstance(given[0], list | tuple) else ()
            is_list = all(isinstance(each, torch.Tensor) for each in listed)
            self._listed = len(listed) if is_list else 0, tensors[0].dim()
        elif (tensors[0].shape[0], tensors[0].dim() - 1) == self._listed:
            self._first = tensors[0].shape[0]
        # A layer may expect the samples in the second dimension of the model's input.
        is_second = getattr(module, "batch_first", True) is False
        if is_second and tensors[0].dim() == 3 and tensors[0].shape[:2] == self._sizes:
            self._first = tensors[0].shape[1]

    def count(self, micro: int) -> int:
        """Return the number of samples of each of the step's `micro` micro-batches."""
        loaded = self._loaded // micro or self._loaded
        return min(self._first, loaded or self._first) or 1


def _count_mapped(module: torch.nn.Module, tensor: torch.Tensor) -> int:
    """Return the number of samples in the first dimension of a tensor, and in the dimensions over
    which `vmap` maps. If `vmap` maps only over the tensor and not over the module's parameters, it
    maps over single samples.
    """
    mapped = _find_mapped(tensor)
    if mapped == 1 or any(_find_mapped(each) > 1 for each in module.parameters()):
        return mapped * tensor.shape[0]
    return mapped


def _find_mapped(tensor: torch.Tensor) -> int:
    """Return how many slices of a tensor `vmap` maps over. Nested calls of `vmap` multiply the
    sizes of their mapped dimensions.
    """
    size = 1
    while _functorch.is_functorch_wrapped_tensor(tensor):
        inner = _functorch.get_unwrapped(tensor)
        if _functorch.is_batchedtensor(tensor):
            size *= inner.shape[_functorch.maybe_get_bdim(tensor)]
        tensor = inner
    return size
