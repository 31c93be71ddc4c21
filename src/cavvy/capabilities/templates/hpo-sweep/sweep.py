"""Starts many trials, stops the trials that fall behind, and reports the best trial.

    python sweep.py --trials 8

Each trial is a separate job (`cavvy run task.yaml --param ...`), which runs as soon as capacity is
free. After 2, 4, 8, ... passes, a trial is stopped if its accuracy is below the median of the other
trials after the same number of passes. Start the sweep again with the same --name to continue with
the existing trials.
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import time
from pathlib import Path

TASK = str(Path(__file__).with_name("task.yaml"))
FEW = 3  # A trial is stopped after a pass only if at least this many trials have reached the pass.


def cavvy(*arguments: str) -> str:
    ran = subprocess.run(["cavvy", *arguments], capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"cavvy {' '.join(arguments)}: {ran.stderr.strip()}")
    return ran.stdout


def phases() -> dict[str, str]:
    return {job["name"]: job["phase"] for job in json.loads(cavvy("ps", "--all", "-o", "json"))}


def passes(name: str) -> dict[int, float]:
    """Return the accuracy of a trial after each of its passes so far, read from its log."""
    found = re.findall(r"^pass (\d+): accuracy (\S+)", cavvy("logs", name), re.MULTILINE)
    return {int(number): float(value) for number, value in found}


def is_behind(mine: dict[int, float], others: list[dict[int, float]], rung: int) -> bool:
    """Return whether a trial's accuracy after `rung` passes is below the median accuracy of the
    other trials.
    """
    known = [other[rung] for other in others if rung in other]
    return rung in mine and len(known) >= FEW and mine[rung] < statistics.median(known)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--name", default="sweep")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    dice = random.Random(options.seed)
    trials = {}
    known = phases()
    for number in range(options.trials):
        name = f"{options.name}-{number}"
        trials[name] = {
            "lr": round(10 ** dice.uniform(-4.5, -1.5), 6),
            "width": dice.choice([4, 8, 16, 32]),
        }
        if name not in known:
            params = {**trials[name], "epochs": options.epochs}
            chosen = [
                text for key, value in params.items() for text in ("--param", f"{key}={value}")
            ]
            cavvy("run", TASK, "--detach", "--yes", "--name", name, *chosen)
            print(f"{name} submitted: {trials[name]}", flush=True)

    running, results = set(trials), {name: {} for name in trials}
    while running:
        time.sleep(1)
        now = phases()
        for name in sorted(running):
            phase = now[name]
            if phase == "queued":
                continue
            results[name] = passes(name)
            if phase in ("done", "failed", "stopped"):
                running.remove(name)
                print(
                    f"{name} {phase} after {len(results[name])} passes: {trials[name]}", flush=True
                )
                continue
            others = [result for other, result in results.items() if other != name]
            rung = 2 ** max(len(results[name]).bit_length() - 1, 1)
            if is_behind(results[name], others, rung):
                print(f"{name} is below the median after {rung} passes: stopped", flush=True)
                cavvy("stop", name)

    ends = {name: result[max(result)] for name, result in results.items() if result}
    if not ends:
        raise SystemExit("no trial reported its accuracy; `cavvy logs NAME` shows why")
    best = max(ends, key=ends.__getitem__)
    print(f"best: {best}, accuracy {ends[best]:.4f}, {trials[best]}")
    spent = sum(len(result) for result in results.values())
    print(
        f"{spent} passes in total, instead of {options.trials * options.epochs} without stopping "
        "any trial"
    )


if __name__ == "__main__":
    main()
