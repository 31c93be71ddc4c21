"""Sends requests to the service of `make demo-serve`, and tells how they fared.

python scripts/demo_serve_load.py URL COUNT [--at-once N] [--per-s N] [--kill-after N]

With --kill-after, a replica's program is killed after so many answers. Exits with 1 if a request
was not answered with 200.
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
from urllib.error import HTTPError
from urllib.request import urlopen


class DemoLoad:
    """The answers so far."""

    def __init__(self, url: str, per_s: float, kill_after: int) -> None:
        self.url, self.per_s, self.kill_after = url, per_s, kill_after
        self.begun = time.monotonic()
        self.statuses: Counter[int] = Counter()
        self.programs: Counter[int] = Counter()
        self.slowest_s = 0.0
        self.killed = 0
        self._lock = threading.Lock()

    def send(self, number: int) -> None:
        if self.per_s:
            due = self.begun + number / self.per_s
            threading.Event().wait(max(0.0, due - time.monotonic()))
        started = time.monotonic()
        try:
            with urlopen(f"{self.url}/", timeout=120) as answer:
                status, program = answer.status, json.load(answer)["pid"]
        except HTTPError as error:
            status, program = error.code, 0
        with self._lock:
            self.statuses[status] += 1
            self.programs[program] += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - started)
            if self.kill_after and not self.killed and self.statuses[200] >= self.kill_after:
                self.killed = program
                os.kill(program, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("count", type=int)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--per-s", type=float, default=0.0)
    parser.add_argument("--kill-after", type=int, default=0)
    options = parser.parse_args()
    load = DemoLoad(options.url, options.per_s, options.kill_after)
    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(load.send, range(options.count)))
    took = time.monotonic() - load.begun
    killed = f"; the program {load.killed} was killed" if load.killed else ""
    statuses = ", ".join(f"{count} x {status}" for status, count in sorted(load.statuses.items()))
    print(
        f"{options.count} requests in {took:.1f} s: {statuses}; the slowest took "
        f"{load.slowest_s:.2f} s; {len(load.programs)} replicas answered{killed}"
    )
    sys.exit(0 if load.statuses[200] == options.count else 1)


if __name__ == "__main__":
    main()
