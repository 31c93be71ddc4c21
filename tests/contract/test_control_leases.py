"""A server of several that has lost its leases."""

import asyncio
from pathlib import Path

from tests.contract.store_suite import store_url
from tests.waits import PATIENCE_S

from cavvy.api.routes.submission import hold_between_servers
from cavvy.control.clock import WallClock
from cavvy.control.control_plane import ControlPlane, ControlPlaneDependencies
from cavvy.control.share import WorkShare
from cavvy.providers.base import AgentEndpoint
from cavvy.store.channel import ReplicaChannel, ServerSignal, SignalKind
from cavvy.store.contacts import AgentContacts
from cavvy.store.leases import Replica, ReplicaLeases
from cavvy.store.sql import Store


async def no_secrets(project: str, names: object) -> dict[str, str]:
    return {}


async def test_a_server_without_leases_may_launch_nothing(tmp_path: Path) -> None:
    url = store_url("postgres", tmp_path)
    store = Store(url)
    await store.open()
    me = Replica(id="one", host="h", pid=1, folder=str(tmp_path), address="unix:/one")
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
            storage=lambda job: str(tmp_path),
            share=share,
        ),
    )
    await plane.start()
    try:
        assert plane.pool.may_launch()
        await leases.leave()
        assert not plane.pool.may_launch()
    finally:
        await plane.stop()
        await store.close()


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
