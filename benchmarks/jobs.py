"""Submits 1,000 small jobs through 16 connections and runs them on this machine. The server is
killed once, and all jobs must end as done, with their logs.

    python benchmarks/jobs.py [--jobs 1000] [--connections 16] [--no-kill]

The server answers after the commit (SQLite, WAL, synchronous NORMAL). CPU time includes every
process that was started: servers, agents and tasks. For comparison, dstack 0.22.5 on the same kind
of machine has 9.5 submits per second and 109 CPU ms per run, without running anything.
"""

import argparse
import os
import signal
import threading
import time

from measure import adopt_orphans, children_cpu_s, fresh_home, record, table

from cavvy.client import ApiClient, connect

TASK = "{name: true-job, run: echo ran}"


def submit_all(client: ApiClient, jobs: int, connections: int) -> float:
    """Submit jobs from `connections` threads at the same time. Returns the seconds until the last
    answer.
    """
    left = iter(range(jobs))
    lock = threading.Lock()

    def work() -> None:
        with client.sibling() as own:
            while True:
                with lock:
                    if next(left, None) is None:
                        return
                own.submit(TASK)

    threads = [threading.Thread(target=work) for _ in range(connections)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - started


def wait_for_all(client: ApiClient, jobs: int) -> dict[str, int]:
    """Wait until all jobs have ended. Returns the number of jobs in each phase."""
    while True:
        phases: dict[str, int] = {}
        cursor = None
        while True:
            page = client.jobs("default", cursor=cursor, limit=200)
            for row in page.jobs:
                phases[row.phase] = phases.get(row.phase, 0) + 1
            if (cursor := page.cursor) is None:
                break
        if not {"queued", "starting", "running", "stopping"} & phases.keys():
            assert sum(phases.values()) == jobs, phases
            return phases
        time.sleep(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--no-kill", action="store_true")
    arguments = parser.parse_args()
    adopt_orphans()
    with fresh_home():
        with connect() as client:
            pid = client.server().pid
            submitting_s = submit_all(client, arguments.jobs, arguments.connections)
        if not arguments.no_kill:
            os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        with connect() as client:
            phases = wait_for_all(client, arguments.jobs)
            ended_s = time.monotonic() - started
            logged = sum(
                b"".join(client.logs("default", f"true-job-{n}" if n > 1 else "true-job"))
                == b"ran\n"
                for n in range(1, arguments.jobs + 1)
            )
            client.stop_server()
        all_cpu_s = children_cpu_s()
    rate = arguments.jobs / submitting_s
    per_job_ms = all_cpu_s / arguments.jobs * 1000
    done = phases.get("done", 0)
    bars = (
        ("submits answered per second", rate, 400, True),
        ("CPU ms a job: server, agents, tasks, and reading it all back", per_job_ms, 100, False),
        ("done", done, arguments.jobs, True),
        ("with their log", logged, arguments.jobs, True),
    )
    rows = [
        (what, figure, bar, record(what, figure, bar, "", least=least))
        for what, figure, bar, least in bars
    ]
    rows.append(("seconds until all had ended", ended_s, "-", ""))
    table(
        f"{arguments.jobs} jobs at {arguments.connections} connections",
        ("what", "figure", "bar", ""),
        rows,
    )


if __name__ == "__main__":
    main()
