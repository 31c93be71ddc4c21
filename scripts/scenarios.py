"""Run random scenarios of `tests/sim/dice.py` on all cores; called by `make scenarios`."""

import argparse
import logging
import resource
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def play(number: int) -> tuple[int, str, Counter[str]]:
    """Run one scenario. Returns its number, its faults, and how its jobs ended."""
    from tests.sim.dice import play_number

    logging.disable(logging.CRITICAL)
    try:
        ending = play_number(number)
    except Exception as error:  # noqa: BLE001 - a scenario that breaks anything is a finding
        return number, f"{type(error).__name__}: {error}", Counter()
    ends = Counter(str(trace.job.phase) for trace in ending.traces)
    ends["attempts"] = sum(len(trace.attempts) for trace in ending.traces)
    return number, "", ends


def keep_result(count: int, wrong: int, totals: Counter[str]) -> None:
    """Store the result as a row for docs/measured/policies.md."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
    from policies_page import keep

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    row = {"scenarios": count, "wrong": wrong, "cpu_s": round(used.ru_utime + used.ru_stime)}
    keep("scenarios", [row | {name: totals[name] for name in ("done", "failed", "attempts")}])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int)
    parser.add_argument(
        "--keep",
        action="store_true",
        help="for docs/measured/policies.md, which policies.py makes",
    )
    given = parser.parse_args()
    totals: Counter[str] = Counter()
    wrong = 0
    with ProcessPoolExecutor(given.processes) as pool:
        numbers = range(given.first, given.first + given.count)
        for number, problem, ends in pool.map(play, numbers, chunksize=5):
            totals += ends
            if problem:
                wrong += 1
                print(f"scenario {number}: {problem}", flush=True)
    if given.keep:
        keep_result(given.count, wrong, totals)
    told = ", ".join(f"{count} {name}" for name, count in sorted(totals.items()))
    print(f"{given.count} scenarios, {wrong} wrong; {told}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
