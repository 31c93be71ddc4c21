"""Builds the model and its optimizer from the user's functions, and completes the plan."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cavvy.train import plan as plans
from cavvy.train import seeds
from cavvy.train.device import PrecisionContext, best
from cavvy.train.micro import MicroBatch
from cavvy.train.parallel.pipeline import Build, build_stages
from cavvy.train.parallel.reduce import clip, sort
from cavvy.train.parallel.shard import PlacedModel, ShardOptions, make_mesh, place
from cavvy.train.plan import Plan
from cavvy.train.world import RankWorld


class ModelBuilder:
    """Builds the model according to the plan. The plan `auto` is replaced by a plan that suits the
    size of the model.
    """

    def __init__(self, wanted: Plan | None, seed: int) -> None:
        self.plan = wanted or Plan()
        self._wanted, self._seed = wanted, seed
        self.numbers: Any = None

    def build(
        self, make: Build | None, stages: Sequence[Build], world: RankWorld, options: ShardOptions
    ) -> PlacedModel:
        """Build this rank's part of the model and place it on the device.

        Raises: ValueError: the plan does not fit the run; the message suggests a change.
        """
        if (make is None) == (not stages):
            raise ValueError("pass either a function that builds the model, or stages=[...]")
        if self._wanted is not None:
            self.plan = self._wanted.fit(world.size)
        if make is not None and self.plan.pipeline > 1:
            raise ValueError(
                "a pipeline needs to know where to split the model: call run.model(stages=[...])"
            )
        # This is the outermost axis of the mesh.
        stage = world.rank // (world.size // self.plan.pipeline)
        with torch.device("meta" if options.meta else "cpu"):
            if make is not None:
                self._sow(0)
                model = make()
            else:
                model = build_stages(stages, stage, self.plan.pipeline, self._sow)
        if self._wanted is None:
            size = sum(p.numel() for p in model.parameters())
            self.plan = plans.choose(
                world.size, size, world.device.memory_bytes, best(world.device)
            )
        self.numbers = PrecisionContext(self.plan.precision, world.device)
        if self.numbers.scaler is not None and (self.plan.pipeline > 1 or self.plan.tensor > 1):
            raise ValueError(
                "fp16 cannot be used with pipeline or tensor parallel, which have no loss scale: "
                "use bf16 or fp32"
            )
        mesh = make_mesh(self.plan, world)
        self._sow(0)
        return place(model, self.plan, world, mesh, self.numbers, options)

    def micro(self, world: RankWorld) -> MicroBatch:
        """Return the plan's micro-batch. The size of the micro-batch is 0 if the run must still
        determine it.
        """
        kinds = "+".join(sorted(set(world.gather(world.device.name))))
        plan = self.plan
        key = f"{kinds} x{world.size} {plan.precision} shards {plan.shards} tensor {plan.tensor}"
        key += f" recompute {int(plan.recompute)} compile {int(plan.compile)}"
        return MicroBatch(key, {key: plan.micro_batch} if plan.micro_batch else {})

    def _sow(self, number: int) -> None:
        seeds.sow(seeds.mix(self._seed, number))


def make_optimizer(make: Callable[..., Any], params: Any, options: dict[str, Any]) -> Any:
    """Make an optimizer. Each parameter group of the optimizer contains parameters of one kind,
    because sharded and unsharded parameters cannot be updated together.
    """
    listed = list(params)
    groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    parts: list[dict[str, Any]] = []
    for group in groups:
        plain, split = sort(group["params"])
        parts += [group | {"params": some} for some in (plain, *split) if some]
    return make(parts, **options)


def update(optimizers: Sequence[Any], scaler: Any, limit: float | None, pipeline: Any) -> Any:
    """Clip the gradients to the norm `limit`, step the optimizers, and free the gradients. Returns
    the norm before clipping, or None if `limit` is None.
    """
    norm = None
    if limit is not None:
        for optimizer in optimizers if scaler is not None else ():
            scaler.unscale_(optimizer)
        over = None if pipeline is None else pipeline.group
        norm = clip(
            (p for o in optimizers for group in o.param_groups for p in group["params"]),
            limit,
            over,
        )
    for optimizer in optimizers:
        optimizer.step() if scaler is None else scaler.step(optimizer)
    for optimizer in optimizers:
        optimizer.zero_grad()
    return norm
