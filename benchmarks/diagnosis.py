"""Checks whether `cavvy profile` finds the cause and the cost of bottlenecks that are known delays.

    python benchmarks/diagnosis.py [--held-out | --later | --all] [NAME[=MS] ...]
    # by default the first table below

Each row of a table is a run of `diagnosis_script.py` with one delay. The true cost follows from the
delay and from how late this machine wakes a sleeping thread. The targets are: the right cause is
first in 18 of 20 runs, and its dollars are within 10 %. A save has a cost besides its delay, so its
delays are much longer than this cost. The cost of forward and backward passes without a delay is
measured. The method was improved with the help of these tables, so they do not predict its results
on other scripts.
"""

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

from cavvy.capabilities.tuning.diagnose import Diagnoser
from cavvy.capabilities.tuning.session import ScriptError, TuningSession

PRICE = 2.99
# (delay, milliseconds in each step, ranks, expected cause)
PLANTED = [
    ("few-threads", 40, 1, "too few workers"),
    ("few-threads", 80, 1, "too few workers"),
    ("storage-bandwidth", 40, 1, "slow storage"),
    ("storage-bandwidth", 80, 1, "slow storage"),
    ("storage-bandwidth", 160, 1, "slow storage"),
    ("one-worker", 80, 1, "too few workers"),
    ("decode", 40, 1, "slow decode"),
    ("decode", 80, 1, "slow decode"),
    ("decode", 160, 1, "slow decode"),
    ("python-in-loop", 10, 1, "python-bound loop"),
    ("python-in-loop", 40, 1, "python-bound loop"),
    ("python-in-loss", 20, 1, "python-bound loop"),
    ("python-in-loss", 60, 1, "python-bound loop"),
    ("batch", 30, 1, "tiny batch"),
    ("batch", 60, 1, "tiny batch"),
    ("micro-batch", 5, 1, "tiny micro-batch"),
    ("micro-batch", 10, 1, "tiny micro-batch"),
    ("checkpoint", 400, 1, "slow checkpoint"),
    ("checkpoint", 800, 1, "slow checkpoint"),
    ("save-in-loop", 120, 1, "slow checkpoint"),
    ("transfer", 25, 1, "host-device copies"),
    ("collective", 20, 2, "slow collective"),
    ("collective", 60, 2, "slow collective"),
    ("straggler", 30, 2, "straggler rank"),
    ("straggler", 80, 2, "straggler rank"),
    ("straggler-own", 50, 2, "straggler rank"),
]


HELD_OUT = [
    ("storage-latency", 40, 1, "slow storage"),
    ("storage-latency", 300, 1, "slow storage"),
    ("storage-in-workers", 80, 1, "slow storage"),
    ("storage-bandwidth", 10, 1, "slow storage"),
    ("decode-cpu", 60, 1, "slow decode"),
    ("decode-in-main", 30, 1, "slow decode"),
    ("decode-in-workers", 120, 1, "slow decode"),
    ("decode", 400, 1, "slow decode"),
    ("collate", 40, 1, "slow collation"),
    ("python-in-loop", 5, 1, "python-bound loop"),
    ("python-in-loop", 120, 1, "python-bound loop"),
    ("python-in-forward", 15, 1, "python-bound loop"),
    ("python-in-optimizer", 25, 1, "python-bound loop"),
    ("metrics", 20, 1, "python-bound loop"),
    ("logging", 8, 1, "python-bound loop"),
    ("evaluation", 25, 1, "work between steps"),
    ("evaluation-seldom", 100, 1, "work between steps"),
    ("batch", 100, 1, "tiny batch"),
    ("micro-batch", 25, 1, "tiny micro-batch"),
    ("pass-in-python", 6, 1, "tiny micro-batch"),
    ("transfer", 6, 1, "host-device copies"),
    ("checkpoint", 150, 1, "slow checkpoint"),
    ("save-and-wait", 400, 1, "slow checkpoint"),
    ("save-by-hand", 20, 1, "slow checkpoint"),
    ("collective", 6, 2, "slow collective"),
    ("collective-in-backward", 25, 2, "slow collective"),
    ("straggler-first", 40, 2, "straggler rank"),
    ("straggler-barrier", 40, 2, "straggler rank"),
]
LATER = [
    ("python-holding", 40, 1, "python-bound loop"),
    ("tiny-operations", 15, 1, "python-bound loop"),
    ("model-evaluated", 400, 1, "work between steps"),
    ("evaluated-first", 400, 2, "work between steps"),
    ("saved-by-name", 400, 1, "slow checkpoint"),
    ("late-data", 40, 2, "straggler rank"),
    ("collective-in-loop", 20, 2, "slow collective"),
    ("between-epochs", 4000, 1, "work between epochs"),
]
TABLES = {"planted": PLANTED, "held out": HELD_OUT, "later": LATER}
Row = tuple[str, float, int, str]
SCRIPT = str(Path(__file__).with_name("diagnosis_script.py"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--held-out", action="store_true", help="the second table instead of the first"
    )
    parser.add_argument("--later", action="store_true", help="the third one")
    parser.add_argument("--all", action="store_true", help="all of them")
    parser.add_argument("rows", nargs="*", metavar="NAME[=MS]")
    said = parser.parse_args()
    begun = time.monotonic()
    print(
        f"{'planted':34} {'first cause':20} {'ms lost':>8} {'expected':>8} {'off':>6} "
        f"{'$ an epoch':>11}",
        flush=True,
    )
    chosen = "held out" if said.held_out else "later" if said.later else "planted"
    if said.rows:
        tell("chosen", choose(said.rows))
    for title, table in TABLES.items():
        if not said.rows and (said.all or title == chosen):
            tell(title, [(name, float(ms), ranks, cause) for name, ms, ranks, cause in table])
    print(f"{time.monotonic() - begun:.0f} s in all")


def tell(title: str, rows: list[Row]) -> None:
    """Run all rows of a table. Prints a line for each row, and the counts at the end."""
    right = close = 0
    for name, ms, ranks, cause in rows:
        row = f"{name + f' {ms:g} ms x{ranks}':34}"
        try:
            first, lost, expected, dollars = diagnose(name, ms, ranks)
        except ScriptError as error:
            print(f"{row} {error}", flush=True)
            continue
        off = abs(lost / expected - 1) if expected else 1.0
        right += first == cause
        close += first == cause and off <= 0.1
        wrong = "" if first == cause else f"   wrong: {cause}"
        numbers = f"{lost * 1e3:8.1f} {expected * 1e3:8.1f} {off:6.1%} {dollars:11.3g}"
        print(f"{row} {first:20} {numbers}{wrong}", flush=True)
    print(
        f"{title}: right cause first in {right} of {len(rows)}; of these, dollars within 10 % in "
        f"{close}",
        flush=True,
    )


def choose(wanted: list[str]) -> list[Row]:
    """The requested rows of all tables, with other delays if the arguments state them."""
    tables = PLANTED + HELD_OUT + LATER
    kinds = {name: (ranks, cause) for name, _, ranks, cause in tables}
    chosen: list[Row] = []
    for name, _, said in (each.partition("=") for each in wanted):
        if name not in kinds or not (said or "0").replace(".", "", 1).isdigit():
            raise SystemExit(
                f"{name}={said}: expected one of {', '.join(kinds)}, with one number of "
                "milliseconds"
            )
        sizes = [float(said)] if said else [float(ms) for each, ms, _, _ in tables if each == name]
        chosen += [(name, ms, *kinds[name]) for ms in sizes]
    return chosen


def diagnose(name: str, ms: float, ranks: int) -> tuple[str, float, float, float]:
    """Run one row. Returns the first cause, its reported and its true seconds per step, and its
    dollars per epoch.
    """
    with TuningSession(SCRIPT, [name, str(ms)], ranks=ranks) as session:
        found = Diagnoser(session, patience_s=10).diagnose()
    base = median(found.seconds["cached"])
    expected = expect(name, ms / 1e3, base, found.step_s) + (time_passes() if name in PASSES else 0)
    if not found.findings:
        return "nothing", 0.0, expected, 0.0
    first = found.findings[0]
    return first.cause, first.lost_s, expected, found.dollars(first.lost_s, PRICE)


# The true cost of a delay. Data that is read during the computation costs only the time by which
# the reading is longer. Bottleneck -> the number of readers at the same time:
BY_BATCH = {"storage-bandwidth": 1, "decode": 1, "collate": 1, "decode-in-workers": 2}
BY_SAMPLE = {
    "few-threads": 1,
    "one-worker": 1,
    "storage-latency": 2,
    "storage-in-workers": 2,
    "late-data": 1,
}
SLEEPS = {
    "checkpoint",
    "save-in-loop",
    "save-and-wait",
    "save-by-hand",
    "collective",
    "collective-in-backward",
    "transfer",
    "logging",
    "pass-in-python",
    "straggler-own",
    "straggler-first",
    "straggler-barrier",
    "saved-by-name",
    "collective-in-loop",
    "late-data",
    "between-epochs",
}
# bottleneck -> how often its delay occurs in a step: for each pass after the first, once in five
# steps, or for each sum of gradients and each value on which ranks agree
TIMES = {
    "micro-batch": 7,
    "pass-in-python": 7,
    "save-in-loop": 0.2,
    "save-and-wait": 0.2,
    "evaluation-seldom": 0.2,
    "collective-in-backward": 2,
    "model-evaluated": 0.05,
    "evaluated-first": 0.05,
    "saved-by-name": 0.05,
    "between-epochs": 1 / 128,
}
PASSES = ("micro-batch", "pass-in-python")


def time_passes() -> float:
    """The seconds by which one pass per sample takes longer than one pass for all samples, without
    a delay.
    """
    more = []
    with (
        TuningSession(SCRIPT, [PASSES[0], "0"]) as many,
        TuningSession(SCRIPT, ["batch", "0"]) as one,
    ):
        for _ in range(20):
            each, both = (measure(session) for session in (many, one))
            more.append(each - both)
    return median(more)


def measure(session: TuningSession) -> float:
    told: list[dict[str, Any]] = session.measure("cached", steps=20, skip=5)
    return float(median(told[0]["steps"]))


def expect(name: str, seconds: float, base: float, step: float) -> float:
    """The seconds per step that a delay costs. `base` is the time of a step without reading data,
    and `step` the time of a whole step.
    """
    if name in BY_BATCH:
        return seconds / BY_BATCH[name] - base
    if name in BY_SAMPLE:
        return 8 * oversleep(seconds / 8) / BY_SAMPLE[name] - base
    if name == "python-in-loss":
        return 8 * oversleep(seconds / 8)
    taken = oversleep(seconds) if name in SLEEPS else seconds
    return taken * (step / 2.0 if name == "checkpoint" else TIMES.get(name, 1))  # each two seconds


def oversleep(seconds: float) -> float:
    """The time that a sleep of `seconds` really takes on this machine."""
    taken = []
    for _ in range(20 if seconds < 0.05 else 3):
        begun = time.perf_counter()
        time.sleep(seconds)
        taken.append(time.perf_counter() - begun)
    return median(taken)


if __name__ == "__main__":
    main()
