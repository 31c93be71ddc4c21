"""Training scripts that run one after another in the same two ranks.

Each case gets a folder of its own and returns what a rank saw, as JSON.
"""

import faulthandler
import json
import os
import resource
import shutil
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.train.programs import (
    CLASSES,
    WIDTH,
    Normed,
    Say,
    digest,
    full_state,
    make_samples,
)
from tests.train.storage import UnreliableStorage, use_unreliable_storage
from tests.waits import START_S
from torch import nn
from torch.nn import functional as F

from cavvy import train
from cavvy.train import seeds
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
    folder: Path | str, build: Any = Branches, plan: train.Plan | None = None, **options: Any
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


class Average:
    """A running mean of the parameters, as tensors that are placed as the parameters are."""

    def __init__(self, model: nn.Module) -> None:
        self._named = dict(model.named_parameters())
        self.means = {name: p.detach().clone() for name, p in self._named.items()}
        self.counts: dict[int, int] = {}

    def update(self) -> None:
        for name, mean in self.means.items():
            mean.lerp_(self._named[name].detach(), 0.5)
        self.counts[len(self.counts)] = 1

    def state_dict(self) -> dict[str, Any]:
        return {"means": self.means, "counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = dict(state["counts"])
        for name, value in state["means"].items():
            self.means[name].copy_(value)

    def digest(self) -> str:
        whole = nn.Module()
        for name, mean in self.means.items():
            whole.register_buffer(name.replace(".", "_"), mean)
        return digest(whole)


def learn(folder: Path, plan: train.Plan | None = None, *, stop: int, epochs: int = 1) -> Any:
    """Train with a kept average and a schedule up to step `stop`, with two saves."""
    run, model, optimizer, data = start(folder, Normed, plan)
    average = run.keep("average", Average(model))
    schedule = run.keep("schedule", torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]))
    shadow = run.keep("shadow", torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)))
    run.resume()
    first = run.steps
    try:
        for batch in run.batches(data, epochs=epochs):
            run.accumulate(lambda part: F.cross_entropy(model(part[0]), part[1]), batch)
            run.step(optimizer)
            average.update()
            shadow.update_parameters(nn.Linear(2, 2))
            schedule.step()
            if run.steps == stop:
                run.save(wait=True)
                break
            if run.steps == stop - 1:
                run.save()
    finally:
        run.close()
    return [
        first,
        digest(model),
        average.digest(),
        average.counts == {n: 1 for n in range(run.steps)},
        int(shadow.n_averaged),
        schedule.get_last_lr(),
    ]


def kept_tensors(folder: Path) -> Any:
    found = {}
    for name, plan in (("replicas", train.Plan()), ("shards", SHARDED)):
        whole = learn(folder / name / "whole", plan, stop=5)
        learn(folder / name / "parts", plan, stop=3)
        found[name] = [whole, learn(folder / name / "parts", plan, stop=5)]
    learn(folder / "other", SHARDED, stop=3)
    found["other plan"] = [whole, learn(folder / "other", train.Plan(), stop=5)]
    return found


def kept_function(folder: Path) -> str:
    run, *_, data = start(folder)
    odd = run.keep("odd", Average(nn.Linear(1, 1)))
    odd.counts = {0: print}  # type: ignore[dict-item]
    try:
        next(run.batches(data, epochs=1))
    except TypeError as error:
        return str(error)
    finally:
        run.close()
    return "none"


def cut_file(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_bit(path: Path) -> None:
    held = bytearray(path.read_bytes())
    held[len(held) // 2] ^= 1
    path.write_bytes(held)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "__0_0.distcp": flip_bit,
    "__1_0.distcp": cut_file,
    ".metadata": Path.unlink,
    "complete.json": cut_file,
}


def damaged(folder: Path) -> Any:
    """The newest checkpoint is damaged; then both are."""
    whole = learn(folder / "whole", stop=5)
    found: dict[str, Any] = {}
    for name, act in DAMAGES.items():
        part = folder / name.strip(".")
        learn(part, stop=3)
        damage(part / "step-000000000003" / name, act)
        first, *rest = learn(part, stop=5)
        found[name] = [first, rest == whole[1:]]
    for step in (4, 5):
        damage(folder / f"whole/step-00000000000{step}/__0_0.distcp", flip_bit)
    for attempt in ("all", "all, again"):
        try:
            found[attempt] = learn(folder / "whole", stop=5)
        except train.CheckpointUnreadable as error:
            found[attempt] = str(error)
    return found


def damage(path: Path, act: Callable[[Path], None]) -> None:
    if dist.get_rank() == 0:
        act(path)
    dist.barrier()


def limit_files(most: int) -> None:
    """As on a full disk, writes to files fail beyond this size in bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


def full_disk(folder: Path) -> Any:
    """Saves fail on one rank from step 2 to step 3; then the final save fails."""
    run, model, optimizer, data = start(folder, Normed)
    saved, left = [], []
    for batch in run.batches(data, epochs=1):
        run.accumulate(lambda part: F.cross_entropy(model(part[0]), part[1]), batch)
        run.step(optimizer)
        if run.steps in (2, 3) and run.world.rank == 1:
            limit_files(100)
        saved.append(run.save(wait=True))
        limit_files(resource.RLIM_INFINITY)
        left.append(sorted(path.name[-1] for path in folder.glob("step-*")))
        dist.barrier()
    run.close()
    run, model, optimizer, data = start(folder, Normed)
    said = "none"
    try:
        for batch in run.batches(data, epochs=2):
            run.accumulate(lambda part: F.cross_entropy(model(part[0]), part[1]), batch)
            run.step(optimizer)
            limit_files(100)
    except train.CheckpointNotSaved as error:
        said = str(error)
    finally:
        limit_files(resource.RLIM_INFINITY)
        run.close()
    return [saved, left, said.replace(str(folder), "FOLDER")]


def failed_upload(folder: Path) -> Any:
    """The final upload of one rank fails twice. Nothing is left to compute for the next attempt."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    use_unreliable_storage()
    found: list[Any] = []
    for failures in (2, 0):
        run, model, optimizer, data = start(f"file://{folder}/remote", Normed)
        UnreliableStorage.failures = failures * run.world.is_first
        try:
            for batch in run.batches(data, epochs=1):
                run.accumulate(
                    lambda part, model=model: F.cross_entropy(model(part[0]), part[1]), batch
                )
                run.step(optimizer)
            found.append(run.steps)
        except train.CheckpointNotSaved as error:
            found.append(str(error).partition(" could")[0])
        finally:
            run.close()
        found.append([path.parent.name for path in folder.glob("remote/*/complete.json")])
    return found


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Classes (N, 4), most of which are padding, and inputs (N, 4, WIDTH) for them. Sample 0 has
    padding only.
    """
    source = torch.Generator().manual_seed(5)
    y = torch.randint(0, CLASSES, (48, 4), generator=source)
    y[torch.arange(4) >= torch.randint(0, 5, (48, 1), generator=source)] = -100
    y[0] = -100
    return torch.randn(48, 4, WIDTH, generator=source), y


def mean_by_torch(out: torch.Tensor, y: torch.Tensor) -> Any:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


def smooth_mean(out: torch.Tensor, y: torch.Tensor) -> Any:
    smooth = F.cross_entropy(out.flatten(0, 1), y.flatten(), label_smoothing=0.1)
    return smooth / 2 + 0.5 * mean_by_torch(out, y)


def mean_by_mask(out: torch.Tensor, y: torch.Tensor) -> Any:
    each = F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none")
    return (each * (y.flatten() >= 0)).sum() / (y >= 0).sum()


def mean_of_even_classes(out: torch.Tensor, y: torch.Tensor) -> Any:
    """Some parts of a batch have no item, although they have targets that are not padding."""
    each = F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none")
    even = (y.flatten() >= 0) & (y.flatten() % 2 == 0)
    return (each * even).sum() / even.sum()


def mean_and_number(out: torch.Tensor, y: torch.Tensor) -> Any:
    each = F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none")
    number = (y >= 0).sum()
    return each.sum() * (1 / number), number


LOSSES = [mean_by_torch, smooth_mean, mean_by_mask, mean_of_even_classes, mean_and_number]
SPREADS = {
    "one pass": train.Plan(),
    "micro-batches of 5": train.Plan(micro_batch=5),
    "micro-batches of 1": train.Plan(micro_batch=1),
    "shards": train.Plan(shards=2, micro_batch=5),
    "pipeline": train.Plan(pipeline=2, micro_batch=3),
    "fp16": train.Plan(micro_batch=5, precision="fp16"),
}


class Hidden(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh()


class Output(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sin()


def token_means(folder: Path) -> Any:
    """The losses of padded batches, and the largest difference of parameters to a plain loop."""
    found = {}
    for loss in LOSSES:
        for name, plan in SPREADS.items():
            run = train.Run(folder, plan=plan, device="cpu", save_every=1e9, seed=3)
            stages: Any = [Hidden, Output]
            model = run.model(stages=stages)
            optimizer = run.optimizer(torch.optim.SGD, lr=0.5)
            torch.manual_seed(0)
            data = run.data(train.Tensors(*padded()), global_batch=24, shuffle=False)
            values, wanted = [], by_hand(stages, loss)
            for batch in run.batches(data, epochs=1):
                values.append(float(run.pipeline(loss, batch)))
                run.step(optimizer)
            whole = full_state(model)
            error = max((whole[n] - wanted[1][n]).abs().max().item() for n in whole)
            found[f"{loss.__name__}, {name}"] = [values, wanted[0], error]
            run.close()
            if run.world.rank == 0:
                shutil.rmtree(folder)
            dist.barrier()
    return found


def by_hand(stages: Any, loss: Any) -> Any:
    made = []
    for number, stage in enumerate(stages):
        seeds.sow(seeds.mix(3, number))
        made.append(stage())
    model = nn.Sequential(*made)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = padded()
    values = []
    for part in range(2):
        chosen = slice(24 * part, 24 * part + 24)
        out = loss(model(x[chosen]), y[chosen])
        mean = out[0] if isinstance(out, tuple) else out
        values.append(mean.item())
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
    return values, model.state_dict()


def other_data(folder: Path) -> Any:
    """Resumes with fewer samples, with another seed, and with the permission to do so."""
    found = []
    for samples, seed, accepted in (
        (120, 3, False),
        (96, 3, False),
        (120, 4, False),
        (96, 4, True),
    ):
        run = train.Run(folder, plan=train.Plan(), device="cpu", save_every=1e9, seed=seed)
        model = run.model(Normed)
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
        x, y, _ = make_samples()
        source = train.Tensors(x[:samples], y[:samples])
        data = run.data(source, global_batch=24, new_order=accepted)
        try:
            for batch in run.batches(data, epochs=2):
                run.accumulate(lambda part: F.cross_entropy(model(part[0]), part[1]), batch)  # noqa: B023
                run.step(optimizer)
                if run.steps == 3:
                    run.save(wait=True)
                    break
            found.append(str(run.steps))
        except ValueError as error:
            found.append(str(error))
        finally:
            run.close()
    return found


def evaluated(folder: Path) -> Any:
    """Means over 47 padded samples, in batches whose last one leaves a rank without a sample."""
    found = {}
    torch.manual_seed(0)
    x, y = padded()
    for name, plan in (("replicas", train.Plan(micro_batch=5)), ("shards", SHARDED)):
        run = train.Run(folder / name, plan=plan, device="cpu", save_every=1e9, seed=3)
        model = run.model(lambda: nn.Sequential(Hidden(), nn.Dropout(0.5), Output()))
        held = train.Tensors(x[:47], y[:47])
        [frozen] = [each for each in model.modules() if isinstance(each, nn.Dropout)]
        frozen.eval()

        def measure(part: Any, model: Any = model) -> Any:
            return mean_by_torch(model(part[0]), part[1])

        mean = run.evaluate(measure, held, global_batch=23)
        seeds.sow(seeds.mix(3, 0))
        expected = mean_by_torch(nn.Sequential(Hidden(), Output())(x[:47]), y[:47])
        found[name] = [float(mean), float(expected), model.training and not frozen.training]
        run.close()
    return found


class Pair(nn.ModuleDict):
    """Two models, each with an optimizer and a loss. The second loss also leaves gradients in the
    first model, which are not removed.
    """

    def __init__(self) -> None:
        super().__init__({"judge": nn.Linear(WIDTH, CLASSES), "maker": nn.Linear(WIDTH, WIDTH)})

    def loss(self, name: str, x: torch.Tensor, y: torch.Tensor) -> Any:
        return F.cross_entropy(self["judge"](self["maker"](x) if name == "maker" else x), y)


def two_models(folder: Path) -> Any:
    """The largest difference to a plain loop, and the number of steps."""
    run = train.Run(folder, plan=train.Plan(micro_batch=5), device="cpu", save_every=1e9, seed=3)
    model = run.model(Pair)
    optimizers = {n: run.optimizer(torch.optim.SGD, model[n].parameters(), lr=0.1) for n in model}
    x, y, _ = make_samples()
    data = run.data(train.Tensors(x, y), global_batch=24)
    for batch in run.batches(data, epochs=1):
        for name, optimizer in optimizers.items():
            run.accumulate(lambda x, y, name=name: model.loss(name, x, y), batch)
            run.step(optimizer)
    seeds.sow(seeds.mix(3, 0))
    plain = Pair()
    steppers = {name: torch.optim.SGD(plain[name].parameters(), lr=0.1) for name in plain}
    for step in range(5):
        chosen = data.indices(range(24 * step, 24 * step + 24))
        for name, stepper in steppers.items():
            plain.loss(name, x[chosen], y[chosen]).backward()
            stepper.step()
            stepper.zero_grad()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    found = [max(float((a - b).abs().max()) for a, b in pairs), run.steps]
    run.close()
    return found


CASES: dict[str, Case] = {
    "other values": other_values,
    "branch by rank": branch_by_rank,
    "skipped batch": on_rank_1(lambda run, model, _: None if run.steps == 2 else True),
    "skipped step": on_rank_1(lambda run, model, _: run.steps != 2),
    "learning rate": on_rank_1(raise_rate),
    "changed parameter": on_rank_1(change_parameter),
    "token means": token_means,
    "other data": other_data,
    "evaluated": evaluated,
    "two models": two_models,
    "kept tensors": kept_tensors,
    "kept function": kept_function,
    "damaged": damaged,
    "full disk": full_disk,
    "failed upload": failed_upload,
    "changed parameter, compared": compare_always(on_rank_1(change_parameter)),
}


def play(say: Say, module: str, folder: Path) -> None:
    """Run the cases of a module; what each rank returns becomes a file."""
    known: dict[str, Case] = import_module(module).CASES
    warnings.simplefilter("default")  # as in a script
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    faulthandler.dump_traceback_later(START_S - 20, exit=True)  # before the test gives up
    for name, case in known.items():
        found = case(folder / name.replace(" ", "-").replace(",", ""))
        (folder / f"{name}.{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
