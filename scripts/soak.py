"""Kill servers, agents, commands and work at random, and crash the server at any step, for SOAK_S
seconds. Called by `make soak`.

Each round has its own user, and a number that is the seed of all its random choices. Every EVERYth
round tests a long queue; the other rounds test kills. A violation is printed with the number of its
round, and `--first NUMBER` starts with that round.
"""

import argparse
import logging
import os
import random
import sqlite3
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    from tests.system.trust import User

EVERY = 16
COMMANDS = 32  # at the same time
QUEUED = 5000
_SUBMITTERS = 8
_LOOKS = (["ps"], ["status", "first"], ["nodes"], ["cost"], ["events", "first"])


def play(number: int, queued: int) -> str:
    """Run one round. Returns its fault, or "" if there is none."""
    from tests.system.trust import user_at

    logging.disable(logging.CRITICAL)
    dice = random.Random(number)
    try:
        with tempfile.TemporaryDirectory(prefix="soak-") as folder, user_at(Path(folder)) as user:
            user.settings("[providers.local]\nprice_usd_hr = 3600\n")
            if number % EVERY:
                play_kills(user, dice, number)
            else:
                play_queue(user, dice, queued)
    except Exception as error:  # noqa: BLE001 - a round that breaks anything is a finding
        return f"{type(error).__name__}: {error}"
    return ""


def play_kills(user: "User", dice: random.Random, number: int) -> None:
    """Kill a job's server, agent, work and command at random moments, while others run."""
    from tests.agent.system.test_trust_kills import play_round
    from tests.sim.dice import play_number
    from tests.system.trust import check_clean

    play_number(number)  # on virtual time, with a server that crashes between any two calls
    submitted = run_commands(user)
    for each in range(5):
        play_round(user, dice, f"job{each}")
    rows = user.api.jobs("default", limit=200).jobs
    for row in rows:
        user.ended(row.name)
    assert len(rows) >= submitted
    check_clean(user)


def play_queue(user: "User", dice: random.Random, queued: int) -> None:
    """Kill the server while thousands of jobs are submitted, wait in the queue and are stopped.
    Checks that no job is lost or stored twice.
    """
    from tests.system.trust import check_clean, environment, wait_until

    cpus = os.cpu_count() or 1
    task = f"{{name: first, run: sleep 36000, resources: {{cpu: {cpus}}}}}"
    user.submit(task, "--yes")
    user.wait("first", "running")
    left = iter(range(queued))
    lock = threading.Lock()
    problems: list[BaseException] = []

    def submit() -> None:
        with user.api.sibling() as own:
            while True:
                with lock:
                    if problems or next(left, None) is None:
                        return
                try:
                    own.submit(task.replace("first", "queued"), consent=True)
                except Exception as error:  # noqa: BLE001 - reported by the round
                    problems.append(error)

    with environment(user.environ):  # so that a restarted server has the same environment
        threads = [threading.Thread(target=submit) for _ in range(_SUBMITTERS)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            time.sleep(dice.uniform(0.5, 4))
            user.kill_server()
            user.cli("ps")
        for thread in threads:
            thread.join()
    assert not problems, problems[0]
    assert count(user, "phase = 'queued'") == queued
    submitted = run_commands(user)
    user.kill_server()
    stop = user.start("stop", "--all", "--no-wait")
    time.sleep(dice.uniform(0.2, 2))
    user.kill_server()
    stop.communicate()
    user.cli("stop", "--all", "--no-wait")
    wait_until(lambda: count(user, "phase NOT IN ('stopped', 'done')") == 0, seconds=600)
    assert count(user, "1") == 1 + queued + submitted
    assert count(user, "phase = 'done'") == 0  # the first job held all CPUs until its end
    check_clean(user)


def run_commands(user: "User") -> int:
    """Run COMMANDS commands at the same time. Returns how many of them submitted a job."""
    cpus = os.cpu_count() or 1
    file = user.task(f"{{run: echo ran, resources: {{cpu: {cpus}}}}}", "more.yaml")
    if not user.has("first"):
        user.submit("{name: first, run: echo ran}", "--yes")
    half = COMMANDS // 2
    arguments = [["run", "-d", "--yes", file] for _ in range(half)]
    arguments += [_LOOKS[each % len(_LOOKS)] for each in range(COMMANDS - half)]
    for command in [user.start(*each) for each in arguments]:
        told = command.communicate()
        assert command.returncode == 0, (command.args, told)
    return half


def count(user: "User", condition: str) -> int:
    """The number of jobs that meet an SQL condition."""
    with closing(sqlite3.connect(f"file:{user.home}/cavvy.db?mode=ro", uri=True)) as database:
        found = database.execute(f"SELECT count(*) FROM jobs WHERE {condition}").fetchone()
    return int(found[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("SOAK_S") or 3600))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--queued", type=int, default=QUEUED)
    given = parser.parse_args()
    ends, number, broken = time.monotonic() + given.seconds, given.first, 0
    processes = os.cpu_count() or 1
    with ProcessPoolExecutor(processes) as pool:
        while number == given.first or time.monotonic() < ends:
            numbers = range(number, number + processes)
            played = pool.map(play, numbers, [given.queued] * processes)
            for each, problem in zip(numbers, played, strict=True):
                if problem:
                    broken += 1
                    print(f"round {each}: {problem}", flush=True)
            number += processes
    print(f"{number - given.first} rounds, {broken} with violations")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
