"""Submits an array of 1,000 jobs, lists, stops, retries and removes it as one, and runs an array.

    python benchmarks/arrays.py [--jobs 1000] [--runs 5]

The CPU time of the requests is that of all threads of the server until the answer, and includes the
work that the server has begun meanwhile. The CPU time of a job that runs includes every process
that was started: servers, agents and tasks. On a machine that does other work, all figures are
higher.
"""

import argparse
import statistics
import time
from collections.abc import Callable

from measure import adopt_orphans, children_cpu_s, fresh_home, process_cpu_s, record, table

from cavvy.client import ApiClient, connect
from cavvy.client.array_wire import read_array, remove_array, retry_array, stop_array

# what is measured -> its bar in CPU ms; a list estimates the start of the array's next job, once in
# ten seconds
BARS = {"submit": 100, "list": 120, "table": 250, "stop": 1000, "retry": 1000, "remove": 5000}
ENDED = {"done", "failed", "stopped"}


def wait(client: ApiClient, name: str) -> dict[str, int]:
    """Wait until all jobs of the array have ended. Returns the number of jobs in each phase."""
    while True:
        counts = read_array(client, "default", name).array.members
        if counts.keys() <= ENDED:
            return counts
        time.sleep(1)


def measure_requests(client: ApiClient, jobs: int) -> tuple[dict[str, float], dict[str, float]]:
    """The CPU ms of the server and of this client for each request about one array."""
    pid = client.server().pid
    server, own = {}, {}

    def measure(what: str, call: Callable[[], object]) -> None:
        before, began = process_cpu_s(pid), time.process_time()
        call()
        server[what] = (process_cpu_s(pid) - before) * 1000
        own[what] = (time.process_time() - began) * 1000

    text = f"{{name: many, array: 0-{jobs - 1}, parallel: 1, run: sleep 600}}"
    made = []
    measure("submit", lambda: made.append(client.submit(text).name))
    name = made[0]
    measure("list", lambda: client.jobs("default", arrays=True, limit=10))
    measure("table", lambda: read_array(client, "default", name))
    measure("stop", lambda: stop_array(client, "default", name))
    assert wait(client, name) == {"stopped": jobs}
    measure("retry", lambda: retry_array(client, "default", name))
    stop_array(client, "default", name)
    wait(client, name)
    time.sleep(1)  # until the nodes of the job that ran are released
    measure("remove", lambda: remove_array(client, "default", name))
    return server, own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    adopt_orphans()
    rows = []
    with fresh_home():
        with connect() as client:
            found = [measure_requests(client, arguments.jobs) for _ in range(arguments.runs)]
            client.stop_server()
        for what, bar in BARS.items():
            figure = statistics.median(server[what] for server, _ in found)
            own = statistics.median(own[what] for _, own in found)
            verdict = record(f"{what} an array of {arguments.jobs}", figure, bar, "CPU ms")
            rows.append((what, figure, own, bar, verdict))
        before = children_cpu_s()
        with connect() as client:
            array = client.submit(f"{{name: echoes, array: 0-{arguments.jobs - 1}, run: 'true'}}")
            assert wait(client, array.name) == {"done": arguments.jobs}
            client.stop_server()
        each = (children_cpu_s() - before) / arguments.jobs * 1000
    rows.append(("run, each job", each, "-", 60, record("run an array, each job", each, 60, "ms")))
    columns = ("what", "CPU ms", "of the client", "bar", "")
    table(f"an array of {arguments.jobs} jobs", columns, rows)


if __name__ == "__main__":
    main()
