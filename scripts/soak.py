"""Kill servers, agents, commands and work under queued jobs until SOAK_S seconds have passed;
called by `make soak`.

Each round has a number, from which everything random in it follows, and a user of its own. What a
round finds broken is printed with its number: `--first NUMBER` begins with that round.
"""

import argparse
import logging
import os
import random
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
QUEUED = 12


def play(number: int) -> str:
    """One round; its fault, "" without one."""
    from tests.sim.dice import play_number
    from tests.system.test_trust_kills import play_round
    from tests.system.trust import check_clean, user_at

    logging.disable(logging.CRITICAL)
    dice = random.Random(number)
    try:
        play_number(number)  # a server that crashes between any two calls, on virtual time
        with tempfile.TemporaryDirectory(prefix="soak-") as folder, user_at(Path(folder)) as user:
            user.settings("[providers.local]\nprice_usd_hr = 3600\n")
            file = user.task("{run: echo ran}", "queued.yaml")
            commands = [user.start("run", "-d", "--yes", file) for _ in range(QUEUED)]
            for command in commands:
                told = command.communicate()
                assert command.returncode == 0, told
            for each in range(5):
                play_round(user, dice, f"job{each}")
            rows = user.api.jobs("default", limit=200).jobs
            for row in rows:
                user.ended(row.name)
            assert len(rows) >= QUEUED
            check_clean(user)
    except Exception as error:  # noqa: BLE001 - a round that breaks anything is a finding
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("SOAK_S") or 3600))
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    ends, number, broken = time.monotonic() + given.seconds, given.first, 0
    processes = os.cpu_count() or 1
    with ProcessPoolExecutor(processes) as pool:
        while number == given.first or time.monotonic() < ends:
            numbers = range(number, number + processes)
            for each, problem in zip(numbers, pool.map(play, numbers), strict=True):
                if problem:
                    broken += 1
                    print(f"round {each}: {problem}", flush=True)
            number += processes
    print(f"{number - given.first} rounds, {broken} with violations")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
