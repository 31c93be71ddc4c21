"""What telemetry costs: CPU seconds of a server with 1,000 jobs on nodes that report, with and
without a reader of its metrics, in alternating periods; of the trace of a job; and of an agent.

    python benchmarks/telemetry.py [--jobs 1000] [--pairs 4] [--seconds 60] [--url postgresql://…]

Where it reads, the reader asks each second, because one answer every 30 s, as
`deploy/prometheus/prometheus.yml` asks for, costs less than the periods differ. The nodes and their
agents are those of `active_jobs.py`. Traces go to a receiver in another process; their reads of
the database do not count. The agent is a real one, whose job sleeps. Ends with 1 if a bar
is missed.
"""

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from active_jobs import SETTLE_S, read_gangs, reporting, submit_all, write_settings
from measure import fresh_home, process_cpu_s, record, table
from replicas import make_database

from cavvy.client import connect
from cavvy.client.connection import ensure_server
from cavvy.control.decide.job_traces import trace_job
from cavvy.domain.events import Event
from cavvy.domain.jobs import Attempt, AttemptOutcome, AttemptPhase, JobPhase, JobRecord
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.server.otlp_export import SpanSender

READ_S = 1.0  # pause between two readings in a measured period
SCRAPE_S = 30.0  # in `deploy/prometheus/prometheus.yml`
REPORT_S = 15.0
TRACED = 2000  # jobs
_RECEIVER = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_): ...
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--url")
    arguments = parser.parse_args()
    agent = measure_agent(arguments.seconds)
    trace_ms = measure_traces()
    plain, reading_ms = measure_server(arguments)
    base = sum(plain) / len(plain)
    more = statistics.median(reading_ms) / 1000 / SCRAPE_S / base
    judged = (
        ("more CPU for the server, with metrics, %", 100 * more, 3.0),
        ("agent of a node, % of one core", agent, 1.0),
    )
    rows: list[tuple[str, float, object, str]] = [
        (what, figure, bar, record(what, figure, bar, "")) for what, figure, bar in judged
    ]
    rows += [
        ("server without metrics, % of one core", 100 * base, "-", ""),
        ("CPU ms of one reading, median", statistics.median(reading_ms), "-", ""),
        ("CPU ms of one reading, most", max(reading_ms), "-", ""),
        ("CPU ms of the trace of a job", trace_ms, "-", ""),
    ]
    title = f"telemetry, {arguments.jobs} jobs, {arguments.pairs} pairs of {arguments.seconds:g} s"
    table(title, ("what", "figure", "bar", ""), rows)
    return 1 if any(row[-1] == "MISSED" for row in rows) else 0


def measure_server(arguments: argparse.Namespace) -> tuple[list[float], list[float]]:
    """The shares of a core in periods without readings, and what a reading costs in milliseconds
    of CPU time by each pair of periods.
    """
    url = arguments.url or make_database()
    with tempfile.TemporaryDirectory(prefix="cavvy-bench-") as folder:
        os.environ |= {
            "CAVVY_HOME": f"{folder}/home",
            "CAVVY_CONFIG": f"{folder}/settings.toml",
            "CAVVY_SERVER_DATABASE": url,
            "CAVVY_SERVER_LISTEN": f"127.0.0.1:{find_port()}",
        }
        write_settings(arguments.jobs)
        server = ensure_server()
        plain: list[float] = []
        reading_ms: list[float] = []
        try:
            with connect() as client:
                endpoint = client.server().node_endpoint
                assert endpoint is not None
                submit_all(client, arguments.jobs)
                with reporting(read_gangs(url, arguments.jobs), REPORT_S, endpoint):
                    time.sleep(SETTLE_S)
                    watch(server.pid, 1.0, reads=True)  # the first time, packages are imported
                    for _ in range(arguments.pairs):
                        base, _ = watch(server.pid, arguments.seconds, reads=False)
                        with_reader, readings = watch(server.pid, arguments.seconds, reads=True)
                        plain.append(base)
                        more = (with_reader - base) * arguments.seconds
                        reading_ms.append(1000 * more / readings)
                        print(f"  {100 * base:.1f} %, {reading_ms[-1]:.0f} ms", flush=True)
        finally:  # the made-up nodes end with the server
            os.kill(server.pid, signal.SIGKILL)
    return plain, reading_ms


def watch(pid: int, seconds: float, *, reads: bool) -> tuple[float, int]:
    """The share of a core that the process uses in this time, and the number of readings."""
    token = Path(os.environ["CAVVY_HOME"], "token").read_text().strip()
    url = f"http://{os.environ['CAVVY_SERVER_LISTEN']}/metrics"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    began, before, readings = time.monotonic(), process_cpu_s(pid), 0
    while (left := began + seconds - time.monotonic()) > 0:
        if reads:
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()
            readings += 1
        time.sleep(min(READ_S, left))
    return (process_cpu_s(pid) - before) / (time.monotonic() - began), readings


def find_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def measure_traces() -> float:
    """The CPU milliseconds of this process for the trace of a job."""
    with receiving() as url:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = url
        sender, jobs = SpanSender("bench"), [make_job(number) for number in range(TRACED)]
        assert sender.send(trace_job(*jobs[0]))
        before = time.process_time()
        for first in range(0, TRACED, 50):
            batch = jobs[first : first + 50]
            assert sender.send([span for job in batch for span in trace_job(*job)])
        found = (time.process_time() - before) / TRACED * 1000
    del os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"]
    return found


@contextmanager
def receiving() -> Iterator[str]:
    command = [sys.executable, "-c", _RECEIVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def make_job(number: int) -> tuple[JobRecord, Sequence[Attempt], Sequence[Event]]:
    """A job with one attempt, as `cavvy run` makes it."""
    now = datetime(2027, 1, 1, tzinfo=UTC)
    at = [now + timedelta(seconds=second) for second in range(8)]
    offer = Offer(provider="fake", region="r", instance_type="node", rate=HourlyRate(1_000_000))
    name = f"job-{number}"
    job = JobRecord(
        **{"id": name, "project": "p", "name": name, "task": TaskSpec(name=name, run="true")},
        **{"phase": JobPhase.DONE, "submitted_at": now, "since": at[7], "ended_at": at[7]},
    )
    attempt = Attempt(
        **{"id": f"{name}-1", "job_id": name, "project": "p", "number": 1, "gang": "g"},
        **{"offer": offer, "nodes": 1, "phase": AttemptPhase.ENDED, "created_at": at[1]},
        **{"outcome": AttemptOutcome.SUCCEEDED, "since": at[7], "launched_at": at[2]},
        **{"running_at": at[3], "finished_at": at[6], "ended_at": at[7]},
    )
    events = [
        Event(project="p", job_id=name, attempt=1, at=each, kind="placed", text="a sentence")
        for each in at
    ]
    return job, [attempt], events


def measure_agent(seconds: float) -> float:
    """The share of a core, in percent, that an agent uses while its job sleeps."""
    with fresh_home() as environ:
        os.environ |= environ
        with connect() as client:
            name = client.submit("{name: sleeps, run: sleep 1000}").name
            while client.job("default", name).phase != "running":
                time.sleep(0.2)
            time.sleep(5.0)
            agents = find_agents(os.environ["CAVVY_HOME"])
            before = sum(map(process_cpu_s, agents))
            time.sleep(seconds)
            found = 100 * (sum(map(process_cpu_s, agents)) - before) / seconds
            client.stop("default", name)
    return found


def find_agents(home: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes() if folder.name.isdigit() else b""
        except OSError:
            continue
        if home.encode() in command and b"/config.json" in command:
            found.append(int(folder.name))
    assert found, "no agent runs"
    return found


if __name__ == "__main__":
    sys.exit(main())
