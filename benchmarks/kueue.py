"""Runs the workloads of Kueue's performance test (kubernetes-sigs/kueue,
test/performance/scheduler) as jobs of a real server: each is submitted over HTTP at its time, waits
for its turn, runs on a gang of the made-up cloud that lives as long as the workload, and is billed.

    python benchmarks/kueue.py [--scale topology] [--store postgres] [--part 0.05]

A CPU of Kueue is a GPU here, and each cohort is a project with a limit, above its queues with their
quotas. Kueue's test has no nodes either, so the made-up cloud has as many nodes as are asked for.
With topology, ten racks of 64 hosts have 16 GPUs each, four for each CPU of Kueue, whose nodes have
96: a third of each class requires one rack, a third prefers one, and a third has slices.
`--part` runs that part of each queue's workloads. PostgreSQL is that of the tests, without fsync.
"""

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fair_share import BASELINE, GANGS, LARGE_SCALE, NOMINAL, WorkloadClasses
from measure import fresh_home, process_cpu_s, process_rss_mib, record, table
from replicas import make_database, run_sql

from cavvy.client import ApiClient, connect
from cavvy.client.account_wire import AccountClient
from cavvy.client.policy_wire import PolicyAsk, put_policy

_SUBMITTERS = 16  # connections, as in `jobs.py`
_SETTINGS = """[server]
idle_stop_s = 0
[providers.local]
enabled = false
[providers.fake]
script = "{script}"
"""
_OFFER = """[[offers]]
instance_type = "{name}"
accelerator = "H100"
accelerators = {size}
accelerator_memory_gib = 80
price_usd_hr = 1
"""
_SHARED = 'region = "hall"\nshared = true\n'
_HOST = """[[hosts]]
name = "r{rack}-n{node}"
group = "hall"
cpus = 96
memory_gib = 512
accelerators = 16
instance_type = "h100"
labels = {{block = "b0", rack = "r{rack}"}}
"""
_CLOUD = "[launch]\nlatency_s = 0\nboot_s = 0\n[removal]\nlatency_s = 0\ntakes_s = 0\n"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """One of Kueue's tests, and what Kueue needs for it: seconds in all, the mean use of the
    quotas, and the mean wait of each class."""

    cohorts: int
    queues: int  # of each cohort
    classes: WorkloadClasses
    kueue_s: float
    kueue_use: float
    kueue_waits: dict[str, float]
    bar_s: float
    unit: int = 1  # GPUs for each CPU
    racks: bool = False


SCALES = {
    "baseline": Scale(
        cohorts=5,
        queues=6,
        classes=BASELINE,
        kueue_s=351,
        kueue_use=0.559,
        kueue_waits={"large": 16.5, "medium": 76.8, "small": 215.5},
        bar_s=200,
    ),
    "large": Scale(
        cohorts=10,
        queues=100,
        classes=LARGE_SCALE,
        kueue_s=1179,
        kueue_use=0.386,
        kueue_waits={"large": 105.6, "medium": 256.4, "small": 700.4},
        bar_s=700,
    ),
    "topology": Scale(
        cohorts=5,
        queues=6,
        classes=BASELINE,
        kueue_s=401,
        kueue_use=0.624,
        kueue_waits={"large": 38, "medium": 106, "small": 238},
        bar_s=230,
        unit=4,
        racks=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A workload to submit, `at` seconds after the beginning."""

    at: float
    project: str
    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """A job that has ended: when it was placed, and when its gang was billed."""

    kind: str
    waited_s: float
    held_s: float
    ended_at: float


def list_arrivals(scale: Scale, part: float) -> Sequence[Arrival]:
    arrivals = []
    for cohort in range(scale.cohorts):
        for queue in range(scale.queues):
            for kind, count, every, runs, priority, size in scale.classes:
                task = {
                    "run": "work",
                    "priority": priority // 2,  # priorities end at 100
                    "resources": {"gpu": f"H100:{size}"},
                    "env": {"FAKE_RUN_S": str(runs)},
                }
                for number in range(round(count * part)):
                    name = f"{kind}-{number}"
                    if scale.racks:
                        task |= make_gang(kind, number, size * scale.unit)
                    arrivals.append(
                        Arrival(
                            at=every * (number + 1),
                            project=f"queue-{cohort}-{queue}",
                            name=name,
                            text=json.dumps({"name": name, **task}),
                        )
                    )
    return sorted(arrivals, key=lambda each: each.at)


def make_gang(kind: str, number: int, gpus: int) -> dict[str, object]:
    """Return the keys of the task of a workload with topology."""
    nodes, part = GANGS[kind]
    needs = ({"same": "rack"}, {"prefer": "rack"}, {"same": "rack", "slice": part})
    return {
        "nodes": nodes,
        "topology": needs[number % len(needs)],
        "resources": {"gpu": f"H100:{gpus // nodes}"},
    }


def write_settings(scale: Scale) -> None:
    settings = Path(os.environ["CAVVY_CONFIG"])
    script = settings.with_name("cloud.toml")
    sizes = [(name, size * scale.unit) for name, *_, size in scale.classes]
    tables = [_OFFER.format(name=name, size=size) for name, size in sizes]
    if scale.racks:
        sizes = [("h100", size // GANGS[name][0]) for name, size in sizes]
        tables = [_OFFER.format(name=name, size=size) + _SHARED for name, size in sizes]
        tables += [_HOST.format(rack=at // 64, node=at % 64) for at in range(640)]
    script.write_text("".join(tables) + _CLOUD)
    settings.write_text(_SETTINGS.format(script=script))


def make_projects(client: ApiClient, scale: Scale) -> None:
    accounts = AccountClient(client)
    for cohort in range(scale.cohorts):
        above = f"cohort-{cohort}"
        accounts.create_project(above, None)
        put_policy(client, above, PolicyAsk(max_gpus=NOMINAL * scale.unit * scale.queues))
        for queue in range(scale.queues):
            name = f"queue-{cohort}-{queue}"
            accounts.create_project(name, above)
            put_policy(client, name, PolicyAsk(quota_gpus=NOMINAL * scale.unit))


def submit_all(client: ApiClient, arrivals: Sequence[Arrival]) -> tuple[float, float]:
    """Submit each workload at its time. Return when the first could arrive, as a time of the
    clock, and after how many seconds the last submission was answered."""
    began, wall = time.monotonic(), time.time()

    def work(mine: Sequence[Arrival]) -> None:
        with client.sibling() as own:
            for each in mine:
                time.sleep(max(0.0, began + each.at - time.monotonic()))
                own.submit(each.text, project=each.project, consent=True)

    with ThreadPoolExecutor(_SUBMITTERS) as threads:
        list(threads.map(work, (arrivals[first::_SUBMITTERS] for first in range(_SUBMITTERS))))
    return wall, time.monotonic() - began


def wait_for_all(url: str, jobs: int) -> None:
    """Wait until all jobs have ended and are billed."""
    while True:
        ((ended,),) = run_sql(url, "SELECT COUNT(*) FROM jobs WHERE phase = 'done'")
        ((closed,),) = run_sql(url, "SELECT COUNT(*) FROM attempts WHERE phase = 'ended'")
        if ended == closed == jobs:
            return
        print(f"  {ended} of {jobs} are done", flush=True)
        time.sleep(2)


def read_jobs(url: str, arrivals: Sequence[Arrival], began: float) -> Sequence[RunJob]:
    due = {(each.project, each.name): each for each in arrivals}
    sql = "SELECT j.project, j.name, a.document FROM jobs j JOIN attempts a ON a.job_id = j.id"
    found = []
    for project, name, document in run_sql(url, sql):
        attempt = json.loads(str(document))
        placed, ended = (_read_time(attempt[key]) for key in ("created_at", "ended_at"))
        arrival = due.pop((str(project), str(name)))
        found.append(
            RunJob(
                kind=arrival.name.partition("-")[0],
                waited_s=placed - began - arrival.at,
                held_s=ended - placed,
                ended_at=ended - began,
            )
        )
    assert not due, f"{len(due)} jobs did not run"
    return found


def _read_time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", choices=SCALES, default="baseline")
    parser.add_argument("--store", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--part", type=float, default=1.0)
    arguments = parser.parse_args()
    scale = SCALES[arguments.scale]
    arrivals = list_arrivals(scale, arguments.part)
    if arguments.store == "postgres":
        os.environ["CAVVY_SERVER_DATABASE"] = make_database()
    with fresh_home():
        write_settings(scale)
        url = os.environ.get("CAVVY_SERVER_DATABASE") or (
            f"sqlite:///{Path(os.environ['CAVVY_HOME'], 'cavvy.db')}"
        )
        with connect() as client:
            pid = client.server().pid
            make_projects(client, scale)
            before, own = process_cpu_s(pid), time.process_time()
            began, submitted_s = submit_all(client, arrivals)
            own = time.process_time() - own
            wait_for_all(url, len(arrivals))
            cpu_s, rss_mib = process_cpu_s(pid) - before, process_rss_mib(pid)
            jobs = read_jobs(url, arrivals, began)
    show(arguments, scale, jobs, (submitted_s, own, cpu_s, rss_mib))


def show(
    arguments: argparse.Namespace,
    scale: Scale,
    jobs: Sequence[RunJob],
    costs: tuple[float, float, float, float],
) -> None:
    submitted_s, own, cpu_s, rss_mib = costs
    wall = max(each.ended_at for each in jobs)
    sizes = {name: size for name, *_, size in scale.classes}
    held = sum(each.held_s * sizes[each.kind] for each in jobs)
    use = held / (wall * NOMINAL * scale.queues * scale.cohorts)
    waits: defaultdict[str, list[float]] = defaultdict(list)
    for each in jobs:
        waits[each.kind].append(each.waited_s)
    what = f"Kueue's {arguments.scale} on {arguments.store}"
    rows: list[tuple[str, object, object, object, str]] = [
        ("s in all", wall, scale.kueue_s, scale.bar_s, record(what, wall, scale.bar_s, "s"))
    ]
    for name, bar in scale.kueue_waits.items():
        mean = sum(waits[name]) / max(1, len(waits[name]))
        verdict = record(f"{what}: mean wait, {name}", mean, bar, "s")
        rows.append((f"s of mean wait, {name}", mean, bar, bar, verdict))
    rows += [
        ("mean use of the quotas", use, scale.kueue_use, "-", ""),
        ("s until all were submitted", submitted_s, "-", "-", ""),
        ("CPU ms of the server for each job", cpu_s / len(jobs) * 1000, "-", "-", ""),
        ("CPU ms of this client for each job", own / len(jobs) * 1000, "-", "-", ""),
        ("MiB of the server", rss_mib, "-", "-", ""),
    ]
    table(f"{what}: {len(jobs):,} jobs", ("what", "figure", "Kueue", "bar", ""), rows)


if __name__ == "__main__":
    main()
