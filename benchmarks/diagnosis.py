"""Bottlenecks planted as known delays: is the right cause first, and are its dollars right?

    python benchmarks/diagnosis.py [NAME ...]

Each is a run of `diagnosis_script.py` with one delay in it. What it really costs is known from the delay itself,
times how late this machine wakes a sleeper; the bar is the right cause first in 18 of 20, dollars within 10 %.
"""

import sys
import time
from pathlib import Path
from statistics import median

from remuda.tuning.diagnose import Doctor
from remuda.tuning.session import ScriptError, Session

PRICE = 2.99
# delay, milliseconds in each step, ranks, the cause to be named
PLANTED = [
    ("few-threads", 40, 1, "too few workers"), ("few-threads", 80, 1, "too few workers"),
    ("storage-bandwidth", 40, 1, "slow storage"), ("storage-bandwidth", 80, 1, "slow storage"),
    ("storage-bandwidth", 160, 1, "slow storage"),
    ("decode", 40, 1, "slow decode"), ("decode", 80, 1, "slow decode"), ("decode", 160, 1, "slow decode"),
    ("python-in-loop", 10, 1, "python-bound loop"), ("python-in-loop", 40, 1, "python-bound loop"),
    ("python-in-loss", 20, 1, "python-bound loop"), ("python-in-loss", 60, 1, "python-bound loop"),
    ("batch", 30, 1, "tiny batch"), ("batch", 60, 1, "tiny batch"),
    ("micro-batch", 5, 1, "tiny micro-batch"), ("micro-batch", 10, 1, "tiny micro-batch"),
    ("checkpoint", 400, 1, "slow checkpoint"), ("checkpoint", 800, 1, "slow checkpoint"),
    ("collective", 20, 2, "slow collective"), ("collective", 60, 2, "slow collective"),
    ("straggler", 30, 2, "straggler rank"), ("straggler", 80, 2, "straggler rank"),
]  # fmt: skip


def main() -> None:
    wanted = set(sys.argv[1:])
    right = close = count = 0
    print(f"{'planted':28} {'first cause':20} {'ms lost':>8} {'expected':>8} {'$ off':>6}")
    for name, ms, ranks, cause in PLANTED:
        if wanted and name not in wanted:
            continue
        count += 1
        try:
            first, lost, expected = diagnose(name, ms, ranks)
        except ScriptError as error:
            print(f"{name} {ms} ms: {error}")
            continue
        off = abs(lost / expected - 1) if expected else 1.0
        right += first == cause
        close += first == cause and off <= 0.1
        print(
            f"{name + f' {ms} ms x{ranks}':28} {first:20} {lost * 1e3:8.1f} {expected * 1e3:8.1f} {off:6.0%}",
            flush=True,
        )
    print(f"right cause first in {right} of {count}; of these, dollars within 10 % in {close}")


def diagnose(name: str, ms: float, ranks: int) -> tuple[str, float, float]:
    """The first cause, seconds of a step that it says are lost, and those that are."""
    script = str(Path(__file__).with_name("diagnosis_script.py"))
    with Session(script, [name, str(ms)], ranks=ranks) as session:
        found = Doctor(session).diagnose()
    base = median(found.seconds["cached"])
    expected = expect(name, ms / 1e3, base, found.step_s)
    first = found.findings[0] if found.findings else None
    return (first.cause, first.lost_s, expected) if first else ("nothing", 0.0, expected)


def expect(name: str, seconds: float, base: float, step: float) -> float:
    """What a delay costs in each step: data that is read beside the computation costs what is longer than it."""
    if name in ("few-threads", "storage-bandwidth", "decode"):
        return 8 * oversleep(seconds / 8) - base
    if name == "python-in-loss":
        return 8 * oversleep(seconds / 8)
    if name == "micro-batch":
        return 7 * seconds  # 8 passes instead of one
    if name == "checkpoint":
        return oversleep(seconds) * step / 2.0
    return seconds


def oversleep(seconds: float) -> float:
    """How long a sleep of so many seconds takes here and now."""
    taken = []
    for _ in range(20 if seconds < 0.05 else 3):
        begun = time.perf_counter()
        time.sleep(seconds)
        taken.append(time.perf_counter() - begun)
    return median(taken)


if __name__ == "__main__":
    main()
