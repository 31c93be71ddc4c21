"""Builds the model and its optimizer from the user's functions, and completes the plan.

Evaluates a model on all samples of a data set. Each sample is used once, on one of the ranks.

The state of a run without its tensors, as plain data: the position in the data, the loss scale,
and the user's objects.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from cavvy.train import plan as plans
from cavvy.train import seeds
from cavvy.train.data import Batch, Data, move
from cavvy.train.device import PrecisionContext, best
from cavvy.train.loss import LossSum
from cavvy.train.micro import MicroBatch
from cavvy.train.parallel.pipeline import Build, build_stages
from cavvy.train.parallel.reduce import clip, sort
from cavvy.train.parallel.shard import PlacedModel, ShardOptions, make_mesh, place
from cavvy.train.plan import Plan
from cavvy.train.step import StepGradients
from cavvy.train.world import RankWorld

Measure = Callable[[Any], Any]


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


class RunState:
    """The state that is written into the completion mark of each checkpoint and restored from
    it.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.data: list[Data] = []
        self.things: dict[str, Any] = {}
        self.micro = MicroBatch("", {})

    def to_facts(self, numbers: Any, plan: Plan) -> dict[str, Any]:
        return {
            "version": 1,
            "step": self.steps,
            "positions": [data.position for data in self.data],
            "orders": [data.order for data in self.data],
            "scale": numbers.state(),
            "micro": self.micro.known,
            "plan": plan.to_json(),
        }

    def from_facts(self, facts: dict[str, Any], numbers: Any) -> None:
        """Restore the state of a checkpoint.

        Raises: ValueError: the checkpoint does not match this script.
        """
        positions, things = facts["positions"], facts["things"]
        if len(positions) != len(self.data):
            raise ValueError(
                f"the checkpoint has {len(positions)} data sets, but the script has "
                f"{len(self.data)}"
            )
        if missing := sorted(set(self.things) - set(things)):
            raise ValueError(
                f"the checkpoint has no state for {', '.join(missing)}, which the script adds with "
                "run.keep"
            )
        self.steps = facts["step"]
        orders = facts.get("orders", [{} for _ in positions])
        for data, position, order in zip(self.data, positions, orders, strict=True):
            data.resume(position, order)
        for name, thing in self.things.items():
            thing.load_state_dict(things[name])
        numbers.load(facts["scale"])
        self.micro.known = facts["micro"] | self.micro.known
