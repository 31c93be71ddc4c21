"""Measures tuning, diagnosis and checkpoints on one GPU, in less than eight minutes.

    python benchmarks/gpu/train.py            # on a GPU
    python benchmarks/gpu/train.py --smoke    # tiny models, to try the script on a CPU

It needs PyTorch, but no network, Grain or data.

Targets on an H200: tuned ResNet-50 at batch size 128, at least 6,500 images/s; tuned GPT-2 124M at
batch size 8, at least 320 sequences/s; from a notice to a durable checkpoint of 1.1 billion
parameters with AdamW's state, less than 15 s.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cavvy import train
from cavvy.capabilities.tuning.diagnose import Diagnoser
from cavvy.capabilities.tuning.session import ScriptError, TuningSession
from cavvy.capabilities.tuning.tune import PlanTuner

SCRIPT = str(Path(__file__).with_name("train_script.py"))
LONGEST_S = 400  # parts that have not begun after this many seconds are skipped and listed
BEGAN = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--only", choices=("resnet50", "gpt2"), help="this model alone")
    given = parser.parse_args()
    small = given.smoke
    print(f"{'what':34} {'measured':>24}   bar", flush=True)
    save(small)
    for name, fault, bar in (
        ("resnet50", "", "no pinning, fp32"),
        ("gpt2", "sync", "python-bound"),
    ):
        if given.only in (None, name):
            attempt(f"causes in {name} {fault}", diagnose, name, fault, small, bar)
    for name, bar in (("resnet50", ">= 6500 images/s"), ("gpt2", ">= 320 sequences/s")):
        if given.only in (None, name):
            attempt(f"tune {name} from fp32", tune, name, small, bar)
    print(f"{time.monotonic() - BEGAN:.0f} s in all")


def attempt(title: str, work: Any, *given: Any) -> None:
    if time.monotonic() - BEGAN > LONGEST_S:
        print(f"{title:34} {'left out: no time':>24}", flush=True)
        return
    try:
        work(title, *given)
    except ScriptError as error:
        print(f"{title:34} {'failed':>24}   {error}", flush=True)


def diagnose(title: str, name: str, fault: str, small: bool, bar: str) -> None:
    with TuningSession(SCRIPT, [name, "small" if small else "whole", fault]) as session:
        found = Diagnoser(session, steps=6, rounds=2 if small else 4).diagnose()
    causes = (
        ", ".join(f"{each.cause} {each.lost_s * 1e3:.1f} ms" for each in found.findings) or "none"
    )
    print(f"{title:34} {causes:>24}   {bar}", flush=True)


def tune(title: str, name: str, small: bool, bar: str) -> None:
    tuner = PlanTuner(
        SCRIPT,
        [name, "small" if small else "whole"],
        pairs=2 if small else 4,
        steps=6,
        numerics=True,
    )
    for trial in tuner.run():
        change = " ".join(f"{key}={value}" for key, value in trial.change.items())
        print(
            f"  {'kept' if trial.kept else 'reverted':9} {change:22} {trial.after_s * 1e3:21.2f} "
            f"ms {trial.error}",
            flush=True,
        )
        if time.monotonic() - BEGAN > LONGEST_S:
            print("  no time for more")
            break
    batch = tuner.facts["global_batch"]
    print(
        f"{title:34} {batch / tuner.before_s:9,.0f} -> {batch / tuner.after_s:8,.0f}/s   {bar}",
        flush=True,
    )


def save(small: bool) -> None:
    """Measure the time from a notice until a large AdamW state is on disk, including the current
    step.
    """
    width, layers = (64, 2) if small else (2048, 262)
    folder = tempfile.mkdtemp(prefix="cavvy-bench-")
    run = train.Run(folder, plan=train.Plan(micro_batch=1), save_every=1e9)
    model = run.model(lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-4)
    data = run.data(train.Tensors(torch.randn(64, width)), global_batch=1)
    count = sum(each.numel() for each in model.parameters())
    begun = 0.0
    for number, batch in enumerate(run.batches(data, epochs=1)):
        run.accumulate(lambda part: model(part[0]).square().mean(), batch)
        if number == 3:
            run.world.device.synchronize()
            begun = time.monotonic()
        run.step(optimizer)
        if number == 3:
            run.save(wait=True)
            break
    seconds = time.monotonic() - begun
    run.close()
    print(
        f"{f'notice to durable, {count / 1e9:.2f} G parameters':34} {seconds:22.1f} s   < 15 s",
        flush=True,
    )
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
