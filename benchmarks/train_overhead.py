"""Measures how much time `cavvy.train` and its tracking add to a step of 20 ms, and which part of
the total time saves take.

    python benchmarks/train_overhead.py

One process runs a loop written by hand and a loop of `cavvy.train`, with the same small model, data
and optimizer. It makes one step of each in turn, so that other work on the machine affects both.
The added time does not depend on the size of the model, so a small model shows it best. Two values
are compared: the fastest twentieth of the steps of each loop, which nothing interrupted, and the
median of the differences of all pairs, in processor time of the loop's thread. The time of tracking
is that of its listener, which works a little in each step and writes a row to a file about once a
second.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from cavvy import train
from cavvy.train.checkpoint.async_saver import SaveInterval
from cavvy.train.trackers import EVERY_S

PAIRS, ROWS, BATCH, WIDTH = 800, 4, 64, 64
STEP_S = 0.02


def main() -> None:
    torch.set_num_threads(1)
    x, y = torch.randn(8192, WIDTH), torch.randint(0, 10, (8192,))
    with tempfile.TemporaryDirectory() as folder:
        run = train.Run(folder, plan=train.Plan(), device="cpu", save_every=1e9)
        ours, theirs = loop_of_ours(run, x, y), loop_by_hand(x, y)
        for _ in range(20):
            spend(ours), spend(theirs)
        pairs = [(spend(ours), spend(theirs)) for _ in range(PAIRS)]
        begun = time.perf_counter()
        run.save()
        next(ours)
        stall = time.perf_counter() - begun
        run.keeper.store.wait()
        interval = SaveInterval(stall_s=stall, write_s=run.keeper.store.seconds)
        listening, row = track(run, ours, Path(folder, "rows"))
        run.close()
    by_hand = fastest([b for _, (b, _) in pairs])
    added = fastest([a for (a, _), _ in pairs]) - by_hand
    computed = median(a - b for (_, a), (_, b) in pairs)
    share, saving, tracking = (
        added / STEP_S,
        stall / interval.seconds,
        listening / STEP_S + row / EVERY_S,
    )
    print(f"a step by hand                 {by_hand * 1e3:7.2f} ms")
    print(
        f"added by cavvy.train          {added * 1e3:7.3f} ms   {share:.2%} of a step of 20 ms, "
        "bar 1 %"
    )
    print(f"  its processor time           {computed * 1e3:7.3f} ms   {computed / STEP_S:.2%}")
    rows = f"with a row of {row * 1e3:.2f} ms a second"
    print(f"added by tracking              {listening * 1e3:7.3f} ms   {tracking:.2%} {rows}")
    print(f"a save, with a step beside it  {stall * 1e3:7.2f} ms")
    print(
        f"chosen interval                {interval.seconds:7.1f} s    {saving:.2%} of the time, "
        "bar 1 %"
    )


def fastest(seconds: list[float]) -> float:
    """The slowest step of the fastest twentieth, in seconds."""
    return sorted(seconds)[len(seconds) // 20]


def spend(loop: Iterator[None]) -> tuple[float, float]:
    """Make the next step. Returns its seconds by the clock, and its processor seconds."""
    begun, cpu = time.perf_counter(), time.thread_time()
    next(loop)
    return time.perf_counter() - begun, time.thread_time() - cpu


class File:
    """A tracker that writes rows to a file."""

    def __init__(self, path: Path) -> None:
        self._file, self.rows = path.open("w"), 0

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self.rows += 1

    def close(self) -> None:
        self._file.close()


def track(run: train.Run, loop: Iterator[None], path: Path) -> tuple[float, float]:
    """The processor seconds that tracking takes in a step without a row, and in a step with one."""
    file = File(path)
    train.track(run, file)
    listener, quiet, rows = run.clock.listeners.pop(), [], []

    def hear(record: Any) -> None:
        before, cpu = file.rows, time.thread_time()
        listener(record)
        (quiet if file.rows == before else rows).append(time.thread_time() - cpu)

    run.clock.listeners.append(hear)
    while len(rows) <= ROWS:
        next(loop)
    return median(quiet), fmean(rows[1:])


def make_model() -> nn.Module:
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def loop_of_ours(run: train.Run, x: torch.Tensor, y: torch.Tensor) -> Iterator[None]:
    model = run.model(make_model)
    optimizer = run.optimizer(torch.optim.SGD, lr=1e-3)
    data = run.data(train.Tensors(x, y), global_batch=BATCH)
    for batch in run.batches(data, epochs=1000):
        value = run.accumulate(lambda part: F.cross_entropy(model(part[0]), part[1]), batch)
        run.step(optimizer)
        run.log(loss=value)
        yield


def loop_by_hand(x: torch.Tensor, y: torch.Tensor) -> Iterator[None]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    while True:
        order = torch.randperm(len(x))
        for first in range(0, len(x), BATCH):
            chosen = order[first : first + BATCH]
            loss = F.cross_entropy(model(x[chosen]), y[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


if __name__ == "__main__":
    main()
