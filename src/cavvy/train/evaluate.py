"""Evaluates a model on all samples of a data set. Each sample is used once, on one of the ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from cavvy.train.data import Batch, Data, move
from cavvy.train.loss import LossSum
from cavvy.train.plan import Plan
from cavvy.train.step import StepGradients

Measure = Callable[[Any], Any]


def evaluate(measure: Measure, data: Data, made: StepGradients, plan: Plan, device: Any) -> Any:
    """Return the mean of `measure` over the data, with the model in evaluation mode. All ranks must
    call this function, and it returns the same number on all ranks.

    Raises: ValueError: the model is split into the stages of a pipeline.
    """
    if made.placed.pipeline is not None:
        raise ValueError("run.evaluate does not support a pipeline: use a plan with pipeline=1")
    sums = LossSum()
    with _evaluation(made.placed.model):
        micro = made.micro_batch
        for batch in _read(data, made.placed.data_rank, made.placed.data_ranks):
            for values, samples in batch.pieces(-(-batch.largest // (micro or batch.largest))):
                part = move(values, device, pin=plan.pin, channels_last=plan.channels_last)
                with made.forward():
                    result = measure(part)
                sums.add(result, samples)
    numbers = sums.numbers()
    for group in made.groups:
        dist.all_reduce(numbers, group=group)
    return (numbers[0] / numbers[1]).to(sums.total.dtype)


def _read(data: Data, rank: int, ranks: int) -> Iterator[Batch]:
    """Yield this rank's share of each batch. An empty share is replaced by one sample that does not
    affect the result, because all ranks of a split model must make the same number of passes.
    """
    total = len(data.source)
    for start in range(0, total, data.global_batch):
        size = min(data.global_batch, total - start)
        low, high = size * rank // ranks, size * (rank + 1) // ranks
        first = min(start + low, total - 1)
        values = data.fetch(range(first, max(start + high, first + 1)))
        yield Batch(values, high - low, size, -(-size // ranks))


@contextmanager
def _evaluation(model: Any) -> Iterator[None]:
    """Put the model into evaluation mode. An autograd graph is recorded only for the loss, because
    the weight of the loss is read from the graph.
    """

    def begin(module: Any, values: Any) -> None:
        torch.set_grad_enabled(False)

    def end(module: Any, values: Any, output: Any) -> Any:
        torch.set_grad_enabled(True)
        return tree_map(_make_differentiable, output)

    # modules that are not frozen
    trained = [module for module in model.modules() if module.training]
    begun = model.register_forward_pre_hook(begin)
    ended = model.register_forward_hook(end)
    model.eval()
    try:
        with torch.enable_grad():
            yield
    finally:
        begun.remove()
        ended.remove()
        for module in trained:
            module.training = True


def _make_differentiable(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.requires_grad_()
    return value
