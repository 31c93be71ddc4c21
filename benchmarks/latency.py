"""Measures how long a user waits on this machine, with the real agent: from the submission to
running, from the task's exit to done, and from a stop to stopped.

    python benchmarks/latency.py [--runs 15]

Times are those that the server records (UTC, microseconds); the task itself records the time of its
exit. For comparison, dstack 0.22.5 on the same kind of machine takes 0.66 s (stub agent), 23 s and
8 s.
"""

import argparse
import statistics
import time
from datetime import UTC, datetime

from measure import fresh_home, record, table

from cavvy.client import ApiClient, connect


def submit_to_running_s(client: ApiClient) -> float:
    """The time from the submission to `running`, as a client sees it that waits for the event."""
    started = time.monotonic()
    name = client.submit("{name: wait, run: sleep 60}").name
    for event in client.follow("default", name):
        if event.kind == "running":
            break
    waited = time.monotonic() - started
    client.stop("default", name)
    for _ in client.follow("default", name):
        pass
    return waited


def exit_to_done_s(client: ApiClient) -> float:
    """The time from just before the task's exit until the job is `done`, and its exit code and last
    log line can be read.
    """
    name = client.submit("{name: exit, run: 'sleep 0.3; date +%s.%N'}").name
    while (job := client.job("default", name)).phase != "done":
        time.sleep(0.005)
    text = b"".join(client.logs("default", name))
    seen = time.time()
    assert job.exit_code == 0, job
    return seen - float(text.split()[-1])


def stop_to_stopped_s(client: ApiClient) -> float:
    """The time from the stop to `stopped`, for a task that exits at once."""
    name = client.submit("{name: stop, run: exec sleep 60}").name
    while client.job("default", name).phase != "running":
        time.sleep(0.01)
    started = datetime.now(UTC)
    client.stop("default", name)
    while (job := client.job("default", name)).phase != "stopped":
        time.sleep(0.005)
    assert job.ended_at is not None
    return (job.ended_at - started).total_seconds()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    rows = []
    with fresh_home(), connect() as client:
        for text, measure, bar_s, peer_s in (
            ("submit to running", submit_to_running_s, 0.4, 0.66),
            ("exit to done, code and last line readable", exit_to_done_s, 0.3, 23.0),
            ("stop to stopped, beyond the task's own grace", stop_to_stopped_s, 0.5, 8.0),
        ):
            figures = sorted(measure(client) for _ in range(runs))
            median = statistics.median(figures)
            verdict = record(text, median, bar_s, "s")
            rows.append((text, median, figures[-1], bar_s, peer_s, verdict))
    table(f"seconds, median of {runs}", ("what", "median", "worst", "bar", "dstack", ""), rows)


if __name__ == "__main__":
    main()
