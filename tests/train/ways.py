"""A network for pictures, trained by `cavvy.train` and by a loop that does by hand what a plan
asks for.
"""

import logging
import warnings
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.train.programs import SAMPLES, Say, learn
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cavvy import train
from cavvy.train import seeds

SIDE, KINDS, BATCH = 8, 4, 24


class Layer(nn.Module):
    def __init__(self, given: int, out: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(given, out, 3, padding=1), nn.BatchNorm2d(out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))


class Interpreted(nn.Module):
    """Counts the passes that were not compiled."""

    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            Interpreted.passes += 1
        return x


def network(compiled: bool) -> nn.Module:
    """Quickly compiled where it has to be: each fused kernel costs seconds."""
    if compiled:
        return nn.Sequential(
            nn.Flatten(),
            Interpreted(),
            nn.Linear(3 * SIDE * SIDE, 8),
            nn.ReLU(),
            nn.Linear(8, KINDS),
        )
    return nn.Sequential(
        Layer(3, 8), Layer(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, KINDS)
    )


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(2)
    return torch.randn(SAMPLES, 3, SIDE, SIDE, generator=source), torch.randint(
        0, KINDS, (SAMPLES,), generator=source
    )


def both(say: Say, plan: train.Plan, meta: bool, steps: int) -> dict[str, Any]:
    """Losses by a plan and by hand, and what was seen of how the plan was followed."""
    if plan.compile:  # torch's compiler causes warnings of torch itself
        warnings.simplefilter("ignore")
    seen: dict[str, Any] = {"forwards": 0}
    passes = Layer.forward

    def watched(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        seen["forwards"] += 1
        seen["channels_last"] = all(
            each.is_contiguous(memory_format=torch.channels_last) for each in (layer.conv.weight, x)
        )
        return passes(layer, x)

    def build() -> nn.Module:
        made = network(plan.compile)
        seen["meta"] = all(each.is_meta for each in made.parameters())
        return made

    Layer.forward = watched  # type: ignore[method-assign]
    run = train.Run("checkpoints", plan=plan, device="cpu", save_every=1e9, seed=3)
    model = run.model(build, meta=meta)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    data = run.data(train.Tensors(*pictures()), global_batch=BATCH)
    losses = []
    for part in run.batches(data, epochs=steps * BATCH / SAMPLES + 1e-9):
        losses.append(
            float(run.accumulate(lambda some: F.cross_entropy(model(some[0]), some[1]), part))
        )
        run.step(optimizer)
    run.close()
    Layer.forward = passes  # type: ignore[method-assign]
    seen["interpreted"] = Interpreted.passes
    return {"losses": losses, "expected": by_hand(plan, meta, steps), **seen}


def by_hand(plan: train.Plan, meta: bool, steps: int) -> list[float]:
    seeds.sow(seeds.mix(3, 0))
    with torch.device("meta" if meta else "cpu"):
        model = network(plan.compile)
    layout = torch.channels_last if plan.channels_last else torch.contiguous_format
    model.to(memory_format=layout)  # type: ignore[call-overload]  # torch's stubs leave it out
    if meta:
        seeds.sow(seeds.mix(3, 0))
        model.to_empty(device="cpu")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]
    if plan.recompute:
        for layer in (model[0], model[1]):  # type: ignore[index]
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    used: Callable[..., Any] = torch.compile(model) if plan.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = pictures()
    order = train.Data(train.Tensors(x), global_batch=BATCH, seed=3)
    losses = []
    for step in range(steps):
        chosen = order.indices(range(step * BATCH, (step + 1) * BATCH))
        loss = F.cross_entropy(used(x[chosen].contiguous(memory_format=layout)), y[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded_and_compiled(say: Say) -> tuple[list[int], int]:
    """The operations of each graph of ten parts that all differ, and the uncompiled passes."""
    sizes: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        sizes.append(len(graph.graph.nodes))
        return graph.forward

    warnings.simplefilter("ignore")
    torch.compile = partial(torch.compile, backend=backend)
    widths = range(4, 15)
    run = train.Run("checkpoints", plan=train.Plan(shards=2, compile=True), device="cpu")
    model = run.model(
        lambda: nn.Sequential(
            *(nn.Sequential(nn.Linear(a, a + 1), Interpreted()) for a in widths[:-1])
        )
    )
    optimizer = run.optimizer(torch.optim.SGD, lr=0.01)
    data = run.data(train.Tensors(torch.randn(BATCH, 4)), global_batch=BATCH)
    for batch in run.batches(data, epochs=2):
        run.accumulate(lambda part: model(part[0]).mean(), batch)
        run.step(optimizer)
    run.close()
    return sizes, Interpreted.passes


def not_filled(say: Say) -> str:
    """Why a layer that cannot fill itself is not built empty."""
    run = train.Run("checkpoints", plan=train.Plan(), device="cpu", save_every=1e9)
    try:
        run.model(lambda: nn.Sequential(nn.Linear(8, 8), nn.MultiheadAttention(8, 2)), meta=True)
    except ValueError as error:
        return str(error)
    return "nothing"


def told_to_leave(say: Say, left_s: float, save_s: float) -> list[str]:
    """What a run warns of that is told to leave in `left_s` when its last save has taken
    `save_s`.
    """
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("cavvy.train").addHandler(handler)

    def each(run: train.Run) -> None:
        if run.steps == 2:
            run.save(wait=True)
            assert run.keeper.store.seconds > 0  # it is measured
            run.keeper.store.seconds = save_s
            Path("told").write_text(
                f'{{"deadline": "{(datetime.now(UTC) + timedelta(seconds=left_s)).isoformat()}"}}'
            )

    try:
        learn(say, train.Plan(), steps=50, each=each)
    except SystemExit as leaving:
        return [str(leaving.code), *warned]
    return ["it stayed"]
