"""A small training script with one bottleneck, for `diagnosis.py`. The environment variable DELAY
names the bottleneck, and MS is its size in milliseconds.

A delay that simulates a rate (a disk, a decoder) follows a schedule, so that a late wake-up does
not lengthen it.
"""

import argparse
import ctypes
import io
import logging
import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data._utils.collate import default_collate_fn_map

from cavvy import train
from cavvy.train import run as runs
from cavvy.train.parallel.reduce import GradientReducer

WIDTH, BATCH = 64, 8
EVERY = 5  # number of steps between two saves or evaluations that the script itself makes
SELDOM = 20
# bottleneck -> (threads, workers) of the plan; the default is eight threads and no workers
READERS = {
    "few-threads": (1, 0),
    "one-worker": (1, 1),
    "storage-latency": (2, 0),
    "storage-in-workers": (1, 2),
    "late-data": (1, 0),
    "decode-in-main": (0, 0),
    "decode-cpu": (2, 0),
    "decode-in-workers": (1, 2),
}
SLOWED: dict[str, tuple[Any, str]] = {
    "collective": (GradientReducer, "finish"),
    "collective-in-backward": (dist, "all_reduce"),
    "collective-in-loop": (dist, "barrier"),
    "transfer": (runs, "move"),
}
log = logging.getLogger("diagnosis")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("delay")
    parser.add_argument("ms", type=float)
    said = parser.parse_args()
    name, seconds = said.delay, said.ms / 1e3
    torch.set_num_threads(1)
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    threads, workers = READERS.get(name, (8, 0))
    micro = 1 if name in ("micro-batch", "pass-in-python") else 0
    plan = train.Plan(threads=threads, workers=workers, prefetch=8, micro_batch=micro)
    run = train.Run(plan=plan, device="cpu", save_every=2.0 if name == "checkpoint" else 1e9)
    if name in ("checkpoint", "save-in-loop", "save-and-wait"):
        run.keep("slow", Slow(seconds))
    if name == "logging":
        log.addHandler(SlowHandler(seconds))
    late = Late(seconds if name == "python-in-forward" else 0)
    model = run.model(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), late, nn.Linear(WIDTH, 10))
    )
    optimizer = run.optimizer(
        SlowSGD if name == "python-in-optimizer" else torch.optim.SGD, lr=1e-3
    )
    data = run.data(
        Samples(name, seconds, rank),
        global_batch=BATCH * ranks,
        transform=Decode(name, seconds / BATCH),
    )
    if name in SLOWED:
        slow_down(*SLOWED[name], seconds)
    if name == "collate":
        default_collate_fn_map[Picture] = Collate(seconds)
    if name == "python-in-optimizer":
        SlowSGD.seconds = seconds

    is_late = rank == (0 if name in ("straggler-first", "straggler-barrier") else ranks - 1)

    def loss(part: Any) -> torch.Tensor:
        work_late(name, seconds, len(part[0]), is_late)
        return F.cross_entropy(model(part[0]), part[1])

    def learn(epochs: int) -> None:
        for batch in run.batches(data, epochs=epochs):
            value = run.accumulate(loss, batch)
            run.step(optimizer)
            between(name, seconds, run, is_late)
            run.log(loss=value)

    if name != "between-epochs":
        learn(1)
        return
    for epoch in range(1, 10):
        learn(epoch)
        time.sleep(seconds)


def between(name: str, seconds: float, run: train.Run, is_late: bool) -> None:
    """Simulate work that the training loop itself does between two steps."""
    if name == "python-in-loop":
        spin(seconds)
    if name.startswith("straggler-") and is_late:
        time.sleep(seconds)
    if name in ("straggler-barrier", "collective-in-loop"):
        dist.barrier()
    if name == "logging":
        log.warning("step %d", run.steps)
    if name == "metrics":
        count_slowly(seconds)
    if name == "evaluation" or (name == "evaluation-seldom" and run.steps % EVERY == 0):
        _model_work(seconds)
    if name == "save-by-hand":
        torch.save({"state": Written(seconds)}, io.BytesIO())
    if name in ("save-in-loop", "save-and-wait") and run.steps % EVERY == 0:
        run.save(wait=name == "save-and-wait")

    if run.steps % SELDOM == 0:
        seldom(name, seconds, run.world.is_first)


def seldom(name: str, seconds: float, is_first: bool) -> None:
    if name == "model-evaluated":
        evaluate(seconds)
    if name == "evaluated-first" and is_first:
        _model_work(seconds)
    if name == "saved-by-name":
        save_weights(seconds)


@torch.no_grad()
def evaluate(seconds: float) -> None:
    """Evaluate a model of a few layers on batches for about `seconds`."""
    model, until = (
        nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)),
        time.perf_counter() + seconds,
    )
    while time.perf_counter() < until:
        right = model(torch.ones(64, 256)).argmax(-1) == 0
        right.sum().item()


def save_weights(seconds: float) -> None:
    """Save the weights to a location that takes `seconds`."""
    time.sleep(seconds)


def work_late(name: str, seconds: float, samples: int, is_late: bool) -> None:
    """Simulate a forward and backward pass that takes longer than that of the small model."""
    if name in ("micro-batch", "batch") or (name == "straggler" and is_late):
        _model_work(seconds)
    if name in ("checkpoint", "save-in-loop", "save-and-wait", "save-by-hand", "logging"):
        _model_work(0.002 * samples)  # this step has no other bottleneck
    if name == "pass-in-python":
        time.sleep(seconds)
    if name == "python-holding":
        # PyDLL keeps Python's lock, so that no other thread runs during the sleep
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    if name == "tiny-operations":
        for _ in range(Tiny.count(seconds)):
            Tiny.values = Tiny.values + 1
    if name == "python-in-loss":
        for _ in range(samples):
            time.sleep(seconds / BATCH)


def _model_work(seconds: float) -> None:
    """Run small operations for about `seconds`, during which a device would be underused."""
    x, out, until = torch.ones(60_000), torch.empty(60_000), time.perf_counter() + seconds
    while time.perf_counter() < until:
        torch.cumsum(x, 0, out=out)


class Tiny:
    """Runs as many tiny operations as take this long without tracing."""

    values = torch.zeros(4)
    _each_s = 0.0

    @classmethod
    def count(cls, seconds: float) -> int:
        if not cls._each_s:
            begun = time.perf_counter()
            for _ in range(20_000):
                cls.values = cls.values + 1
            cls._each_s = (time.perf_counter() - begun) / 20_000
        return int(seconds / cls._each_s)


def spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def count_slowly(seconds: float) -> None:
    """Compute a metric slowly, value by value."""
    values, until = torch.ones(1000), time.perf_counter() + seconds
    while time.perf_counter() < until:
        for number in range(20):
            values[number].item()


class Rate:
    """Lets one thread pass each time this many seconds have passed. Unused time is lost."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._free, self._turn = seconds, 0.0, threading.Lock()

    def take(self) -> None:
        with self._turn:
            self._free = until = max(self._free, time.perf_counter()) + self._seconds
        time.sleep(max(until - time.perf_counter(), 0))


class Samples:
    """A thousand samples, from a simulated disk with a number of samples per second, or with a time
    for each sample.
    """

    def __init__(self, name: str, seconds: float, rank: int) -> None:
        self._name, self._seconds = name, seconds / BATCH
        self._is_late = name == "late-data" and rank == 1
        self._disk = Rate(self._seconds) if name == "storage-bandwidth" else None

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, number: int) -> Any:
        if self._disk is not None:
            self._disk.take()
        if self._is_late or self._name in ("few-threads", "storage-latency", "storage-in-workers"):
            time.sleep(self._seconds)
        values = torch.full((WIDTH,), number / 1024)
        return (Picture(values) if self._name == "collate" else values), number % 10


class Picture:
    """A sample that is not a tensor and is joined to batches by its own function."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


class Collate:
    """Joins samples to a batch, with a delay for each sample. Makes one batch at a time."""

    def __init__(self, seconds: float) -> None:
        self._processor = Rate(seconds)

    def __call__(self, batch: list[Picture], *, collate_fn_map: Any = None) -> torch.Tensor:
        self._processor.take()
        return torch.stack([each.values for each in batch])


class Decode:
    """Simulates decoding a picture. Like Python code, it decodes one picture at a time."""

    def __init__(self, name: str, seconds: float) -> None:
        self._name, self._seconds = name, seconds
        self._processor = Rate(seconds) if name == "decode" else None

    def __call__(self, sample: Any) -> Any:
        if self._processor is not None:
            self._processor.take()
        if self._name == "one-worker":
            time.sleep(self._seconds)
        if self._name in ("decode-in-main", "decode-cpu", "decode-in-workers"):
            compute(self._seconds)
        return sample


def compute(seconds: float) -> None:
    """Use `seconds` of this thread's processor time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Late(nn.Module):
    """A layer that processes its batch in a Python loop."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        spin(self._seconds)
        return values


class SlowSGD(torch.optim.SGD):
    seconds = 0.0

    def step(self, closure: Any = None) -> Any:
        spin(self.seconds)
        return super().step(closure)


class SlowHandler(logging.Handler):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def emit(self, record: logging.LogRecord) -> None:
        time.sleep(self._seconds)


class Written:
    """An object that takes this long to save."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __reduce__(self) -> Any:
        time.sleep(self._seconds)
        return Written, (self._seconds,)


class Slow:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def state_dict(self) -> dict[str, int]:
        time.sleep(self._seconds)
        return {"nothing": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def slow_down(where: Any, name: str, seconds: float) -> None:
    work = getattr(where, name)

    def late(*given: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return work(*given, **options)

    setattr(where, name, late)


if __name__ == "__main__":
    main()
