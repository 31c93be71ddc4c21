"""How long a user waits: submit to running, exit to done, stop to stopped; on this machine, with
the real agent.

    python benchmarks/latency.py [--runs 15]

Times are the server's own stamps (UTC, microseconds) and, for the end, the task's own stamp of its
last breath. Peers on the same kind of machine: dstack 0.22.5 0.66 s (stub agent), 23 s, 8 s.
"""

import argparse
import statistics
import time
from datetime import UTC, datetime

from measure import fresh_home, table

from cavvy.client import Client, connect


def submit_to_running_s(client: Client) -> float:
    """From the submission to `running`, as a client that waits for the event sees it."""
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


def exit_to_done_s(client: Client) -> float:
    """From the moment before the task exits to `done` with its exit code and its last log line
    readable.
    """
    name = client.submit("{name: exit, run: 'sleep 0.3; date +%s.%N'}").name
    while (job := client.job("default", name)).phase != "done":
        time.sleep(0.005)
    text = b"".join(client.logs("default", name))
    seen = time.time()
    assert job.exit_code == 0, job
    return seen - float(text.split()[-1])


def stop_to_stopped_s(client: Client) -> float:
    """From the stop to `stopped`, for a task that ends at once when asked."""
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
            rows.append(
                (text, median, figures[-1], bar_s, peer_s, "ok" if median <= bar_s else "MISSED")
            )
    table(f"seconds, median of {runs}", ("what", "median", "worst", "bar", "dstack", ""), rows)


if __name__ == "__main__":
    main()
