"""A drill of calls that the server keeps: many calls with keys, while processes of functions,
brokers and the server are killed.

    python benchmarks/functions_drill.py [--calls 100000] [--kills 50] [--folder FOLDER]

Counts how many calls have their result once by their key, how often functions ran, and whether the
bill of the jobs is what their charges add up to. A server of its own is started below FOLDER and
killed meanwhile. Prints lines of JSON; the exit code is 1 if a result is missing or wrong.
"""

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

_APP = """
import os
import cavvy

app = cavvy.App("drill")


@app.function(max_replicas=2, retries=3, idle="60s")
def note(number):
    with open(os.path.join({folder!r}, f"ran-{{os.getpid()}}"), "a") as file:
        file.write(f"{{number}}\\n")
    return number, cavvy.current_call_key()
"""

_CONFIG = "[providers.local]\nprice_usd_hr = 3.6\n\n[server]\nstart_timeout_s = 300\n"


def say(what: str, **figures: object) -> None:
    print(json.dumps({"what": what, "load": round(os.getloadavg()[0], 1), **figures}), flush=True)


def find_programs(home: str, program: str) -> list[int]:
    """Return the processes of this program in the jobs of a server."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (each / "cmdline").read_bytes().decode().split("\0")
            inside = os.readlink(each / "cwd").startswith(home)
            if inside and any(word.endswith(f"on_node/{program}.py") for word in words):
                found.append(int(each.name))
    return found


class Killer(threading.Thread):
    """Kills something every few seconds: in turn a process of functions, the server, and now and
    then the broker.
    """

    def __init__(self, home: str, kills: int, pause_s: float) -> None:
        super().__init__(daemon=True)
        self.home, self.left, self.pause_s = home, kills, pause_s
        self.killed: Counter[str] = Counter()
        self.over = threading.Event()

    def run(self) -> None:
        from cavvy.client.state import read_server

        turn = 0
        while self.left and not self.over.wait(self.pause_s * random.uniform(0.5, 1.5)):
            what = ("worker", "server", "worker", "server", "serve")[turn % 5]
            if what == "server":
                server = read_server(self.home)
                pids = [] if server is None else [server.pid]
            else:
                pids = find_programs(self.home, what)
            for pid in pids[:1]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.killed[what] += 1
                    self.left -= 1
                    turn += 1


def drill(calls: int, kills: int, home: str, folder: str, pause_s: float) -> bool:
    import cavvy

    note = cavvy.Function.lookup("drill", "note")
    note.spawn(-1).get(timeout=300)
    killer = Killer(home, kills, pause_s)
    killer.start()
    began = time.monotonic()
    keys = [f"key {number}" for number in range(calls)]
    made = note.spawn_map(range(calls), keys=keys)
    say("spawned", calls=calls, seconds=round(time.monotonic() - began, 1))
    again = note.spawn_map(range(0, calls, 10), keys=keys[::10])  # another program, say
    found = cavvy.FunctionCall.gather(*made)
    took_s = time.monotonic() - began
    killer.over.set()
    killer.join(60)
    right = sum(value == number for number, (value, _) in enumerate(found))
    one = len({key for _, key in found})
    same = [each.id for each in again] == [each.id for each in made[::10]]
    ran: Counter[int] = Counter()
    for path in Path(folder).glob("ran-*"):
        ran.update(int(line) for line in path.read_text().splitlines() if line)
    twice = sum(count > 1 for number, count in ran.items() if number >= 0)
    good = right == one == calls and same
    say(
        "drill",
        calls=calls,
        seconds=round(took_s, 1),
        killed=dict(killer.killed),
        right_results=right,
        distinct_calls=one,
        same_calls_by_key=same,
        ran_more_than_once=twice,
        lost=calls - right,
    )
    return good


def check_bill() -> bool:
    """Return whether the bill of each job is exact: it is the sum of its charges, each of which is
    its time at the price, and no node is charged twice at the same time.
    """
    from cavvy.client.connection import connect

    wrong, micros, jobs = [], 0, []
    with connect() as client:
        for each in client.jobs("default").jobs:
            if each.tags.get("cavvy-app") != "drill":
                continue
            cost = client.cost("default", each.id)
            jobs.append(each.id)
            micros += cost.total_micros
            charges = sorted(cost.charges, key=lambda charge: charge.since)
            if cost.total_micros != sum(charge.amount_micros for charge in charges):
                wrong.append(f"{each.id}: the total is not the sum")
            for charge in charges:
                seconds = (charge.until - charge.since).total_seconds()
                expected = seconds * charge.rate_micros_per_hour / 3600
                if abs(expected - charge.amount_micros) > 1 or not charge.rate_micros_per_hour:
                    wrong.append(f"{each.id}: {charge}")
            for first, second in itertools.pairwise(charges):
                if second.since < first.until:
                    wrong.append(f"{each.id}: charged twice from {second.since}")
    say("bill", jobs=len(jobs), usd=micros / 1e6, wrong=wrong)
    return bool(jobs) and micros > 0 and not wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--pause-s", type=float, default=4.0)
    parser.add_argument("--folder", default=None)
    args = parser.parse_args()
    if args.folder:
        Path(args.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        home = f"{folder}/home"
        os.environ |= {"CAVVY_HOME": home, "CAVVY_CONFIG": f"{folder}/config.toml"}
        # this machine has a price, so that there is a bill
        (Path(folder) / "config.toml").write_text(_CONFIG)
        (Path(folder) / "app").mkdir()
        (Path(folder) / "ran").mkdir()
        app = Path(folder) / "app" / "drill.py"
        app.write_text(_APP.format(folder=f"{folder}/ran"))
        words = [sys.executable, "-m", "cavvy"]
        try:
            subprocess.run([*words, "deploy", str(app), "--yes"], check=True)
            good = drill(args.calls, args.kills, home, f"{folder}/ran", args.pause_s)
            good = check_bill() and good
        finally:
            subprocess.run([*words, "apps", "rm", "drill"], check=False)
            subprocess.run([*words, "server", "stop"], check=False)
    sys.exit(not good)


if __name__ == "__main__":
    main()
