"""A day of a large company on virtual time: the production control plane with its store, against
six simulated places, whose machines and agents come, fail and are lost; jobs, arrays, gangs and
services of 20 teams.

    python benchmarks/big_day.py [--nodes 10000] [--jobs 200000] [--scale 1] [--hours 24]
        [--report day.html] [--profile FILE]

During the day one cloud answers nothing for an hour and loses a third of its machines, the server
is killed three times, and the database fails over and loses the answer of a commit. At the end no
job may be lost, no machine bought twice, no device held twice, and each bill must equal what
follows from the clouds' own books. `--scale 0.1` makes nodes, jobs and services a tenth, and
`--hours 1` lets all happen in an hour. The report has pictures; the profile is one of cProfile.
"""

import argparse
import asyncio
import cProfile
import logging
import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import cast

from day_books import Findings, check_books
from day_report import write_day
from day_world import (
    BROKEN,
    CUT_OFF,
    DOWN_S,
    FAILOVER_FOR_S,
    Arrival,
    DayCloud,
    DayFront,
    DayStore,
    DayTimes,
    make_arrivals,
    make_clouds,
    make_services,
)
from measure import record, table

from cavvy.capabilities.serving.control.front import SuppliedFront
from cavvy.capabilities.serving.keeper import Serving
from cavvy.control.clock import VirtualClock, run_virtual
from cavvy.control.control_plane import ControlPlane, ControlPlaneDependencies
from cavvy.control.job_service import JobIds, TaskSubmission
from cavvy.domain.accounts import Project
from cavvy.domain.jobs import JobRecord, RunOrigin
from cavvy.providers.base import AgentEndpoint, Provider
from cavvy.providers.fake import FakeAccount, FakeHostAccount
from cavvy.sim.harness import START
from cavvy.store.base import StaleVersion, StoreError

TEAMS = 20
INSTALLATION = "day"
_RETRY = timedelta(seconds=5)  # between two tries of a client whose request was not answered
_SAMPLES = 144  # of a day
_LAST = timedelta(days=3)  # after which a day that does not end is given up


@dataclass(frozen=True)
class DayPlan:
    """How large the day is."""

    nodes: int
    jobs: int
    services: int
    seed: int
    times: DayTimes


@dataclass
class Sample:
    """How things stand at a moment, `at_s` seconds after midnight."""

    at_s: float
    nodes: Mapping[str, int]  # in use, by place
    waiting: int
    running: int
    ended: int
    cpu_s: float  # of this process until now
    rss_mib: float


@dataclass
class DayResult:
    """What happened, for the checks and the report."""

    plan: DayPlan
    samples: list[Sample] = field(default_factory=list)
    # by ID: whether the job's program ends with an error
    accepted: dict[str, bool] = field(default_factory=dict)
    repeated: int = 0  # requests that clients repeated because no answer came
    cut_off: int = 0  # machines that the outage took
    ends_s: float = 0.0
    cpu_s: float = 0.0
    warnings: Counter[str] = field(default_factory=Counter)


class Day:
    """The company: its server, its clouds and its users."""

    def __init__(self, plan: DayPlan) -> None:
        self.plan, self.clock = plan, VirtualClock(START)
        self.store = DayStore(self.clock.now)
        self.clouds: dict[str, DayCloud] = make_clouds(
            plan.nodes, self.clock.now, plan.seed, plan.times
        )
        self.result = DayResult(plan)
        self.accounts: dict[str, FakeAccount] = {
            name: (FakeHostAccount if cloud.script.hosts else FakeAccount)(cloud, INSTALLATION)
            for name, cloud in self.clouds.items()
        }
        self._ids = JobIds(self.clock)
        self._plane: ControlPlane | None = None
        self._front = DayFront(self.clock.now, START, plan.times.at(24))

    async def play(self) -> None:
        """Play the day until the last job has ended."""
        for number in range(TEAMS):
            await self.store.add_project(Project(name=f"team-{number}"), adopt=False)
        await self._open()
        began = time.process_time()
        watcher = asyncio.create_task(self._watch(began))
        faults = [
            asyncio.create_task(each) for each in (self._restart(), self._cut(), self._fail_over())
        ]
        await self._put_services()
        await asyncio.gather(self._submit_all(), *faults)
        await self._until(self.plan.times.at(24))
        await self._end_services()
        while await self.store.unfinished():
            assert self.clock.now() < START + _LAST, "the day does not end"
            await self.clock.sleep_until(self.clock.now() + timedelta(minutes=1))
        self.result.ends_s, self.result.cpu_s = self._at_s(), time.process_time() - began
        watcher.cancel()
        await self._close()

    def _at_s(self) -> float:
        return (self.clock.now() - START).total_seconds()

    async def _until(self, at_s: float) -> None:
        await self.clock.sleep_until(START + timedelta(seconds=at_s))

    async def _open(self) -> None:
        providers = cast(MutableMapping[str, Provider], dict(self.accounts))
        self._plane = ControlPlane(
            self.store,
            providers,
            self.clock,
            installation=INSTALLATION,
            dependencies=ControlPlaneDependencies(
                agent_endpoint=lambda gang: AgentEndpoint(address="call", token=gang),
                open_secrets=_no_secrets,
                storage=_storage,
                for_capabilities=(SuppliedFront(front=self._front),),
            ),
            ids=self._ids,
        )
        await self._plane.start()

    async def _kill(self) -> None:
        """End the server's tasks at once; the clouds and their agents go on without it."""
        plane, self._plane = self._plane, None
        assert plane is not None
        for account in self.accounts.values():
            account.connect(None)
        if plane._task is not None:
            plane._task.cancel()
            with suppress(asyncio.CancelledError):
                await plane._task
        await plane.agents.close()

    async def _close(self) -> None:
        assert self._plane is not None
        await self._plane.stop()

    async def server(self) -> ControlPlane:
        """The server, as soon as one runs."""
        while self._plane is None:
            await self.clock.sleep_until(self.clock.now() + timedelta(seconds=1))
        return self._plane

    async def _restart(self) -> None:
        for at_s in self.plan.times.restarts_s:
            await self._until(at_s)
            await self._kill()
            await self._until(at_s + DOWN_S)
            await self._open()

    async def _cut(self) -> None:
        await self._until(self.plan.times.outage.at_s)
        self.clouds[BROKEN].cut(CUT_OFF)
        self.result.cut_off = self.clouds[BROKEN].lost

    async def _fail_over(self) -> None:
        await self._until(self.plan.times.failover_s)
        self.store.fail(self.clock.now() + timedelta(seconds=FAILOVER_FOR_S))

    async def _submit_all(self) -> None:
        async with asyncio.TaskGroup() as clients:
            plan = self.plan
            for arrival in make_arrivals(plan.jobs, plan.nodes, plan.seed, plan.times):
                await self._until(arrival.at_s)
                clients.create_task(self._submit(arrival))

    async def _submit(self, arrival: Arrival) -> None:
        """Submit as a client does: with an ID of its own, again and again until it is accepted."""
        ask = TaskSubmission(
            task=arrival.task, origin=RunOrigin(), id=self._ids.make(), consented=True
        )
        while True:
            plane = await self.server()
            try:
                await plane.jobs.enqueue(ask, arrival.task.project)
                break
            except StaleVersion:
                break  # an earlier try was stored, and its answer was lost
            except StoreError:
                self.result.repeated += 1
                await self.clock.sleep_until(self.clock.now() + _RETRY)
        self.result.accepted[ask.id] = arrival.fails

    async def _put_services(self) -> None:
        plane = await self.server()
        serving = plane.find(Serving)
        assert serving is not None
        for task in make_services(self.plan.services):
            await serving.requests.put(task, RunOrigin(), user="", consented=True, ceiling=None)

    async def _end_services(self) -> None:
        serving = (await self.server()).find(Serving)
        assert serving is not None
        await serving.requests.end_all()

    async def _watch(self, began: float) -> None:
        while True:
            phases = {
                str(name): int(str(count))
                for name, count in self.store.rows(
                    "SELECT phase, COUNT(*) FROM jobs GROUP BY phase"
                )
            }
            sample = Sample(
                at_s=self._at_s(),
                nodes={name: _count_nodes(cloud) for name, cloud in self.clouds.items()},
                waiting=phases.get("queued", 0),
                running=phases.get("running", 0) + phases.get("starting", 0),
                ended=sum(phases.get(each, 0) for each in ("done", "failed", "stopped")),
                cpu_s=time.process_time() - began,
                rss_mib=_rss_mib(),
            )
            self.result.samples.append(sample)
            if len(self.result.samples) % 6 == 1:
                print(
                    f"  {sample.at_s / 3600:4.1f} h: {sum(sample.nodes.values()):,} nodes, "
                    f"{sample.waiting:,} jobs wait, {sample.running:,} run, {sample.ended:,} "
                    f"ended; {sample.cpu_s:.0f} CPU s, {sample.rss_mib:.0f} MiB",
                    file=sys.stderr,
                    flush=True,
                )
            pause = timedelta(seconds=self.plan.times.at(24) / _SAMPLES)
            await self.clock.sleep_until(self.clock.now() + pause)


def _count_nodes(cloud: DayCloud) -> int:
    """The machines in use; of the own hall, the hosts on which work runs."""
    if not cloud.script.hosts:
        return sum(cloud.in_use.values())
    held = {each.host for gang in cloud.list_alive() for each in gang.spec.allocations}
    return len(held)


def _rss_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def _no_secrets(project: str, names: Sequence[str]) -> dict[str, str]:
    return dict.fromkeys(names, "")


def _storage(job: JobRecord) -> str:
    return "/storage"


class _CountWarnings(logging.Handler):
    """Counts what the server logs, instead of printing it."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__(logging.WARNING)
        self._counts = counts

    def emit(self, entry: logging.LogRecord) -> None:
        what = entry.exc_info[1] if entry.exc_info else None
        self._counts[f"{entry.msg}{f' ({type(what).__name__})' if what else ''}"] += 1


def play_day(plan: DayPlan) -> tuple[Day, Findings]:
    """Play the day and check its books."""

    async def play() -> Day:
        day = Day(plan)
        counts = _CountWarnings(day.result.warnings)
        logger.addHandler(counts)
        logger.propagate = False  # they are counted and not shown
        try:
            await day.play()
        finally:
            logger.propagate = True
            logger.removeHandler(counts)
        return day

    logger = logging.getLogger("cavvy")
    day = run_virtual(play())
    return day, check_books(day.store, day.clouds, day.result.accepted)


def show(day: Day, findings: Findings) -> bool:
    """Print the figures. Returns whether all is as it must be."""
    result, jobs = day.result, findings.jobs
    checks = (
        ("jobs that are lost or ended wrongly", findings.lost),
        ("gangs bought twice", findings.bought_twice),
        ("machines that nobody ordered, or that still run", findings.stray),
        ("devices or hosts held twice", findings.held_twice),
        ("bills that differ from the clouds' books", findings.wrong_bills),
    )
    size = f"{result.plan.nodes:,} nodes, {result.plan.jobs:,} jobs"
    rows: list[tuple[str, object, object, str]] = [
        (what, len(found), 0, record(f"day of {size}: {what}", len(found), 0, ""))
        for what, found in checks
    ]
    rows += [
        (what, figure, "-", "")
        for what, figure in (
            ("jobs that ended", f"{jobs:,}"),
            ("gangs bought", f"{findings.gangs:,}"),
            ("machines lost or reclaimed", f"{findings.lost_machines:,}"),
            ("machines that the outage took", f"{result.cut_off:,}"),
            ("most nodes in use", f"{max(sum(each.nodes.values()) for each in result.samples):,}"),
            ("most jobs that waited", f"{max(each.waiting for each in result.samples):,}"),
            ("requests that clients repeated", f"{result.repeated:,}"),
            ("all bills, USD", f"{findings.billed_micros / 1e6:,.2f}"),
            ("hours until the last job had ended", f"{result.ends_s / 3600:.1f}"),
            ("CPU s, with clouds and agents", f"{result.cpu_s:,.0f}"),
            ("CPU ms for each job, with clouds and agents", f"{1000 * result.cpu_s / jobs:.2f}"),
            ("MiB resident", f"{_rss_mib():,.0f}"),
        )
    ]
    table(f"A day of {size}", ("what", "figure", "bar", ""), rows)
    for what, found in checks:
        for each in found[:5]:
            print(f"  {what}: {each}")
    return not any(found for _, found in checks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=200_000)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--profile", type=Path)
    given = parser.parse_args()
    for file in (given.report, given.profile):
        if file is not None:  # before the day is played, which takes long
            file.parent.mkdir(parents=True, exist_ok=True)
    plan = DayPlan(
        nodes=max(12, round(given.nodes * given.scale)),
        jobs=max(20, round(given.jobs * given.scale)),
        services=max(1, round(2 * given.scale)),
        seed=given.seed,
        times=DayTimes(given.hours),
    )
    profile = cProfile.Profile() if given.profile else None
    if profile:
        profile.enable()
    day, findings = play_day(plan)
    if profile:
        profile.disable()
        profile.dump_stats(given.profile)
    right = show(day, findings)
    if given.report:
        write_day(given.report, day.result, findings)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
