"""Submits many tasks with one request, and the same number of tasks one by one.

    python benchmarks/submissions.py [--tasks 10000] [--single 1000] [--postgres]

The texts of the tasks differ, as those of many files do. All of them wait behind one job that needs
all cores, so that the queue has its work meanwhile. "Another request" is what `cavvy status` asks,
sent every 50 ms while the batch is stored. One by one means 16 connections at the same time.
"""

import argparse
import os
import threading
import time
from statistics import quantiles

from jobs import submit_all
from measure import fresh_home, process_cpu_s, record, table
from replicas import make_database

from cavvy.client import ApiClient, connect, wire
from cavvy.client.paths import make_keys

_EVERY_S = 0.05


def make_text(number: int) -> str:
    cores = os.cpu_count()
    return (
        f"name: row-{number}\nresources:\n  cpu: {cores}\nretry:\n  node: 3\n"
        f"limits:\n  duration: 1h\nenv:\n  ROW: {number}\nrun: sleep 600\n"
    )


class Asking(threading.Thread):
    """Sends a small request again and again, and notes how long each answer took."""

    def __init__(self, client: ApiClient) -> None:
        super().__init__(daemon=True)
        self._client = client
        self._ended = threading.Event()
        self.took_s: list[float] = []

    def run(self) -> None:
        with self._client.sibling() as own:
            while not self._ended.wait(_EVERY_S):
                started = time.monotonic()
                own.server()
                self.took_s.append(time.monotonic() - started)

    def end(self) -> None:
        self._ended.set()
        self.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--single", type=int, default=1_000)
    parser.add_argument("--postgres", action="store_true")
    arguments = parser.parse_args()
    if arguments.postgres:
        os.environ["CAVVY_SERVER_DATABASE"] = make_database()
    texts = [make_text(number) for number in range(arguments.tasks)]
    with fresh_home(), connect() as client:
        pid = client.server().pid
        client.submit(make_text(arguments.tasks))
        tasks = [wire.SubmitRequest(text=each) for each in texts]
        ask = wire.BatchRequest(tasks=tasks, keys=make_keys(len(texts)))
        asking = Asking(client)
        asking.start()
        cpu_s, started = process_cpu_s(pid), time.monotonic()
        made = client.submit_batch("default", ask)
        batch_s = time.monotonic() - started
        batch_cpu_ms = (process_cpu_s(pid) - cpu_s) * 1000 / arguments.tasks
        print(f"  stored after {batch_s:.1f} s", flush=True)
        asking.end()
        assert len({job.name for job in made.jobs}) == arguments.tasks
        assert not made.refused
        cpu_s = process_cpu_s(pid)
        single_s = submit_all(client, arguments.single, 16)
        single_cpu_ms = (process_cpu_s(pid) - cpu_s) * 1000 / arguments.single
        client.stop_server()
    p99_ms = quantiles(asking.took_s, n=100)[-1] * 1000
    bar_s = 8 * arguments.tasks / 10_000
    rows = [
        ("s until the batch is stored", batch_s, bar_s, record("batch", batch_s, bar_s, "s")),
        ("server's CPU ms a task of the batch", batch_cpu_ms, "-", ""),
        ("P99 of another request meanwhile, ms", p99_ms, "-", ""),
        (f"s for {arguments.single} tasks one by one", single_s, "-", ""),
        ("server's CPU ms a task, one by one", single_cpu_ms, "-", ""),
    ]
    table(f"{arguments.tasks} tasks in one request", ("what", "figure", "bar", ""), rows)


if __name__ == "__main__":
    main()
