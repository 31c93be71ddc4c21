"""Places a model on the ranks according to the plan.

The steps must be in this order: tensor parallel, recomputation, compile, FSDP2 or replicas. The
optimizer is created after FSDP2 or the replicas are applied.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from cavvy.train.device import PrecisionContext
from cavvy.train.parallel.pipeline import Pipeline
from cavvy.train.parallel.reduce import GradientReducer
from cavvy.train.parallel.replicas import AXES, align, name_tensors
from cavvy.train.plan import Plan
from cavvy.train.world import RankWorld

RECOMPILE_LIMIT = 8  # maximum number of graphs of one part; torch's own default


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """The user's options for splitting a model. See `Run.model`."""

    # a function that returns the repeated parts of the model
    blocks: Callable[[nn.Module], Sequence[nn.Module]] | None = None
    tensor_plan: dict[str, Any] | None = None  # a plan for torch's parallelize_module
    # whether to build the model without memory and initialize it with reset_parameters()
    meta: bool = False


@dataclass(slots=True)
class PlacedModel:
    """This rank's part of a model, and the rank's connections to other ranks."""

    model: Any
    mesh: Any
    reducer: GradientReducer | None
    data_rank: int
    data_ranks: int
    pipeline: Pipeline | None
    is_sharded: bool


def make_mesh(plan: Plan, world: RankWorld) -> Any:
    """Create the device mesh with the dimensions AXES, or return None for one rank."""
    if world.size == 1:
        return None
    sizes = tuple(getattr(plan, axis) for axis in AXES)
    return init_device_mesh(world.device.torch.type, sizes, mesh_dim_names=AXES)


def place(
    model: nn.Module,
    plan: Plan,
    world: RankWorld,
    mesh: Any,
    numbers: PrecisionContext,
    options: ShardOptions,
) -> PlacedModel:
    device = world.device.torch
    if not options.meta:
        align(name_tensors(model), ("tensor", "shards", "replicas"), mesh, world)
    if plan.shards > 1 and _list_called(model) != [model]:
        raise ValueError(
            f"{type(model).__name__} has no forward method, so its members cannot be sharded: use "
            "a plan with shards=1, or a module whose forward method calls them"
        )
    parts = list(options.blocks(model)) if options.blocks else find_blocks(model)
    numbers.convert(model)
    if plan.tensor > 1:
        _split_layers(model, mesh["tensor"], options)
    if plan.channels_last:
        # torch's stubs leave this form out
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if plan.shards == 1 and not options.meta:
        model.to(device)
    if plan.recompute:
        for part in parts:
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)
    if plan.compile:
        _compile(parts if plan.shards > 1 or plan.tensor > 1 else _list_called(model))
    if plan.shards > 1:
        _shard(model, parts, plan, mesh, numbers)
    if options.meta:
        _fill(model, device)
    return _connect(model, plan, mesh, device)


def _compile(parts: Sequence[nn.Module]) -> None:
    """Compile each part as one graph, as `torch.compile(part)` does.

    `Module.compile` compiles the first function that does not belong to torch. The forward method
    of an `nn.Sequential` belongs to torch, so `Module.compile` would compile each member of the
    `nn.Sequential` separately. Equal parts of the model share one compiled graph. `RECOMPILE_LIMIT`
    is multiplied by the number of parts, so each part can have its own graph if no parts are equal.
    """
    for part in parts:
        part.forward = partial(_call, part.forward)
        part.compile(recompile_limit=RECOMPILE_LIMIT * len(parts))


def _list_called(model: nn.Module) -> list[nn.Module]:
    """Return the model itself or, if the model is only a container such as an `nn.ModuleDict`, its
    members.
    """
    return [model] if type(model).forward is not nn.Module.forward else list(model.children())


def _call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _connect(model: nn.Module, plan: Plan, mesh: Any, device: torch.device) -> PlacedModel:
    """Connect the model to other ranks: create its reducer, its share of the data, or its pipeline
    stage.
    """
    reducer = None
    if plan.replicas > 1 and plan.shards == 1:
        trained = [p for p in model.parameters() if p.requires_grad]
        reducer = GradientReducer(trained, mesh["replicas"].get_group())
    data_rank = 0
    if mesh is not None:
        data_rank = mesh.get_local_rank("replicas") * plan.shards + mesh.get_local_rank("shards")
    pipeline = Pipeline(model, mesh, device) if plan.pipeline > 1 else None
    return PlacedModel(model, mesh, reducer, data_rank, plan.data_ranks, pipeline, plan.shards > 1)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated parts of a model: the members of its largest list of modules. If the
    model contains no list of modules, return the model's direct children.
    """
    lists = [
        m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1
    ]
    members = max(lists, key=_count, default=None)
    return [m for m in (model if members is None else members).children() if _count(m)]


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _split_layers(model: nn.Module, mesh: Any, options: ShardOptions) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    layers = (
        options.tensor_plan
        if options.tensor_plan is not None
        else getattr(model, "tensor_plan", None)
    )
    if not layers:
        raise ValueError(
            "tensor parallel needs to know how each layer is split: call run.model(build, "
            "tensor_plan={'mlp.up': ColwiseParallel(), 'mlp.down': RowwiseParallel()})"
        )
    known = {
        name for name, _ in model.named_modules()
    }  # A pipeline stage has only some of the named layers.
    parallelize_module(
        model, mesh, {name: how for name, how in layers.items() if name in known or "*" in name}
    )


def _shard(
    model: nn.Module, parts: list[nn.Module], plan: Plan, mesh: Any, numbers: PrecisionContext
) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    low = numbers.low
    full = torch.float32 if low is not None else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=full)
    whole = MixedPrecisionPolicy(
        param_dtype=low, reduce_dtype=full, output_dtype=full
    )  # The output stays in fp32, so that losses are not rounded.
    grid = mesh["replicas", "shards"] if plan.replicas > 1 else mesh["shards"]
    # A stage runs many micro-batches in a step, so its gathered parameters are kept.
    free = plan.pipeline == 1
    for part in parts:
        fully_shard(
            part, mesh=grid, mp_policy=policy, reshard_after_forward=free and part is not parts[-1]
        )
    fully_shard(model, mesh=grid, mp_policy=whole, reshard_after_forward=free)


def _fill(model: nn.Module, device: Any) -> None:
    model.to_empty(device=device)
    for name, module in model.named_modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        elif own := [
            *dict(module.named_parameters(recurse=False)),
            *dict(module.named_buffers(recurse=False)),
        ]:
            unsupported = (
                f"{name or 'the model'} ({type(module).__name__}) has no reset_parameters() to "
                f"fill {own[0]}"
            )
            raise ValueError(f"meta=True: {unsupported}; write this method, or leave meta=True out")
