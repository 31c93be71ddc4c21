"""Pipeline parallel: the layers are split over ranks, and micro-batches pass through the ranks one
after another (schedule 1F1B).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cavvy.train.data.stream import Batch
from cavvy.train.loss import LossSum

Build = Callable[[], nn.Module]


def build_stages(
    builders: Sequence[Build], stage: int, stages: int, seed: Callable[[int], None]
) -> nn.Sequential:
    """Build the blocks of one stage. Each block is named by its position in the whole model, so
    that a checkpoint can be loaded with any number of stages.
    """
    if len(builders) < stages:
        raise ValueError(f"{len(builders)} stages cannot be spread over {stages} pipeline ranks")
    low, high = stage * len(builders) // stages, (stage + 1) * len(builders) // stages
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for number in range(low, high):
        seed(number)  # This gives the same block the same initial values on every rank.
        parts[str(number)] = builders[number]()
    return nn.Sequential(parts)


class Pipeline:
    """The stage of one rank, and the schedule by which micro-batches pass through it."""

    def __init__(self, model: nn.Module, mesh: Any, device: Any) -> None:
        from torch.distributed.pipelining import PipelineStage

        self.group = mesh["pipeline"].get_group()
        self.stages = dist.get_world_size(self.group)
        self._index = dist.get_rank(self.group)
        self._stage = PipelineStage(model, self._index, self.stages, device, group=self.group)
        self._schedules: dict[tuple[int, Any], Any] = {}
        self._micro, self._scale = 0, 1.0
        self._sums: list[LossSum] = []

    def step(
        self, loss: Callable[[Any, Any], Any], batch: Batch, micro: int, scale: float
    ) -> LossSum:
        """Run the forward and backward passes over one rank's batch (input, target). Returns the
        losses of the last stage on every stage. The gradient of each loss is multiplied by the
        loss's weight and by `scale`.
        """
        inputs, target = batch.values
        count = batch.size // micro
        if count < self.stages:
            unsupported = (
                f"a pipeline of {self.stages} stages needs at least {self.stages} micro-batches"
            )
            raise ValueError(
                f"{batch.size} samples make {count} micro-batches of {micro}, but {unsupported}"
            )
        self._micro, self._scale, self._sums = micro, scale, []
        schedule = self._schedule(loss, count)
        if self._index == 0:
            schedule.step(inputs)
        elif self._index == self.stages - 1:
            schedule.step(target=target, losses=[])
        else:
            schedule.step()
        return self._share(count)

    def _share(self, count: int) -> LossSum:
        """Send the losses of the last stage to every stage, and return the losses. In the first
        step, torch calls the loss function additional times to infer the shapes, before the `count`
        calls for the batch.
        """
        sums = LossSum()
        for one in self._sums[-count:]:
            sums.total, sums.weight = sums.total + one.total, sums.weight + one.weight
            sums.is_weighted |= one.is_weighted
        device = self._stage.device
        numbers = torch.zeros(3, dtype=torch.float64, device=device)
        if self._sums:
            numbers[:2] = sums.numbers()
            numbers[2] = float(sums.is_weighted)
        last = dist.get_global_rank(self.group, self.stages - 1)
        dist.broadcast(numbers, src=last, group=self.group)
        sums.is_weighted = bool(numbers[2])
        sums.total, sums.weight = numbers[0].float(), numbers[1]
        return sums

    def _weigh(self, result: Any) -> Any:
        self._sums.append(LossSum())
        value, weight = self._sums[-1].add(result, self._micro)
        return value * (weight * self._scale)

    def _schedule(self, loss: Callable[[Any, Any], Any], count: int) -> Any:
        from torch.distributed.pipelining import Schedule1F1B

        key = (count, loss)
        if key not in self._schedules:
            self._schedules[key] = Schedule1F1B(
                self._stage,
                n_microbatches=count,
                loss_fn=lambda output, target: self._weigh(loss(output, target)),
                scale_grads=False,
            )
        return self._schedules[key]
