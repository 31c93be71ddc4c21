"""A small training script with one bottleneck in it, for `diagnosis.py`: DELAY is its name, MS its size."""

import argparse
import os
import threading
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from remuda import train
from remuda.train.parallel.reduce import Reducer

WIDTH, BATCH = 64, 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("delay")
    parser.add_argument("ms", type=float)
    said = parser.parse_args()
    name, seconds = said.delay, said.ms / 1e3
    torch.set_num_threads(1)
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    threads = {"few-threads": 1, "storage-bandwidth": 8, "decode": 8, "collate": 8}.get(name, 8)
    plan = train.Plan(threads=threads, prefetch=8, micro_batch=1 if name == "micro-batch" else 0)
    run = train.Run(plan=plan, device="cpu", save_every=2.0 if name == "checkpoint" else 1e9)
    if name == "checkpoint":
        run.keep("slow", Slow(seconds))
    model = run.model(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)))
    optimizer = run.optimizer(torch.optim.SGD, lr=1e-3)
    data = run.data(Samples(name, seconds), global_batch=BATCH * ranks, transform=Decode(name, seconds / BATCH))
    if name == "collective":
        slow_down(Reducer, seconds)

    def loss(part: Any) -> torch.Tensor:
        if name == "straggler" and rank == ranks - 1:
            _model_work(seconds)
        if name == "micro-batch":
            _model_work(seconds)
        if name == "batch":
            _model_work(seconds)
        if name == "python-in-loss":
            for _ in range(len(part[0])):
                time.sleep(seconds / BATCH)
        return F.cross_entropy(model(part[0]), part[1])

    for batch in run.batches(data, epochs=1):
        value = run.accumulate(loss, batch)
        run.step(optimizer)
        if name == "python-in-loop":
            spin(seconds)
        run.log(loss=value)


def _model_work(seconds: float) -> None:
    """As many small operations as take about so long: what a device that is fed too little waits for."""
    x, until = torch.ones(8), time.perf_counter() + seconds
    while time.perf_counter() < until:
        torch.cumsum(x.repeat(20_000), 0)


def spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


class Samples:
    """A thousand samples; of a disk that gives so many in a second, or by lists that join slowly."""

    def __init__(self, name: str, seconds: float) -> None:
        self._name, self._seconds, self._turn = name, seconds, threading.Lock()

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, number: int) -> Any:
        if self._name == "storage-bandwidth":
            with self._turn:
                time.sleep(self._seconds / BATCH)
        if self._name == "few-threads":
            time.sleep(self._seconds / BATCH)
        return torch.full((WIDTH,), number / 1024), number % 10


class Decode:
    """Takes the processor for as long as a sample's picture would, one at a time, as Python does."""

    _turn = threading.Lock()

    def __init__(self, name: str, seconds: float) -> None:
        self._name, self._seconds = name, seconds

    def __call__(self, sample: Any) -> Any:
        if self._name == "decode":
            with self._turn:
                time.sleep(self._seconds)
        return sample


class Slow:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def state_dict(self) -> dict[str, int]:
        time.sleep(self._seconds)
        return {"nothing": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def slow_down(reducer: Any, seconds: float) -> None:
    finish = reducer.finish

    def late(self: Any) -> None:
        time.sleep(seconds)
        finish(self)

    reducer.finish = late


if __name__ == "__main__":
    main()
