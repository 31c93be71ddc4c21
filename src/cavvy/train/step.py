"""Computes the gradients of one step, with forward and backward passes over a rank's share of the
batch. If the step fails, the results of all its passes are discarded.

Buffers that forward passes change, such as running means, are restored before a step is repeated,
and are kept equal on all ranks: as in DistributedDataParallel, all ranks copy the buffers of the
first rank.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cavvy.train import seeds
from cavvy.train.clock import StepClock
from cavvy.train.data.stream import Batch, cut
from cavvy.train.device import PrecisionContext
from cavvy.train.loss import LossSum
from cavvy.train.micro import MicroBatch, OutOfMemory, find, is_no_memory, optimizer_bytes
from cavvy.train.parallel.reduce import local
from cavvy.train.parallel.replicas import RanksDiverged, ReplicaCheck, are_equal
from cavvy.train.parallel.shard import PlacedModel
from cavvy.train.world import RankWorld

SKIPPED = 2**62  # number that is added to the number of a batch that a rank does not use
Loss = Callable[[Any], Any]
PairLoss = Callable[[Any, Any], Any]
LARGEST = 2**16  # maximum number of elements; larger buffers are assumed to be constant tables


class StepGradients:
    """Accumulates the gradient of the mean loss over the global batch. The result does not depend
    on how the batch is split.

    The loss of n samples is weighted by n / global batch. If the loss is a mean over items that are
    not samples, such as tokens, the loss is weighted by the number of items. With these weights,
    the gradients of all parts add up to the gradient of the mean over the global batch, even if
    micro-batches or the ranks' shares have different sizes.
    """

    def __init__(
        self,
        world: RankWorld,
        placed: PlacedModel,
        numbers: PrecisionContext,
        micro: MicroBatch,
        clock: StepClock,
        wish: Callable[[], int],
    ) -> None:
        self.placed = placed
        self.said = 0  # the highest request (exit or save) of all ranks
        self._world, self._numbers, self._micro, self._clock, self._wish = (
            world,
            numbers,
            micro,
            clock,
            wish,
        )
        self._buffers = ModelBuffers(placed.model, placed.mesh)
        self.replicas = ReplicaCheck(placed.model, placed.mesh, world)
        axes = ("shards", "replicas") if placed.mesh is not None else ()
        self.groups = [placed.mesh[a].get_group() for a in axes if placed.mesh[a].size() > 1]
        self._is_split = (
            placed.is_sharded or placed.data_ranks < world.size
        )  # whether other ranks wait for this rank during a pass
        self._averaged_over = (
            placed.data_ranks if placed.is_sharded else 1
        )  # FSDP2 averages gradients, but the reducer sums them.

    def refresh(self) -> None:
        """Take over changes that the script has made to the model since the model was placed.

        Raises: ValueError: a parameter was added to a sharded model.
        """
        model = self.placed.model
        self._buffers = ModelBuffers(model, self.placed.mesh)
        plain = [n for n, p in model.named_parameters() if not hasattr(p, "device_mesh")]
        if plain and self.placed.is_sharded:
            raise ValueError(
                f"the parameter {plain[0]!r} was added to the model after run.model, so the "
                "parameter is not sharded: add all parameters in the function that builds the model"
            )

    @property
    def micro_batch(self) -> int:
        return self._micro.size

    def add(self, loss: Loss, batch: Batch, seed: int, optimizers: list[Any]) -> Any:
        """Add the gradient of the batch to the gradients of the parameters. Returns the mean loss
        over the global batch.

        If one rank runs out of memory, all ranks repeat the step with smaller micro-batches.
        """
        self._buffers.keep()
        while True:
            if not self._micro.size:
                self._micro.settle(self._find(loss, batch, seed, optimizers))
            size = min(self._micro.size, batch.largest)
            sums, fails = self._attempt(partial(self._passes, loss, batch, size), size, seed)
            with self._clock.part("communication"):
                if self.placed.reducer is not None:
                    self.placed.reducer.finish()
                failed, weighted = self._agree(batch.number, fails, sums)
                if not failed:
                    self._buffers.align()
                    return self._finish(sums, weighted, batch)
            self.undo()
            self._micro.shrink(size)

    def add_pipelined(self, loss: PairLoss, batch: Batch, seed: int, optimizers: list[Any]) -> Any:
        """Do the same as `add`, also for plans with a pipeline. `loss` is called with the output
        and the target.
        """
        pipeline, model = self.placed.pipeline, self.placed.model
        if pipeline is None:
            return self.add(lambda part: loss(model(part[0]), part[1]), batch, seed, optimizers)
        self._buffers.keep()
        most = self._micro.size or max(batch.size // (2 * pipeline.stages), 1)
        size = next(
            n for n in range(most, 0, -1) if batch.size % n == 0
        )  # All micro-batches must have the same size.
        with self.forward():
            sums, _ = self._attempt(
                partial(pipeline.step, loss, batch, size, self._scale(batch)), size, seed
            )
        with self._clock.part("communication"):
            if self.placed.reducer is not None:
                self.placed.reducer.finish()
            self._buffers.align()
            _, weighted = self._agree(batch.number, False, sums)
            return self._finish(sums, weighted, batch)

    def _scale(self, batch: Batch) -> Any:
        """Return the factor by which the gradient of a loss with weight 1 must be multiplied."""
        return self._averaged_over / batch.total / self._numbers.weight

    def _finish(self, sums: LossSum, weighted: bool, batch: Batch) -> Any:
        """Rescale the step's gradients to the gradients of the weighted mean loss over the global
        batch. Returns this mean loss.
        """
        # The passes used the weight of the last step.
        weighted = weighted or self._numbers.weight != 1.0
        if not self.groups and (sums.only is not None or not weighted):
            return sums.total / sums.weight if sums.only is None else sums.only
        numbers = sums.numbers()
        for group in self.groups:
            dist.all_reduce(numbers, group=group)
        total, weight = numbers.unbind()
        if weighted:
            factor = torch.where(weight > 0, batch.total * self._numbers.weight / weight, 0.0)
            grads = [local(p.grad) for p in self.placed.model.parameters() if p.grad is not None]
            torch._foreach_mul_(grads, factor.float())
            # If a batch contains only padding, its weight is 0.
            if self._numbers.scaler is not None:
                self._numbers.weight = float(weight / batch.total) or self._numbers.weight
        return (total / weight).to(sums.total.dtype)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Set aside the gradients of earlier calls while this context is open, and add them back at
        the end. Otherwise the gradients of earlier calls would be summed over the ranks and
        weighted twice.
        """
        before = [(p, p.grad) for p in self.placed.model.parameters() if p.grad is not None]
        for parameter, _ in before:
            parameter.grad = None
        yield
        for parameter, grad in before:
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)

    def skip(self, number: int) -> None:
        """Take part in the exchange of values for a batch that this rank does not use, so that the
        other ranks do not wait for this rank.

        Raises: RanksDiverged: other ranks use the batch.
        """
        with self.apart():
            if self.placed.reducer is not None:
                self.placed.reducer.finish()
            self._agree(number + SKIPPED, False, None)

    def _agree(self, number: int, fails: bool, sums: LossSum | None) -> tuple[bool, bool]:
        """Exchange the facts of a step between the ranks. Set `said` to the request that any rank
        made: an exit outranks a save. Returns whether a rank failed, and whether any loss has a
        weight that differs from the number of samples.

        Parameters that are trained from this step on are added to the reducer.

        Raises: RanksDiverged: the ranks are at different batches, or their models differ.
        """
        facts = [fails, self._wish(), sums is not None and sums.is_weighted, number, ~number]
        reducer = self.placed.reducer
        new = [] if reducer is None else reducer.list_new(self.placed.model)
        facts += [len(new), ~len(new)]
        if due := self.replicas.due():
            facts += self.replicas.facts()
        failed, self.said, weighted, *pairs = self._world.agree(facts)
        if not are_equal(pairs[:2]):
            every = [_describe(each) for each in self._world.gather(number)]
            odd = next(rank for rank, each in enumerate(every) if each != every[0])
            raise RanksDiverged(
                f"the ranks have diverged: rank {odd} {every[odd]}, but rank 0 {every[0]}. If a "
                "rank skips run.accumulate or run.step for a batch, every rank must skip the same "
                "call"
            )
        if not are_equal(pairs[2:4]):
            raise RanksDiverged(
                f"rank {self._world.rank} trains {len(new)} new parameters, but another rank does "
                "not train the same number: change requires_grad in the same step on all ranks"
            )
        if due and not are_equal(pairs[4:]):
            self.replicas.explain()
        if reducer is not None and new and not failed:
            reducer.add(new)
        return bool(failed), bool(weighted)

    def _attempt(self, passes: Callable[[], Any], size: int, seed: int) -> tuple[Any, bool]:
        """Run the passes. Returns the losses of the passes and whether this rank ran out of memory.

        Raises: OutOfMemory: this rank of a split model ran out of memory.
        """
        self._clock.micro(size)
        seeds.sow(seed)
        try:
            with self._clock.part("compute"):
                return passes(), False
        except (RuntimeError, MemoryError) as error:
            if not is_no_memory(error):
                raise
            if not self._is_split:
                return None, True
            self._micro.shrink(size)
            text = (
                f"rank {self._world.rank}, which has a part of a split model, ran out of memory "
                f"with a micro-batch of {size} samples"
            )
            known = {self._micro.key: self._micro.size}
            raise OutOfMemory(text, known) from error.with_traceback(
                None
            )  # The traceback would keep the activations in memory.

    def _passes(self, loss: Loss, batch: Batch, size: int) -> LossSum:
        """Run one rank's passes and return its losses. All ranks make the same number of passes: a
        rank with fewer samples adds passes with weight 0.
        """
        pieces = batch.pieces(-(-batch.largest // size))
        sums = LossSum()
        alone = len(pieces) == 1 and not self.groups  # The weight cancels out.
        for number, (values, samples) in enumerate(pieces, 1):
            self._expect(number == len(pieces))
            with self.forward():
                result = loss(values)
            value, weight = sums.add(result, samples)
            if sums.is_sum and not alone:
                raise ValueError(
                    "the loss is a sum, so its value would depend on how the batch is split: "
                    "return the mean, or (mean, number of items)"
                )
            factor = 1 if alone else weight * self._scale(batch)
            weighted = value if factor == 1 else value * factor
            if self._numbers.scaler is not None:
                weighted = self._numbers.scaler.scale(weighted)
            weighted.backward()
        return sums

    def forward(self) -> AbstractContextManager[Any]:
        return (
            nullcontext() if self.placed.is_sharded else self._numbers.forward()
        )  # FSDP2 casts by itself.

    def _expect(self, last: bool) -> None:
        if self.placed.is_sharded:
            self.placed.model.set_requires_gradient_sync(last)
        elif self.placed.reducer is not None and last:
            self.placed.reducer.arm()

    def _find(self, loss: Loss, batch: Batch, seed: int, optimizers: list[Any]) -> int:
        def attempt(size: int) -> None:
            values = cut(batch.values, 0, size, batch.size)
            part = Batch(values, min(size, batch.size), batch.total, size)
            seeds.sow(seed)
            # The model is not compiled here, because torch would compile each size; compiled passes
            # also store fewer activations.
            with torch.compiler.set_stance("force_eager"):
                self._passes(loss, part, size)
            if self.placed.reducer is not None:
                self.placed.reducer.finish()
            self.undo()

        coming = optimizer_bytes(optimizers)
        return find(batch.largest, self._world.device, attempt, coming, self._world.least)

    def undo(self) -> None:
        """Undo what the passes of the step changed: remove the gradients, and restore the running
        means of batch normalization.
        """
        self._buffers.undo()
        self.placed.model.zero_grad()
        self._world.device.free_cache()


def _describe(number: int) -> str:
    verb = "skipped" if number >= SKIPPED else "is at"
    return f"{verb} batch {number % SKIPPED >> 32} after {number % 2**32} steps"


class ModelBuffers:
    """The small buffers of a model that are saved in checkpoints."""

    def __init__(self, model: nn.Module, mesh: Any) -> None:
        saved = model.state_dict(keep_vars=True)
        named = dict(model.named_buffers())
        self._live = [b for name, b in named.items() if name in saved and 0 < b.numel() <= LARGEST]
        self._means = [b for b in self._live if b.is_floating_point()]
        self._kept: list[Any] = []
        axes = ("shards", "replicas") if mesh is not None and self._means else ()
        self._groups = [mesh[axis].get_group() for axis in axes if mesh[axis].size() > 1]

    def keep(self) -> None:
        if self._live and not self._kept:
            self._kept = [torch.empty_like(b) for b in self._live]
        if self._live:
            torch._foreach_copy_(self._kept, [buffer.data for buffer in self._live])

    def undo(self) -> None:
        if self._kept:
            torch._foreach_copy_([buffer.data for buffer in self._live], self._kept)

    def align(self) -> None:
        for group in self._groups:
            flat = torch.cat([b.detach().reshape(-1).float() for b in self._means])
            dist.broadcast(flat, src=dist.get_global_rank(group, 0), group=group)
            means = [b.data for b in self._means]
            parts = torch.split(flat, [each.numel() for each in means])
            views = [p.view(each.shape) for p, each in zip(parts, means, strict=True)]
            torch._foreach_copy_(means, views)
