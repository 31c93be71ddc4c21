"""A server of several that has lost its leases."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from tests.contract.store_suite import NOW, store_url, submit
from tests.scheduler.contract.test_store_arrays import Spec
from tests.waits import PATIENCE_S

from cavvy.api.routes.submission import hold_between_servers
from cavvy.control import control_plane
from cavvy.control.clock import WallClock
from cavvy.control.control_plane import ControlPlane, ControlPlaneDependencies
from cavvy.control.share import WorkShare
from cavvy.domain.jobs import FAR, JobPhase
from cavvy.domain.tasks import JobDependency, StartCondition
from cavvy.domain.values import replace
from cavvy.providers.base import AgentEndpoint
from cavvy.store.base import AtomicWrite, StaleVersion
from cavvy.store.channel import AgentContacts, ReplicaChannel, ServerSignal, SignalKind
from cavvy.store.leases import Replica, ReplicaLeases
from cavvy.store.sql import Store


async def no_secrets(project: str, names: object) -> dict[str, str]:
    return {}


@asynccontextmanager
async def serve(folder: Path) -> AsyncIterator[tuple[Store, ReplicaLeases, ControlPlane]]:
    """The first of several servers."""
    url = store_url("postgres", folder)
    store = Store(url)
    await store.open()
    me = Replica(id="one", host="h", pid=1, folder=str(folder), address="unix:/one")
    leases = ReplicaLeases(url, me)
    share = WorkShare(leases, ReplicaChannel(url, "one"), AgentContacts(url, "one"))
    await leases.join()
    plane = ControlPlane(
        store,
        {},
        WallClock(),
        installation="i",
        dependencies=ControlPlaneDependencies(
            agent_endpoint=lambda gang: AgentEndpoint(address="unix:/x", token=gang),
            open_secrets=no_secrets,
            storage=lambda job: str(folder),
            share=share,
        ),
    )
    try:
        yield store, leases, plane
    finally:
        await plane.stop()
        await store.close()


async def test_a_server_without_leases_may_launch_nothing(tmp_path: Path) -> None:
    async with serve(tmp_path) as (_, leases, plane):
        await plane.start()
        assert plane.pool.may_launch()
        await leases.leave()
        assert not plane.pool.may_launch()


async def test_a_job_starts_after_one_whose_end_no_server_has_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_plane, "RECHECK", timedelta(seconds=0.05))
    looks: list[int] = []
    live_versions = Store.live_versions

    async def count_looks(store: Store) -> dict[str, int]:
        found = await live_versions(store)
        looks.append(len(found))
        return found

    monkeypatch.setattr(Store, "live_versions", count_looks)
    async with serve(tmp_path) as (store, _, plane), asyncio.timeout(PATIENCE_S):
        await submit(store, "j1", name="a")
        await Spec(array_id="s", count=2).submit(store)
        for name, first in (("j2", "j1"), ("j3", "s")):
            after = (JobDependency(first, StartCondition.ANY, id=first),)
            await submit(store, name, name=name, not_before=FAR, after=after)
        await plane.start()
        while not looks:
            await asyncio.sleep(0.01)
        # another server has written this, and its signal was lost
        left = ["j1", *await store.arrays.jobs("s")]
        while left:
            ended = replace(await store.job(left[0]), phase=JobPhase.DONE, ended_at=NOW)
            with suppress(StaleVersion):  # the queue has written why it waits
                await store.commit(AtomicWrite(jobs=[ended]))
                del left[0]
        while (await store.job("j2")).after or (await store.job("j3")).after:
            await asyncio.sleep(0.01)


async def test_a_server_that_has_just_started_gets_the_signals_of_others(tmp_path: Path) -> None:
    url = store_url("postgres", tmp_path)
    leases, other = (
        ReplicaLeases(url, Replica(id=name, host="h", pid=1, folder=name, address=f"unix:/{name}"))
        for name in ("one", "two")
    )
    share = WorkShare(leases, ReplicaChannel(url, "one"), AgentContacts(url, "one"))
    await leases.join()
    heard: list[ServerSignal] = []
    channel = ReplicaChannel(url, "two")
    await share.start()
    try:
        await other.join()
        channel.start(heard.extend)
        async with asyncio.timeout(PATIENCE_S):  # the first server does not know the other one yet
            while not heard:  # until the other server listens
                share.send(SignalKind.WAKE, "both")
                await asyncio.sleep(0.01)
        assert {each.key for each in heard} == {"both"}
    finally:
        await channel.close()
        await other.leave()
        await share.close()


async def test_only_one_of_several_servers_counts_the_jobs_of_a_user(tmp_path: Path) -> None:
    url = store_url("postgres", tmp_path)
    shares = [
        WorkShare(
            ReplicaLeases(
                url, Replica(id=name, host="h", pid=1, folder=name, address=f"unix:/{name}")
            ),
            ReplicaChannel(url, name),
            AgentContacts(url, name),
        )
        for name in ("one", "two")
    ]
    inside: list[int] = []
    seen: list[int] = []

    async def count(share: WorkShare) -> None:
        async with hold_between_servers(share, "waiting jobs of ann"):
            inside.append(1)
            await asyncio.sleep(0)
            seen.append(len(inside))
            inside.pop()

    await asyncio.gather(*(count(share) for share in shares * 3))
    assert seen == [1] * 6
