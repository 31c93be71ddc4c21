"""Sends requests to the service of `make demo-serve`, and tells how they fared.

python scripts/demo_serve_load.py URL COUNT [--at-once N] [--per-s N] [--replicas N]
    [--kill-after N]

With --replicas, COUNT requests are sent again until so many replicas have answered, ten times at
most. With --kill-after, a replica's program is killed after so many answers. Exits with 1 if a
request was not answered with 200, too few replicas answered, or no program was killed.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen


class DemoLoad:
    """The answers so far."""

    def __init__(self, url: str, per_s: float, kill_after: int) -> None:
        self.url, self.per_s, self.kill_after = url, per_s, kill_after
        self.begun = time.monotonic()
        self.statuses: Counter[int] = Counter()
        self.replicas: Counter[str] = Counter()
        self.slowest_s = 0.0
        self.killed = ""
        self._lock = threading.Lock()

    def send(self, number: int) -> None:
        if self.per_s:
            due = self.begun + number / self.per_s
            threading.Event().wait(max(0.0, due - time.monotonic()))
        started = time.monotonic()
        try:
            with urlopen(f"{self.url}/", timeout=120) as answer:
                status, said = answer.status, json.load(answer)
        except HTTPError as error:
            status, said = error.code, {}
        with self._lock:
            self.statuses[status] += 1
            if said:
                self.replicas[said["replica"]] += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - started)
            due = self.kill_after and not self.killed and self.statuses[200] >= self.kill_after
            if due and said and (program := find_program(said["job"])):
                os.kill(program, signal.SIGKILL)
                self.killed = f"process {program} of {said['replica']}"


def find_program(job: str) -> int:
    """Return the process of a replica as this machine counts, or 0. A replica counts its own ones
    from 1 if it has a namespace.
    """
    mark = f"CAVVY_JOB_ID={job}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"hello.py" in words and mark in (folder / "environ").read_bytes().split(b"\0"):
                return int(folder.name)
        except OSError:  # of another user, or ended
            continue
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("count", type=int)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--per-s", type=float, default=0.0)
    parser.add_argument("--kill-after", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=1)
    options = parser.parse_args()
    load = DemoLoad(options.url, options.per_s, options.kill_after)
    sent = 0
    with ThreadPoolExecutor(options.at_once) as pool:
        while not sent or (len(load.replicas) < options.replicas and sent < 10 * options.count):
            list(pool.map(load.send, range(options.count)))
            sent += options.count
    took = time.monotonic() - load.begun
    killed = f"; {load.killed} was killed" if load.killed else ""
    statuses = ", ".join(f"{count} x {status}" for status, count in sorted(load.statuses.items()))
    found = ", ".join(f"{count} by {name}" for name, count in sorted(load.replicas.items()))
    print(
        f"{sent} requests in {took:.1f} s: {statuses}; the slowest took {load.slowest_s:.2f} s; "
        f"answered: {found}{killed}"
    )
    if load.statuses[200] != sent:
        sys.exit("not all requests were answered with 200")
    if len(load.replicas) < options.replicas:
        sys.exit(f"only {len(load.replicas)} of {options.replicas} replicas answered")
    if options.kill_after and not load.killed:
        sys.exit("no program was killed")


if __name__ == "__main__":
    main()
