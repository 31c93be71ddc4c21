"""Measures the CPU time of a pass over the queue, and of an arrival and an exit, with many waiting
jobs and many hosts.

Run it: python benchmarks/queue_pass.py [--jobs 20000] [--hosts 10000] [--projects 50] [--users 7]
    [--arrays 0] [--url sqlite:///… | postgresql+psycopg://…]
The jobs are divided equally among the users of the projects, or are the members of so many arrays.
CPU time is that of all threads of this process, without that of PostgreSQL's server. A pass with
new offers compares the jobs with all hosts; the server reads offers every five seconds.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from random import Random

from cavvy.control.clock import VirtualClock
from cavvy.control.control_plane import ControlPlane, ControlPlaneDependencies
from cavvy.control.decide.placement import MarketSnapshot
from cavvy.control.job_service import JobIds
from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.events import Event
from cavvy.domain.jobs import Attempt, AttemptPhase, JobPhase, JobRecord, RunOrigin
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import AcceleratorNeed, IndexRange, ResourceSpec, TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct, replace
from cavvy.planner.candidates import OfferedMarket
from cavvy.providers.base import AgentEndpoint
from cavvy.providers.fake import MANIFEST
from cavvy.providers.fake.cloud import FakeCloud
from cavvy.providers.fake.script import CloudScript
from cavvy.sim.harness import START
from cavvy.store.base import AtomicWrite
from cavvy.store.sql import Store

_GROUP = 500  # jobs that are submitted at once
_TIMES = 5
_GPUS = ResourceSpec(accelerators=(AcceleratorNeed(name="A100", count_min=8),))


def make_offer(number: int) -> Offer:
    return Offer(
        provider="fake",
        region="hall",
        zone=f"h{number}",
        instance_type="A100-80GB",
        accelerator="A100",
        accelerator_count=8,
        accelerator_memory_mib=81_920,
        vcpus=64,
        memory_mib=500_000,
        rate=HourlyRate(0),
        as_of=START,
        shared=True,
    )


def make_host(number: int) -> Host:
    devices = tuple(map(str, range(8)))
    return Host(name=f"fake/h{number}", cpus=64, memory_mib=500_000, devices=devices)


class Owners(Struct, frozen=True):
    """The numbers of projects, and of users in each of them."""

    projects: int = 50
    users: int = 7

    def make_job(self, number: int) -> JobRecord:
        project = f"p{number % self.projects}"
        task = TaskSpec(name=f"n{number}", run=f"train {number}", resources=_GPUS, project=project)
        return JobRecord(
            id=f"j{number:06}",
            project=project,
            name=task.name,
            user=f"u{number // self.projects % self.users}",
            task=task,
            submitted_at=START,
            since=START,
        )


async def submit(store: Store, job: JobRecord) -> JobRecord:
    event = Event(project=job.project, job_id=job.id, at=START, kind="queued", text="submitted")
    return await store.submit(job, event)


async def submit_array(store: Store, job: JobRecord, members: int) -> None:
    task = replace(job.task, array=(IndexRange(0, members - 1),))
    event = Event(project=job.project, job_id=job.id, at=START, kind="queued", text="submitted")
    ids = {f"{job.id}-{index:05}": index for index in range(members)}
    await store.arrays.submit(replace(job, task=task, array_id=job.id), event, ids, None)


async def occupy(store: Store, owners: Owners, number: int) -> Attempt:
    """Let a job run on all GPUs of the host with this number."""
    await store.put_host(make_host(number))
    job = await submit(store, owners.make_job(900_000 + number))
    attempt = Attempt(
        id=f"{job.id}-1",
        job_id=job.id,
        project=job.project,
        number=1,
        gang=f"g{number}",
        offer=make_offer(number),
        nodes=1,
        phase=AttemptPhase.RUNNING,
        created_at=START,
        since=START,
        running_at=START,
    )
    held = Allocation(
        host=f"fake/h{number}",
        gang=attempt.gang,
        rank=0,
        project=job.project,
        cpus=8,
        memory_mib=1000,
        devices=tuple(map(str, range(8))),
    )
    running = replace(job, phase=JobPhase.RUNNING, attempt=1)
    await store.commit(AtomicWrite(jobs=[running], attempts=[attempt], allocations=[held]))
    return attempt


async def open_control_plane(store: Store, hosts: int) -> ControlPlane:
    clock = VirtualClock(START)
    cloud = FakeCloud(MANIFEST, CloudScript(), clock.now)

    async def no_secrets(project: str, names: object) -> dict[str, str]:
        return {}

    control_plane = ControlPlane(
        store,
        {"fake": cloud},
        clock,
        installation="bench",
        dependencies=ControlPlaneDependencies(
            agent_endpoint=lambda gang: AgentEndpoint(address="call", token=gang),
            open_secrets=no_secrets,
            storage=lambda job: "/storage",
        ),
        ids=JobIds(clock, Random(0).getrandbits),
    )
    market = OfferedMarket(
        offers=[make_offer(number) for number in range(hosts)],
        hosts=[make_host(number) for number in range(hosts)],
    )
    renew_offers(control_plane, market)
    return control_plane


def renew_offers(control_plane: ControlPlane, market: OfferedMarket) -> None:
    snapshot = MarketSnapshot(market=market, as_of=START)

    async def read_market(age: object = None) -> MarketSnapshot:
        return snapshot

    control_plane.pool.market = read_market  # type: ignore[method-assign]  # no cloud is asked


async def measure(name: str, act: Callable[[], Awaitable[object]], times: int = _TIMES) -> None:
    spent = []
    for _ in range(times):
        before = time.process_time()
        await act()
        spent.append((time.process_time() - before) * 1000)
    print(f"{name:44}{statistics.median(spent):9.1f}{max(spent):9.1f}", flush=True)


async def fill(store: Store, owners: Owners, jobs: int, hosts: int, arrays: int) -> list[Attempt]:
    """Store the waiting jobs, and a running job on each host. Return the attempts that run."""
    for number in range(arrays):
        await submit_array(store, owners.make_job(number), jobs // arrays)
    for first in range(0, 0 if arrays else jobs, _GROUP):
        some = range(first, min(jobs, first + _GROUP))
        await asyncio.gather(*(submit(store, owners.make_job(number)) for number in some))
    running = []
    for first in range(0, hosts, _GROUP):
        some = range(first, min(hosts, first + _GROUP))
        running += await asyncio.gather(*(occupy(store, owners, number) for number in some))
    return running


async def run(url: str, owners: Owners, jobs: int, hosts: int, arrays: int) -> None:
    store = Store(url)
    await store.open()
    running = await fill(store, owners, jobs, hosts, arrays)
    control_plane = await open_control_plane(store, hosts)
    market = (await control_plane.pool.market()).market
    print(
        f"{jobs:,} waiting jobs in {arrays:,} arrays, {hosts:,} hosts, {owners.projects} projects "
        f"with {owners.users} users"
    )
    print(f"{'CPU ms':44}{'median':>9}{'max':>9}")
    await measure("first pass of a server", lambda: pass_over(control_plane), 1)

    async def pass_with_new_offers() -> None:
        renew_offers(control_plane, replace(market, offers=list(market.offers)))
        await pass_over(control_plane)

    await measure("pass with new offers", pass_with_new_offers)
    await measure("pass in which nothing has changed", lambda: pass_over(control_plane))
    await measure("order of the first jobs", lambda: order(control_plane))
    await measure("arrival and the pass after it", lambda: arrive(control_plane, "p1"))
    names = (f"q{number}" for number in range(_TIMES))
    await measure("arrival with the next turn", lambda: arrive(control_plane, next(names)))
    await measure("exit and the pass after it", lambda: leave(control_plane, running))
    counts = await store.count_jobs(None)
    assert counts.get(JobPhase.STARTING) == _TIMES, counts  # one start for each exit
    assert JobPhase.FAILED not in counts, counts
    await store.close()


async def order(control_plane: ControlPlane) -> None:
    await control_plane.fair_queue.order_heads(16, START)


async def pass_over(control_plane: ControlPlane) -> None:
    await control_plane._queue.reconcile("queue")


async def arrive(control_plane: ControlPlane, project: str) -> None:
    task = TaskSpec(name="new", run="true", resources=_GPUS)
    await control_plane.jobs.submit(task, RunOrigin(), project)
    await pass_over(control_plane)


async def leave(control_plane: ControlPlane, running: list[Attempt]) -> None:
    attempt = running.pop()
    ended = replace(attempt, phase=AttemptPhase.ENDED, ended_at=START + timedelta(1), version=1)
    await control_plane.store.commit(AtomicWrite(attempts=[ended], release=[attempt.gang]))
    await pass_over(control_plane)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--hosts", type=int, default=10_000)
    parser.add_argument("--projects", type=int, default=50)
    parser.add_argument("--users", type=int, default=7)
    parser.add_argument("--arrays", type=int, default=0)
    parser.add_argument("--url", default="")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = asked.url or f"sqlite:///{folder}/c.db"
        owners = Owners(asked.projects, asked.users)
        asyncio.run(run(url, owners, asked.jobs, asked.hosts, asked.arrays))
