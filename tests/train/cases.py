"""Training scripts that run one after another in the ranks of one torchrun.

Each case gets a folder of its own and returns what a rank saw, as JSON.
"""

import faulthandler
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.train.programs import CLASSES, WIDTH, digest, make_samples
from torch import nn
from torch.nn import functional as F

from cavvy import train
from cavvy.train.parallel import replicas

Case = Callable[[Path], Any]
SHARDED, SPLIT = train.Plan(shards=2), train.Plan(tensor=2)


class Branches(nn.Module):
    """A model with two branches; each sample goes through one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor, branch: int = 0) -> Any:
        return (self.two if branch else self.one)(x) * self.scale


def start(
    folder: Path, build: Any = Branches, plan: train.Plan | None = None, **options: Any
) -> tuple[train.Run, Any, Any, train.Data]:
    run = train.Run(folder, plan=plan or train.Plan(), device="cpu", save_every=1e9, seed=3)
    model = run.model(build, **options)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    x, y, _ = make_samples()
    return run, model, optimizer, run.data(train.Tensors(x, y), global_batch=24)


def other_values(folder: Path) -> Any:
    """Each rank builds other weights and another buffer, as a script does that seeds by rank or
    loads a file on the first rank only.
    """

    def build() -> nn.Module:
        torch.manual_seed(dist.get_rank())
        made = Branches()
        made.scale += dist.get_rank()
        return made

    found = {}
    for name, plan in (("replicas", train.Plan()), ("shards", SHARDED)):
        run, model, _, data = start(folder / name, build, plan)
        if name == "replicas" and run.world.rank:
            with torch.no_grad():
                model.one.weight += 1  # after the model was placed
        next(run.batches(data, epochs=1))
        torch.manual_seed(0)
        found[name] = digest(model) == digest(Branches())
        run.close()
    return found


def branch_by_rank(folder: Path) -> Any:
    """The ranks compute different branches of the model: each has gradients of one branch only."""
    run, model, optimizer, data = start(folder)
    for batch in run.batches(data, epochs=1):
        run.accumulate(lambda part: F.cross_entropy(model(part[0], run.world.rank), part[1]), batch)
        run.step(optimizer)
    run.close()
    return [digest(model), run.steps]


def diverged(folder: Path, act: Callable[[train.Run, nn.Module, Any], bool]) -> Any:
    """Train while `act` does something on one rank only, and return the error. `act` returns
    whether the rank updates its model.
    """
    run, model, optimizer, data = start(folder)
    try:
        for batch in run.batches(data, epochs=1):
            updates = act(run, model, optimizer)
            if updates is None:
                continue
            run.accumulate(lambda part: F.cross_entropy(model(part[0]), part[1]), batch)
            if updates:
                run.step(optimizer)
    except train.RanksDiverged as error:
        return [str(error), run.steps]
    finally:
        run.close()
    return ["none", run.steps]


def on_rank_1(action: Callable[[train.Run, Any, Any], Any]) -> Case:
    def act(run: train.Run, model: nn.Module, optimizer: Any) -> Any:
        return action(run, model, optimizer) if run.world.rank == 1 else True

    return lambda folder: diverged(folder, act)


def raise_rate(run: train.Run, model: Any, optimizer: Any) -> bool:
    for group in optimizer.param_groups:
        group["lr"] = 0.5 if run.steps else 1e-2
    return True


def change_parameter(run: train.Run, model: Any, optimizer: Any) -> bool:
    if run.steps == 3:
        with torch.no_grad():
            model.two.bias[1] += 1e-7
    return True


def compare_always(case: Case) -> Case:
    def work(folder: Path) -> Any:
        before, replicas.EVERY = replicas.EVERY, 3
        try:
            return case(folder)
        finally:
            replicas.EVERY = before

    return work


CASES: dict[str, Case] = {
    "other values": other_values,
    "branch by rank": branch_by_rank,
    "skipped batch": on_rank_1(lambda run, model, _: None if run.steps == 2 else True),
    "skipped step": on_rank_1(lambda run, model, _: run.steps != 2),
    "learning rate": on_rank_1(raise_rate),
    "changed parameter": on_rank_1(change_parameter),
    "changed parameter, compared": compare_always(on_rank_1(change_parameter)),
}


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    faulthandler.dump_traceback_later(100, exit=True)
    for name, case in CASES.items():
        found = case(folder / name.replace(" ", "-").replace(",", ""))
        (folder / f"{name}.{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
