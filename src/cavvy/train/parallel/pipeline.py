"""Pipeline parallel: layers are split over ranks, through which micro-batches flow (1F1B)."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cavvy.train.data.stream import Batch

Build = Callable[[], nn.Module]


def build_stages(
    builders: Sequence[Build], stage: int, stages: int, seed: Callable[[int], None]
) -> nn.Sequential:
    """Build the blocks of one stage. They are named by their position in the whole model, so that a
    checkpoint can be loaded with any number of stages.
    """
    if len(builders) < stages:
        raise ValueError(f"{len(builders)} stages cannot be spread over {stages} pipeline ranks")
    low, high = stage * len(builders) // stages, (stage + 1) * len(builders) // stages
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for number in range(low, high):
        seed(number)  # the same block has the same initial values on every rank
        parts[str(number)] = builders[number]()
    return nn.Sequential(parts)


class Pipeline:
    """One rank's stage, and the schedule of micro-batches through it."""

    def __init__(self, model: nn.Module, mesh: Any, device: Any) -> None:
        from torch.distributed.pipelining import PipelineStage

        self.group = mesh["pipeline"].get_group()
        self.stages = dist.get_world_size(self.group)
        self._index = dist.get_rank(self.group)
        self._stage = PipelineStage(model, self._index, self.stages, device, group=self.group)
        self._schedules: dict[tuple[int, Any], Any] = {}
        self._weight = 1.0

    def step(
        self, loss: Callable[[Any, Any], Any], batch: Batch, micro: int, averaged_over: int
    ) -> Any:
        """Run the forward and backward passes over one rank's batch (input, target). Returns the
        mean loss, on every stage.

        Gradients are scaled such that averaging them over `averaged_over` ranks (or summing them
        over all ranks, if it is 1) gives the gradient of the mean loss over the global batch.
        """
        inputs, target = batch.values
        count = batch.size // micro
        if count < self.stages:
            unsupported = f"a pipeline of {self.stages} stages needs at least {self.stages}"
            raise ValueError(
                f"{batch.size} samples make {count} micro-batches of {micro}: {unsupported}"
            )
        self._weight = micro * averaged_over / batch.total
        schedule = self._schedule(loss, count)
        losses: list[Any] = []
        if self._index == 0:
            schedule.step(inputs)
        elif self._index == self.stages - 1:
            schedule.step(target=target, losses=losses)
        else:
            schedule.step()
        mean = (
            torch.stack(losses).mean().detach() / self._weight
            if losses
            else torch.zeros((), device=target.device)
        )
        dist.broadcast(
            mean, src=dist.get_global_rank(self.group, self.stages - 1), group=self.group
        )
        return mean

    def _schedule(self, loss: Callable[[Any, Any], Any], count: int) -> Any:
        from torch.distributed.pipelining import Schedule1F1B

        key = (count, loss)
        if key not in self._schedules:
            self._schedules[key] = Schedule1F1B(
                self._stage,
                n_microbatches=count,
                loss_fn=lambda output, target: loss(output, target) * self._weight,
                scale_grads=False,
            )
        return self._schedules[key]
