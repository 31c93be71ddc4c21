"""A script for `profile` and `tune`: the name of its fault is its argument."""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from cavvy import train


def main(fault: str, passes: int = 1, after: str = "") -> None:
    torch.set_num_threads(1)
    run = train.Run(plan=train.Plan(threads=1), device="cpu", save_every=1e9)
    model = run.model(lambda: nn.Linear(8, 2))
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)

    def read(sample: Any) -> Any:
        time.sleep(0.005 if fault == "data" else 0)
        return sample

    samples = [(torch.full((8,), n / 8), n % 2) for n in range(32)]
    data = run.data(samples, global_batch=8, transform=read)

    def learn(epochs: int) -> None:
        for batch in run.batches(data, epochs=epochs):
            value = run.accumulate(lambda part: F.cross_entropy(model(part[0]), part[1]), batch)
            run.step(optimizer)
            if fault == "python":
                time.sleep(0.04)
            run.log(loss=value)

    if fault != "epoch":
        learn(1)
        return
    for number in range(passes):  # a loop of its own
        learn(number + 1)
        time.sleep(0.4)
    Path(after).touch()


if __name__ == "__main__":
    main(sys.argv[1], *(int(word) for word in sys.argv[2:3]), *sys.argv[3:])
