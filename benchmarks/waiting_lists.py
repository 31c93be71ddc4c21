"""Measures what lists of jobs and the status of a job cost the server beside many waiting jobs.

    python benchmarks/waiting_lists.py [--jobs 10,100,1000] [--arrays 1] [--every 0.5]
        [--seconds 10]

All jobs wait behind one that needs all cores: as many single jobs, or as members of so many arrays.
The CPU time is that of the whole server, less what the same server used without requests for as
long.
"""

import argparse
import os
import time
from collections.abc import Callable

from measure import fresh_home, process_cpu_s, table
from submissions import make_text

from cavvy.client import ApiClient, connect, wire
from cavvy.client.paths import make_keys

_SETTLE_S = 3.0


def fill(client: ApiClient, jobs: int, arrays: int) -> None:
    cores = os.cpu_count()
    client.submit(f"{{name: big, resources: {{cpu: {cores}}}, run: sleep 3000}}")
    if not arrays:
        tasks = [wire.SubmitRequest(text=make_text(number)) for number in range(jobs)]
        client.submit_batch("default", wire.BatchRequest(tasks=tasks, keys=make_keys(jobs)))
    for number in range(arrays):
        text = f"name: many-{number}\narray: 0-{jobs // arrays - 1}\nresources: {{cpu: {cores}}}\n"
        client.submit(text + "run: sleep 600\n")


def measure_ms(
    client: ApiClient, pid: int, call: Callable[[], object], *, every_s: float, seconds: float
) -> tuple[float, float]:
    """The CPU ms of the server for each call, and without calls for each second."""
    before = process_cpu_s(pid)
    time.sleep(seconds)
    idle = process_cpu_s(pid) - before
    before, calls, end = process_cpu_s(pid), 0, time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        call()
        calls += 1
        time.sleep(min(every_s, left))
    return (process_cpu_s(pid) - before - idle) / calls * 1000, idle / seconds * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", default="10,100,1000")
    parser.add_argument("--arrays", type=int, default=0)
    parser.add_argument("--every", type=float, default=0.5)
    parser.add_argument("--seconds", type=float, default=10)
    arguments = parser.parse_args()
    rows = []
    for jobs in map(int, arguments.jobs.split(",")):
        with fresh_home(), connect() as client:
            pid = client.server().pid
            fill(client, jobs, arguments.arrays)
            time.sleep(_SETTLE_S)
            last = client.jobs("default", limit=1).jobs[0].name
            calls: dict[str, Callable[[], object]] = {
                "ps": lambda: client.jobs("default", arrays=True, limit=50),
                "status": lambda name=last: client.job("default", name),
            }
            for what, call in calls.items():
                rates = {"every_s": arguments.every, "seconds": arguments.seconds}
                each, idle = measure_ms(client, pid, call, **rates)
                rows.append((jobs, what, each, idle))
    columns = ("waiting jobs", "request", "CPU ms each", "CPU ms a second without requests")
    what = f"in {arguments.arrays} arrays" if arguments.arrays else "single jobs"
    table(f"{what}, one request each {arguments.every} s", columns, rows)


if __name__ == "__main__":
    main()
