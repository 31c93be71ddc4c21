"""Measures how long an asynchronous save of 384 MiB blocks a training loop, compared with a
synchronous save.

    python benchmarks/train_save.py

A model of 32 Mi parameters with AdamW has a state of 384 MiB (weights and two moments, fp32). A
step takes at least 200 ms, most of which is spent waiting, as with an accelerator. The blocked time
is that of the call plus that of the wait before the next update. The first save, which allocates
the buffers, is reported separately.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from cavvy import train

STEP_S, SAVES, BAR_MS = 0.2, 9, 60.0


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, *rest = save_asynchronously(Path(folder) / "run")
        plain = save_plainly(Path(folder))
    print(f"{'384 MiB':28} {'median':>9} {'worst':>9}")
    for name, seconds in (
        ("blocking, asynchronous", rest),
        ("the first one", [first]),
        ("torch.save and fsync", plain),
    ):
        print(f"{name:28} {statistics.median(seconds) * 1e3:6.0f} ms {max(seconds) * 1e3:6.0f} ms")
    print(f"the bar is {BAR_MS:.0f} ms")


def save_asynchronously(folder: Path) -> list[float]:
    run = train.Run(folder, plan=train.Plan(), device="cpu", save_every=1e9)
    model = run.model(make_model)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-6)
    data = run.data(train.Tensors(torch.randn(4096, 1)), global_batch=1, shuffle=False)
    waits: list[float] = []  # the blocked seconds of each step
    run.clock.listeners.append(lambda record: waits.append(record.parts["checkpoint"]))
    saved: list[int] = []  # the numbers of the steps with a save
    for batch in run.batches(data, epochs=1):
        run.accumulate(lambda part: sum_of(model) * part[0].mean() * 1e-9, batch)
        time.sleep(STEP_S)
        run.step(optimizer)
        if run.keeper.store.is_busy or run.steps < 3:
            continue
        if len(saved) == SAVES:
            break
        saved.append(run.steps - 1)
        run.save()
    run.close()
    return [waits[step] + waits[step + 1] for step in saved]


def save_plainly(folder: Path) -> list[float]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    sum_of(model).backward()
    optimizer.step()
    took = []
    for number in range(3):
        begun = time.perf_counter()
        with (folder / f"plain-{number}").open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        took.append(time.perf_counter() - begun)
    return took


def make_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(2048, 1024, bias=False) for _ in range(16)))


def sum_of(model: nn.Module) -> torch.Tensor:
    return torch.stack([p.sum() for p in model.parameters()]).sum()


if __name__ == "__main__":
    main()
