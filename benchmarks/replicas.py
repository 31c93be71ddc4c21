"""Submits jobs through servers that share one PostgreSQL, at 16 connections, and runs them on this
machine. No job may be lost or run twice.

    python benchmarks/replicas.py [--jobs 1000] [--connections 16] [--servers 2] [--url postgresql://…]

Where there are fewer cores than servers, the CPU time of all servers for each job shows how the
throughput would grow: if it stays the same, servers do not do each other's work.

Without --url, the PostgreSQL of the tests is used (Debian's, on a Unix socket), with
synchronous_commit and autovacuum, but without fsync. Jobs start while others are still submitted,
so servers, clients, agents and PostgreSQL share the cores of this machine. For comparison, on the
same kind of machine: dstack 0.22.5 takes 9.5 submissions per second, SkyPilot 0.14.1 1.4.
"""

import argparse
import os
import sys
import threading
import time
from contextlib import closing
from itertools import cycle
from pathlib import Path

from measure import ROOT, fresh_home, process_cpu_s, record, table

from cavvy.client import ApiClient, connect
from cavvy.client.connection import ensure_server, stop_server
from cavvy.store.drivers import make_driver

_IDLE_S = 10.0  # in which the servers have nothing to do


def make_database() -> str:
    """The URL of an empty database of the tests' PostgreSQL, which commits and cleans its tables up
    like any other."""
    sys.path.insert(0, str(ROOT))
    from tests.system.postgres import OPTIONS, new_database

    OPTIONS["autovacuum"] = "on"
    url = new_database()
    run_sql(
        url,
        f"ALTER DATABASE {url.partition('@/')[2].partition('?')[0]} SET synchronous_commit = on",
    )
    return url


def run_sql(url: str, sql: str) -> list[tuple[object, ...]]:
    with closing(make_driver(url, journal="auto").connect()) as session:
        cursor = session.run(sql)
        return cursor.fetchall() if sql.startswith("SELECT") else []


def submit_all(clients: list[ApiClient], jobs: int, connections: int, ran: Path) -> float:
    """Submit jobs from `connections` threads, which use the servers in turn. Returns the seconds
    until the last answer.
    """
    left, lock, servers = iter(range(jobs)), threading.Lock(), cycle(clients)

    def work(client: ApiClient) -> None:
        with client.sibling() as own:
            while True:
                with lock:
                    number = next(left, None)
                if number is None:
                    return
                own.submit(f"{{name: bench, run: 'echo >> {ran}/{number}'}}")

    threads = [threading.Thread(target=work, args=[next(servers)]) for _ in range(connections)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--servers", type=int, default=2, choices=range(1, 9))
    parser.add_argument("--url")
    arguments = parser.parse_args()
    url = arguments.url or make_database()
    with fresh_home():
        files = Path(os.environ["CAVVY_HOME"])
        os.environ |= {"CAVVY_SERVER_DATABASE": url, "CAVVY_SERVER_FILES": str(files)}
        homes = [str(files / name) for name in "abcdefgh"[: arguments.servers]]
        ran = files.parent / "ran"
        ran.mkdir()
        pids: list[int] = []
        for home in homes:
            pids.append(ensure_server(home=home).pid)
        clients = [connect(home=home) for home in homes]
        time.sleep(3)  # the servers share the work now
        idle = sum(map(process_cpu_s, pids))
        time.sleep(_IDLE_S)
        idle = (sum(map(process_cpu_s, pids)) - idle) / _IDLE_S
        before_s, began = [process_cpu_s(pid) for pid in pids], time.monotonic()
        try:
            submitting_s = submit_all(clients, arguments.jobs, arguments.connections, ran)
            live = "SELECT COUNT(*) FROM jobs WHERE ended_at IS NULL"
            while run_sql(url, live) != [(0,)]:
                time.sleep(1)
            used_s = [process_cpu_s(pid) - s for pid, s in zip(pids, before_s, strict=True)]
            idle_s = idle * (time.monotonic() - began)
        finally:
            for home in homes:
                stop_server(home=home)
        [(attempts,)] = run_sql(url, "SELECT COUNT(*) FROM attempts")
        once = sum(path.stat().st_size == 1 for path in ran.iterdir())
    table(
        "CPU time of the servers",
        ("servers", "ms a job", "without what they use idle", "of each server, s"),
        [
            (
                arguments.servers,
                f"{1000 * sum(used_s) / arguments.jobs:.1f}",
                f"{1000 * (sum(used_s) - idle_s) / arguments.jobs:.1f}",
                " ".join(f"{each:.1f}" for each in used_s),
            )
        ],
    )
    rows = [
        (what, figure, bar, record(what, figure, bar, "", least=least))
        for what, figure, bar, least in (
            ("submits answered per second", arguments.jobs / submitting_s, 300, True),
            ("jobs that ran once", once, arguments.jobs, True),
            ("attempts", int(str(attempts)), arguments.jobs, False),
        )
    ]
    table(
        f"{arguments.servers} servers, {arguments.connections} connections",
        ("what", "figure", "bar", ""),
        rows,
    )


if __name__ == "__main__":
    main()
