"""Loops that differ from the documented one: cases that run as those of `cases.py` do."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.train.cases import Branches, Case, start
from tests.train.programs import CLASSES, WIDTH, Normed, Say, digest, make_samples
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DistributedSampler

from cavvy import train
from cavvy.train import seeds

Loop = Callable[[train.Run, Any, Any, train.Data], Iterator[Any]]


class One(nn.Module):
    """The first branch of `Branches`."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, CLASSES)


def mean(model: Any) -> Any:
    return lambda part: F.cross_entropy(model(part[0]), part[1])


def learn(folder: Path, loop: Loop, notice: int, build: Any, source: Any) -> list[Any]:
    """What a loop learns: the digest of the model, the number of steps and the position. `loop`
    yields for each batch; with `notice`, each rank gets a notice at this batch, and the loop runs
    again.
    """
    for stop in {notice: None, 0: None}:
        run, model, optimizer, data = start(folder, build)
        run.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)
        data = data if source is None else run.data(source, global_batch=24)
        try:
            run.resume()
            for number, _ in enumerate(loop(run, model, optimizer, data), 1):
                if number == stop:
                    os.kill(os.getpid(), signal.SIGTERM)
            return [digest(model), run.steps, data.position]
        except SystemExit:
            assert stop
        finally:
            run.close()
    return []


def resumed(loop: Loop, build: Any = Normed, source: Any = None) -> Case:
    """What a loop learns without a notice, and with a notice at the third batch."""

    def case(folder: Path) -> Any:
        return [learn(folder / str(notice), loop, notice, build, source) for notice in (0, 3)]

    return case


class Noisy:
    """A data set with noise from the global generators, as many transforms of images have it."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> Any:
        x, y, _ = make_samples()
        noise = torch.randn(()) + random.random() + np.random.rand()
        return x[index] + noise, y[index]


def two_batches_a_step(run: train.Run, model: Any, optimizer: Any, data: train.Data) -> Any:
    """An epoch has five batches, so one step uses batches of both epochs."""
    number = data.position // data.global_batch
    for epoch in (1, 2):
        for batch in run.batches(data, epochs=epoch):
            number += 1
            run.accumulate(mean(model), batch)
            if number % 2 == 0:
                run.step(optimizer)
            yield


def skip_batches(run: train.Run, model: Any, optimizer: Any, data: train.Data) -> Any:
    number = data.position // data.global_batch
    for batch in run.batches(data, epochs=2):
        number += 1
        if number % 3:
            run.accumulate(mean(model), batch)
            run.step(optimizer)
        yield


def learn_plainly(run: train.Run, model: Any, optimizer: Any, data: train.Data) -> Any:
    for batch in run.batches(data, epochs=2):
        run.accumulate(mean(model), batch)
        run.step(optimizer)
        yield


def thaw(run: train.Run, model: Any, optimizer: Any, data: train.Data) -> Any:
    """The first layer is trained from the second step on."""
    for batch in run.batches(data, epochs=2):
        model.one.requires_grad_(run.steps > 0)
        run.accumulate(mean(model), batch)
        run.step(optimizer)
        yield


def frozen() -> Normed:
    made = Normed()
    made.one.requires_grad_(False)
    return made


def step_later(run: train.Run, model: Any, optimizer: Any, data: train.Data) -> Any:
    """The second optimizer begins after the notice."""
    for batch in run.batches(data, epochs=2):
        run.accumulate(mean(model), batch)
        run.step(*(run.optimizers if run.steps > 4 else [optimizer]))
        yield


def mix_samples(run: train.Run, model: Any, optimizer: Any, data: train.Data) -> Any:
    """The loop itself draws random numbers, before the loss function does."""
    for x, y in run.batches(data, epochs=2):
        share = torch.rand(()) + random.random() + np.random.rand()
        run.accumulate(mean(model), (x + share * x.flip(0), y))
        run.step(optimizer)
        yield


def name_error(act: Callable[[], Any]) -> str:
    try:
        return str(act())
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)


def refused(folder: Path) -> list[str]:
    """What a run would otherwise ignore in silence."""
    run, model, _, data = start(folder)
    x = make_samples()[0]
    schedule = run.keep("schedule", torch.optim.lr_scheduler.StepLR(run.optimizers[0], 1))
    foreign = torch.optim.SGD(model.parameters(), lr=0.1)
    found = [
        name_error(lambda: run.data(train.Tensors(x), global_batch=8, shufle=False)),
        name_error(lambda: run.keep("schedule", foreign)),
        name_error(lambda: run.step()),
        name_error(lambda: run.step(foreign)),
        name_error(lambda: next(run.batches(data, epochs=0.1))),
    ]
    run.keep("schedule", schedule)
    run.resume()
    found += [
        name_error(lambda: run.keep("late", schedule)),
        name_error(lambda: run.optimizer(torch.optim.SGD, lr=0.1)),
        name_error(lambda: run.data(train.Tensors(x), global_batch=8)),
    ]
    batch = next(batches := run.batches(data, epochs=1))
    found.append(name_error(lambda: run.accumulate(lambda x, y: model(x).sum(), batch)))
    del batches
    run.close()
    return found


def fp16_optimizers(folder: Path) -> Any:
    """Two optimizers step in one call, or in two; the first losses overflow."""
    found = []
    for at_once in (True, False):
        run, model, _, data = start(folder / str(at_once), plan=train.Plan(precision="fp16"))
        pair = [
            run.optimizer(torch.optim.SGD, m.parameters(), lr=0.1) for m in (model.one, model.two)
        ]
        for x, y in run.batches(data, epochs=2):
            loss = lambda x, y, m=model: F.cross_entropy(m(x) + m(x, 1), y)  # noqa: E731
            run.accumulate(loss, (100 * x, y))
            for group in [pair] if at_once else [[each] for each in pair]:
                run.step(*group)
        found.append(digest(model))
        run.close()
    return found[0] == found[1]


def other_orders(folder: Path) -> list[str]:
    """The ranks would read other samples: by their sampler, data or epochs."""
    found = []
    for kind in ("sampler", "data", "epochs"):
        run, *_ = start(folder / kind)
        rank, source = run.world.rank, train.Tensors(*make_samples())
        if kind == "data":
            source = train.Tensors(*(each[: 120 - 24 * rank] for each in make_samples()))
        sampler = DistributedSampler(source, 2, rank) if kind == "sampler" else None
        data = run.data(source, global_batch=24, sampler=sampler)
        epochs = 1 + rank if kind == "epochs" else 1
        found.append(name_error(lambda: next(run.batches(data, epochs=epochs))))  # noqa: B023
        run.close()
    return found


def lost_tensors(folder: Path) -> list[str]:
    """The script that resumes has fewer parameters, or its optimizer has fewer parameters."""
    found = []
    for build, name in ((Branches, ""), (One, ""), (Branches, "two")):
        run = train.Run(folder, plan=train.Plan(), device="cpu", save_every=1e9, seed=3)
        model = run.model(build)
        run.optimizer(torch.optim.AdamW, model.get_submodule(name).parameters(), lr=0.1)
        try:
            found.append(str(run.resume()))
            loss = F.cross_entropy(model(torch.ones(1, WIDTH)), torch.ones(1, dtype=torch.long))
            loss.backward()
            run.optimizers[0].step()
            run.save(wait=True)
        except ValueError as error:
            found.append(str(error))
        finally:
            run.close()
    return found


def skipped_between(folder: Path) -> float:
    """A step uses batches 1 and 3; all ranks skip batch 2. Returns the largest difference of the
    parameters to a plain loop.
    """
    run, model, _, data = start(folder)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    for number, batch in enumerate(run.batches(data, epochs=0.6), 1):
        if number != 2:
            run.accumulate(mean(model), batch)
        if number == 3:
            run.step(optimizer)
    run.close()
    seeds.sow(seeds.mix(3, 0))
    plain = Branches()
    stepper = torch.optim.SGD(plain.parameters(), lr=0.1)
    x, y, _ = make_samples()
    for number in (0, 2):
        chosen = data.indices(range(24 * number, 24 * number + 24))
        mean(plain)((x[chosen], y[chosen])).backward()
    stepper.step()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def two_data_sets(folder: Path) -> Any:
    """Each step uses a batch of each data set, in two attempts. Returns the samples of both."""
    seen: list[Any] = []
    for stop in (3, 5):
        run, model, optimizer, data = start(folder, Normed)
        x, y, numbers = make_samples()
        other = run.data(train.Tensors(x, y, numbers), global_batch=24)
        for one, two in zip(run.batches(data, epochs=1), run.batches(other, epochs=1), strict=True):
            run.accumulate(mean(model), one)
            run.accumulate(mean(model), two)
            run.step(optimizer)
            seen += chain(*run.world.gather([len(one[1]), *two[2].tolist()]))
            if run.steps == stop:
                run.save(wait=True)
                break
        run.close()
    return sorted(seen)


def lonely(say: Say) -> None:
    """A loop of one rank that does not call `run.accumulate`, and gets a notice in step 2."""
    run, model, optimizer, data = start("checkpoints")
    for batch in run.batches(data, epochs=1):
        mean(model)(batch).backward()
        run.step(optimizer)
        say(run.steps)
        if run.steps == 2:
            os.kill(os.getpid(), signal.SIGTERM)


CASES: dict[str, Case] = {
    "two batches a step": resumed(two_batches_a_step),
    "skipped batches": resumed(skip_batches),
    "unused parameters": resumed(learn_plainly, Branches),
    "parameters that are thawed": resumed(thaw, frozen),
    "an optimizer that steps later": resumed(step_later),
    "random numbers of the loop": resumed(mix_samples),
    "random numbers of the data": resumed(learn_plainly, source=Noisy()),
    "refused": refused,
    "fp16 optimizers": fp16_optimizers,
    "other orders": other_orders,
    "lost tensors": lost_tensors,
    "skipped between": skipped_between,
    "two data sets": two_data_sets,
}
