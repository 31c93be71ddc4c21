"""One server on PostgreSQL with many active jobs: one part runs, each on a node that reports, and
the rest waits for capacity. Measures the server's CPU time and memory, and how long reports and
users wait for their answers.

    python benchmarks/active_jobs.py [--jobs 10000] [--nodes 2000] [--every 15] [--seconds 120]
        [--url postgresql://…]

The server tells agents for how long figures may wait, so of many nodes fewer reports arrive than
the agents have figures; the CPU time for a node and minute compares servers.

The nodes are those of a made-up cloud in the server. Their agents are processes of this benchmark
(`reporting_agents.py`), which use the agent's own client over TLS: each agent has one connection
for reports and one that waits for orders. Servers of other tools were tried with fewer jobs: dstack
names 1,000 for a replica, SkyPilot 2,000. Without --url, the PostgreSQL of the tests is used.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from measure import process_cpu_s, process_rss_mib, record, table
from replicas import make_database, run_sql

from cavvy.api.tokens import load_tokens
from cavvy.client import ApiClient, connect
from cavvy.client.connection import ensure_server
from cavvy.server.node_tls import load_certificate

SUBMITTERS = 8
AGENTS_EACH = 250  # agents of one process
PROBE_S = 0.2  # pause between two requests of the user that measures how long answers take
SETTLE_S = 20.0  # pause between the last start and the measurement
_SETTINGS = """[server]
tls_listen = "127.0.0.1:0"
idle_stop_s = 0
[providers.local]
enabled = false
[providers.fake]
script = "{script}"
"""
_OFFER = """[[offers]]
instance_type = "node"
price_usd_hr = 2.5
cpus = 8
memory_gib = 32
capacity = {nodes}
"""
_LAUNCH = "[[launches]]\nlatency_s = 0.0\nboots = false\n"


def write_settings(nodes: int) -> None:
    settings = Path(os.environ["CAVVY_CONFIG"])
    script = settings.with_name("cloud.toml")
    script.write_text(_OFFER.format(nodes=nodes) + _LAUNCH * nodes)
    settings.write_text(_SETTINGS.format(script=script))


def submit_all(client: ApiClient, jobs: int) -> None:
    left, lock = iter(range(jobs)), threading.Lock()

    def work() -> None:
        with client.sibling() as own:
            while True:
                with lock:
                    if next(left, None) is None:
                        return
                own.submit("{name: active, run: train, resources: {cpus: 8}}", consent=True)

    threads = [threading.Thread(target=work) for _ in range(SUBMITTERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def read_gangs(url: str, nodes: int) -> Sequence[str]:
    """The gangs of all nodes, when they are launched."""
    while True:
        rows = run_sql(url, "SELECT gang FROM attempts WHERE phase = 'booting' ORDER BY gang")
        if len(rows) == nodes:
            return [str(gang) for (gang,) in rows]
        print(f"  {len(rows)} of {nodes} nodes are launched", flush=True)
        time.sleep(2)


@contextmanager
def reporting(gangs: Sequence[str], every_s: float, address: str) -> Iterator[list[Path]]:
    """Run the agents of these gangs. Yields the files with the results of their processes."""
    home = Path(os.environ["CAVVY_HOME"])
    folder = home.parent / "agents"
    folder.mkdir()
    tokens = load_tokens(str(home / "agents.key"))
    pin = load_certificate(str(home / "tls.pem")).pin
    processes, results = [], []
    for first in range(0, len(gangs), AGENTS_EACH):
        result = folder / f"{first}.json"
        agents = [
            {
                "gang": gang,
                "rank": 0,
                "address": address,
                "pin": pin,
                "token": tokens.of_claim(gang, 0),
                "home": str(folder / gang),
                "from": f"127.1.{number // 250}.{number % 250 + 1}",
            }
            for number, gang in enumerate(gangs)
            if first <= number < first + AGENTS_EACH
        ]
        plan = folder / f"{first}.plan"
        plan.write_text(json.dumps({"every_s": every_s, "agents": agents, "result": str(result)}))
        program = Path(__file__).with_name("reporting_agents.py")
        processes.append(subprocess.Popen([sys.executable, program, plan]))
        results.append(result)
    try:
        while not all(result.with_suffix(".ready").exists() for result in results):
            assert all(process.poll() is None for process in processes)
            time.sleep(0.5)
        yield results
        for process in processes:
            process.send_signal(signal.SIGUSR2)
        while not all(result.exists() for result in results):
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()


@dataclass(kw_only=True)
class Measured:
    """What was measured: CPU times in the time `wall_s`, and how long each answer took."""

    wall_s: float
    cpu_s: float  # of the server
    database_s: float
    rss_mib: float
    agents_s: float
    load: float
    submitting_s: float
    placing_s: float
    users_s: list[float]
    reports_s: list[float] = field(default_factory=list)
    over: int = 0  # agents that lost their work


class AnswerProbe:
    """A user who lists jobs and looks at one, and measures how long the answers take."""

    def __init__(self, client: ApiClient) -> None:
        self._client, self._over = client, threading.Event()
        self.waits_s: list[float] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with self._client.sibling() as own:
            while not self._over.wait(PROBE_S):
                before = time.monotonic()
                own.job("default", own.jobs("default", limit=10).jobs[0].name)
                self.waits_s.append(time.monotonic() - before)

    def __enter__(self) -> "AnswerProbe":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


def database_cpu_s(url: str) -> float:
    """The CPU seconds of PostgreSQL's processes for this database."""
    sql = "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
    total = 0.0
    for (pid,) in run_sql(url, sql):
        try:
            total += process_cpu_s(int(str(pid)))
        except (FileNotFoundError, PermissionError):
            continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=2_000)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two reports")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--url")
    arguments = parser.parse_args()
    url = arguments.url or make_database()
    with tempfile.TemporaryDirectory(prefix="cavvy-bench-") as folder:
        os.environ |= {
            "CAVVY_HOME": f"{folder}/home",
            "CAVVY_CONFIG": f"{folder}/settings.toml",
            "CAVVY_SERVER_DATABASE": url,
        }
        write_settings(arguments.nodes)
        server = ensure_server()
        try:
            show(measure(url, arguments), arguments)
        finally:  # the made-up nodes end with the server
            os.kill(server.pid, signal.SIGKILL)


def measure(url: str, arguments: argparse.Namespace) -> Measured:
    """Let all nodes report for some time."""
    with connect() as client:
        server = client.server()
        assert server.node_endpoint is not None
        began = time.monotonic()
        submit_all(client, arguments.jobs)
        submitting_s = time.monotonic() - began
        gangs = read_gangs(url, arguments.nodes)
        placing_s = time.monotonic() - began
        with reporting(gangs, arguments.every, server.node_endpoint) as results:
            print(f"  all nodes report; the server is process {server.pid}", flush=True)
            time.sleep(SETTLE_S)
            for process in list_agent_processes():
                os.kill(process, signal.SIGUSR1)
            cpu_s, database_s = process_cpu_s(server.pid), database_cpu_s(url)
            agents_s = sum(map(process_cpu_s, list_agent_processes()))
            began = time.monotonic()
            with AnswerProbe(client) as probe:
                time.sleep(arguments.seconds)
            measured = Measured(
                wall_s=time.monotonic() - began,
                cpu_s=process_cpu_s(server.pid) - cpu_s,
                database_s=database_cpu_s(url) - database_s,
                agents_s=sum(map(process_cpu_s, list_agent_processes())) - agents_s,
                rss_mib=process_rss_mib(server.pid),
                load=os.getloadavg()[0],
                submitting_s=submitting_s,
                placing_s=placing_s,
                users_s=probe.waits_s,
            )
        for result in results:
            told = json.loads(result.read_text())
            measured.reports_s += [*told["waits"], *told["unhandled"]]
            measured.over += told["over"]
    return measured


def show(measured: Measured, arguments: argparse.Namespace) -> None:
    waits, reports = sorted(measured.reports_s), len(measured.reports_s)
    judged = (
        ("server, % of one core", measured.cpu_s / measured.wall_s * 100, 60.0),
        ("server, MiB resident", measured.rss_mib, 600.0),
        ("longest wait of a report, s", waits[-1], 1.0),
        ("longest wait of a user, s", max(measured.users_s), 1.0),
        ("agents that lost their work", float(measured.over), 0.0),
    )
    rows: list[tuple[str, float, object, str]] = [
        (what, figure, bar, record(what, figure, bar, "")) for what, figure, bar in judged
    ]
    rows += [
        (what, figure, "-", "")
        for what, figure in (
            ("reports a second", reports / measured.wall_s),
            ("server, CPU ms for a report, with all other work", measured.cpu_s / reports * 1000),
            (
                "server, CPU ms for a node and minute",
                measured.cpu_s / measured.wall_s * 60_000 / arguments.nodes,
            ),
            ("PostgreSQL, % of one core", measured.database_s / measured.wall_s * 100),
            ("all agents, % of one core", measured.agents_s / measured.wall_s * 100),
            ("report answered after, median, ms", statistics.median(waits) * 1000),
            ("report answered after, 99 of 100, ms", waits[reports * 99 // 100] * 1000),
            ("requests of the user a second", 2 * len(measured.users_s) / measured.wall_s),
            ("user answered after, median, ms", statistics.median(measured.users_s) * 1000),
            ("submissions a second", arguments.jobs / measured.submitting_s),
            ("seconds until all nodes were launched", measured.placing_s),
            ("load of this machine at the end", measured.load),
        )
    ]
    title = f"{arguments.jobs} jobs, {arguments.nodes} nodes, a report each {arguments.every:g} s"
    table(title, ("what", "figure", "bar", ""), rows)


def list_agent_processes() -> list[int]:
    """The processes with agents, which are children of this one."""
    tasks = Path("/proc/self/task").iterdir()
    found = [pid for task in tasks for pid in (task / "children").read_text().split()]
    return [
        int(pid)
        for pid in found
        if b"reporting_agents" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


if __name__ == "__main__":
    main()
