"""Measures the CPU time of a pass over the queue, and of an arrival and an exit, with many waiting
jobs and many hosts.

Run it: python benchmarks/queue_pass.py [--jobs 20000] [--hosts 10000]
CPU time is that of all threads of this process, with SQLite.
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
from cavvy.domain.tasks import AcceleratorNeed, ResourceSpec, TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
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


def make_job(number: int) -> JobRecord:
    task = TaskSpec(name=f"n{number}", run="true", resources=_GPUS, project=f"p{number % 50}")
    return JobRecord(
        id=f"j{number:06}",
        project=task.project,
        name=task.name,
        user=f"u{number % 7}",
        task=task,
        submitted_at=START,
        since=START,
    )


async def submit(store: Store, number: int) -> JobRecord:
    job = make_job(number)
    event = Event(project=job.project, job_id=job.id, at=START, kind="queued", text="submitted")
    return await store.submit(job, event)


async def occupy(store: Store, number: int) -> Attempt:
    """Let a job run on all GPUs of the host with this number."""
    await store.put_host(make_host(number))
    job = await submit(store, 900_000 + number)
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
    snapshot = MarketSnapshot(market=market, as_of=START)

    async def read_market(age: object = None) -> MarketSnapshot:
        return snapshot

    control_plane.pool.market = read_market  # type: ignore[method-assign]  # no cloud is asked
    return control_plane


async def measure(name: str, act: Callable[[], Awaitable[object]], times: int = _TIMES) -> None:
    spent = []
    for _ in range(times):
        before = time.process_time()
        await act()
        spent.append((time.process_time() - before) * 1000)
    print(f"{name:44}{statistics.median(spent):9.1f}{max(spent):9.1f}", flush=True)


async def run(jobs: int, hosts: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(f"sqlite:///{folder}/c.db")
        await store.open()
        for first in range(0, jobs, _GROUP):
            await asyncio.gather(
                *(submit(store, each) for each in range(first, min(jobs, first + _GROUP)))
            )
        gangs = []
        for first in range(0, hosts, _GROUP):
            gangs += await asyncio.gather(
                *(occupy(store, each) for each in range(first, min(hosts, first + _GROUP)))
            )
        control_plane = await open_control_plane(store, hosts)
        print(f"{jobs:,} waiting jobs, {hosts:,} hosts: CPU ms      median      max")
        await measure("order of the first jobs", lambda: order(control_plane))
        await measure("pass in which no job can start", lambda: pass_over(control_plane))
        await measure("arrival and the pass after it", lambda: arrive(control_plane))
        await measure("exit and the pass after it", lambda: leave(control_plane, gangs))
        await store.close()


async def order(control_plane: ControlPlane) -> None:
    await control_plane.fair_queue.order_heads(16, START)


async def pass_over(control_plane: ControlPlane) -> None:
    await control_plane._queue.reconcile("queue")


async def arrive(control_plane: ControlPlane) -> None:
    task = TaskSpec(name="new", run="true", resources=_GPUS)
    await control_plane.jobs.submit(task, RunOrigin(), "p1")
    await pass_over(control_plane)


async def leave(control_plane: ControlPlane, gangs: list[Attempt]) -> None:
    attempt = gangs.pop()
    ended = replace(attempt, phase=AttemptPhase.ENDED, ended_at=START + timedelta(1), version=1)
    await control_plane.store.commit(AtomicWrite(attempts=[ended], release=[attempt.gang]))
    await pass_over(control_plane)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--hosts", type=int, default=10_000)
    asked = parser.parse_args()
    asyncio.run(run(asked.jobs, asked.hosts))
