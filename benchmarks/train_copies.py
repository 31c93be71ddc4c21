"""Measures what two mechanisms of `cavvy.train` bring on this machine's CPU and disk.

    python benchmarks/train_copies.py

The first table compares saves of 384 MiB that one, two and four threads write. The second compares
`foreach` copies of gradients into a bucket with one copy for each tensor. Each figure is the median
of several runs, which alternate between the ways that are compared.
"""

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from cavvy import train
from cavvy.train.checkpoint import store
from cavvy.train.parallel.reduce import GradientBucket

SAVES, COPIES = 7, 200
LAYERS = {"160 biases of 256 numbers": (160, 256), "160 matrices of 16,384": (160, 16384)}


def main() -> None:
    print(f"torch uses {torch.get_num_threads()} CPU threads\n")
    print("| threads that write 384 MiB | until durable |\n|--:|--:|")
    for threads, seconds in time_saves().items():
        print(f"| {threads} | {statistics.median(seconds) * 1e3:.0f} ms |", flush=True)
    print("\n| gradients | one copy each | foreach |\n|---|--:|--:|")
    for name, (count, size) in LAYERS.items():
        each, together = (statistics.median(found) * 1e6 for found in time_copies(count, size))
        print(f"| {name} | {each:.0f} us | {together:.0f} us |")


def time_saves() -> dict[int, list[float]]:
    """The seconds of saves until they are durable, by the number of threads. The first save of a
    run is not counted, because it allocates the buffers.
    """
    found: dict[int, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        run = train.Run(Path(folder) / "run", plan=train.Plan(), device="cpu", save_every=1e9)
        run.model(lambda: nn.Sequential(*(nn.Linear(2048, 1024, bias=False) for _ in range(48))))
        run.optimizer(torch.optim.SGD, lr=1e-6)
        run.save(wait=True)
        for _ in range(SAVES):
            for threads in (1, 2, 4):
                store.MOST_THREADS = threads
                run.keeper.store.safe_step = None
                (newest,) = (Path(folder) / "run").glob("step-*")
                (newest / store.MARK).unlink()  # so that the same step is written again
                begun = time.perf_counter()
                run.save(wait=True)
                found[threads].append(time.perf_counter() - begun)
        run.close()
    return found


def time_copies(count: int, size: int) -> tuple[list[float], list[float]]:
    """The seconds of copying gradients to a bucket: one copy for each, and as the library does."""
    parameters = [nn.Parameter(torch.zeros(size)) for _ in range(count)]
    for each in parameters:
        each.grad = torch.ones(size)
    bucket = GradientBucket(parameters)

    def copy_each() -> None:
        bucket.used.fill_(1)
        for view, parameter in zip(bucket.views, parameters, strict=True):
            assert parameter.grad is not None
            view.copy_(parameter.grad)

    pairs = [(_timed(copy_each), _timed(bucket.fill)) for _ in range(COPIES)]
    return [a for a, _ in pairs], [b for _, b in pairs]


def _timed(act: Callable[[], None]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
