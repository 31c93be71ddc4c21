"""A script for torchrun --max-restarts: rank 1 fails in the first attempt."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

from cavvy import train
from cavvy.train import world

STEPS, SAVED, FAILS = 6, 2, 3


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(4, 1)


def make_samples() -> torch.Tensor:
    return torch.arange(160.0).reshape(40, 4) / 100


def main(folder: Path) -> None:
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    world.GRACE_S = 0.5
    run = train.Run(folder / "checkpoints", plan=train.Plan(), device="cpu", save_every=1e9)
    model = run.model(make_model)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    data = run.data(train.Tensors(make_samples()), global_batch=4)
    is_resumed, first = run.resume(), run.steps
    for batch in run.batches(data, epochs=STEPS * 4 / 40):
        run.accumulate(lambda part: model(part[0]).square().mean(), batch)
        run.step(optimizer)
        if attempt == 1 and run.steps == FAILS:
            time.sleep(4 * world.POLL_S)  # an earlier failure would end the rank meanwhile
        if run.steps == SAVED:
            run.save(wait=True)
        if (attempt, rank, run.steps) == (0, 1, FAILS):
            raise KeyError("planted")
    result = [is_resumed, first, run.steps, [each.tolist() for each in model.parameters()]]
    (folder / f"{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
