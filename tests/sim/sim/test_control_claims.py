"""Claims by agents that are older than the server, and what is left of a claim when its attempt
is over.
"""

import asyncio
import dataclasses
from datetime import timedelta

from tests.control.sim.test_control_services import HOST, ControlHarness, in_harness, no_secrets

from cavvy.agent.documents import CheckpointConfig
from cavvy.control.agents.dependencies import AgentDependencies
from cavvy.control.agents.sessions import AgentSessions
from cavvy.domain.jobs import Attempt, AttemptOutcome, AttemptPhase, JobRecord
from cavvy.domain.messages import (
    OLDEST,
    PROTOCOL,
    ClaimGranted,
    ClaimRefused,
    ClaimWait,
    MessageKind,
)
from cavvy.domain.tasks import CheckpointPolicy, Transfer
from cavvy.domain.values import replace
from cavvy.providers.fake.script import DEFAULT

FAR = (Transfer(source="s3://bucket/data", target="data"),)


def test_an_older_agent_gets_no_work_that_it_would_do_without_a_part() -> None:
    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit(secrets=(), inputs=FAR)
        await harness.wait()
        gang, sessions = await harness.gang(job), harness.control_plane.agents
        refused = await sessions.claim(gang, 0, "old", "a", HOST, protocol=OLDEST)
        assert isinstance(refused, ClaimRefused)
        assert (
            refused.reason == f"the agent's protocol {OLDEST} does not support inputs or outputs "
            "at a URL"
        )
        assert (await harness.node(job)).claim is None, "the rank is left for an agent of today"
        told = [event.text for event in await harness.store.events(job.id) if event.kind == "agent"]
        assert told == [
            f"the agent of rank 0 is older than the server and was refused work: {refused.reason}"
        ]
        go = await sessions.claim(gang, 0, "new", "a", HOST, protocol=PROTOCOL)
        assert isinstance(go, ClaimGranted)
        assert [item.source for item in go.work.inputs] == ["s3://bucket/data"]

    in_harness(scenario)


def test_an_older_agent_gets_work_all_of_which_it_knows() -> None:
    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit()
        await harness.wait()
        gang = await harness.gang(job)
        for protocol in (OLDEST, PROTOCOL + 1):
            assert isinstance(
                await harness.control_plane.agents.claim(
                    gang, 0, "n", "a", HOST, protocol=protocol
                ),
                ClaimGranted,
            )

    in_harness(scenario)


def test_an_older_agent_does_not_wait_for_the_next_job_on_a_kept_gang() -> None:
    """It would be given work of which nobody has asked whether it knows all."""

    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit(keep=timedelta(minutes=10))
        await harness.wait()
        gang, sessions = await harness.gang(job), harness.control_plane.agents
        await sessions.claim(gang, 0, "n", "a", HOST)
        over = harness.message(2, MessageKind.EXITED, outcome=AttemptOutcome.SUCCEEDED, exit_code=0)
        await harness.report(gang, harness.message(1, MessageKind.RUNNING), over)
        await harness.wait()
        (kept,) = await harness.store.attempts(job.id)
        assert kept.phase is AttemptPhase.KEPT
        refused = await sessions.claim(gang, 0, "old", "a", HOST, protocol=PROTOCOL - 1)
        assert isinstance(refused, ClaimRefused)
        assert f"protocol {PROTOCOL}" in refused.reason
        assert not sessions.waits(kept)
        assert isinstance(await sessions.claim(gang, 0, "new", "a", HOST), ClaimWait)
        assert sessions.waits(kept)

    in_harness(scenario)


def test_ranks_get_each_others_keys_and_the_addresses_of_their_tunnel() -> None:
    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit(nodes=2, encrypt=True, secrets=())
        await harness.wait()
        gang, sessions = await harness.gang(job), harness.control_plane.agents
        refused = await sessions.claim(gang, 0, "old", "10.0.0.1", HOST)
        assert isinstance(refused, ClaimRefused)
        assert "cannot encrypt" in refused.reason
        able = dataclasses.replace(HOST, tunnel_key="A" * 43 + "=")
        unable = dataclasses.replace(HOST, tunnel_missing="the program wg is not installed")
        assert isinstance(await sessions.claim(gang, 0, "a", "10.0.0.1", able), ClaimWait)
        go = await sessions.claim(gang, 1, "b", "10.0.0.2", unable)
        assert isinstance(go, ClaimGranted)
        assert go.work.tunnel is not None
        first, second = go.work.tunnel.peers
        assert go.work.addresses == [first.address, second.address]
        assert first.address.startswith("198.1")
        assert (first.key, second.key) == (able.tunnel_key, "")
        assert second.missing == unable.tunnel_missing
        assert first.endpoint == f"10.0.0.1:{go.work.master_port + 1}"

    in_harness(scenario)


def test_agents_that_wait_for_their_gang_get_the_work_when_it_is_complete() -> None:
    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit(nodes=4, secrets=())
        await harness.wait()
        gang, sessions = await harness.gang(job), harness.control_plane.agents

        async def claim(rank: int, wait_s: float, here: AgentSessions = sessions) -> object:
            wait = timedelta(seconds=wait_s)
            return await here.claim(gang, rank, f"n{rank}", f"10.0.0.{rank}", HOST, wait=wait)

        began = harness.clock.now()
        assert isinstance(await claim(0, 0), ClaimWait), "agents that cannot wait ask again"
        assert isinstance(await claim(0, 5), ClaimWait)
        assert harness.clock.now() - began == timedelta(seconds=5)
        # others claim elsewhere, and at the same time, so that none of them sees the last claim
        there = AgentSessions(
            harness.store, harness.clock, harness.control_plane.hint, sessions._dependencies
        )
        first = asyncio.create_task(claim(0, 60))
        second = asyncio.create_task(claim(1, 60, there))
        await harness.wait(3)
        assert not first.done()
        began = harness.clock.now()
        last = await asyncio.gather(claim(2, 60), claim(3, 60))
        assert harness.clock.now() == began
        for answer in (await first, await second, *last):
            assert isinstance(answer, ClaimGranted)
            assert answer.work.addresses == [f"10.0.0.{rank}" for rank in range(4)]

    in_harness(scenario)


def test_agents_that_wait_for_their_gang_are_answered_when_the_server_stops() -> None:
    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit(nodes=2, secrets=())
        await harness.wait()
        gang, sessions = await harness.gang(job), harness.control_plane.agents
        waits = asyncio.create_task(
            sessions.claim(gang, 0, "n", "a", HOST, wait=timedelta(hours=1))
        )
        await harness.wait(1)
        began = harness.clock.now()
        sessions.wake(gang)  # as a server that stops
        assert isinstance(await waits, ClaimWait)
        assert harness.clock.now() == began

    in_harness(scenario)


def test_a_checkpoint_that_nobody_waits_for_any_more_is_not_brought() -> None:
    ended: list[str] = []

    async def slow(job: JobRecord, attempt: Attempt) -> CheckpointConfig:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            ended.append(attempt.id)
            raise
        return CheckpointConfig(path="c", sync=True)

    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit(secrets=(), checkpoint=CheckpointPolicy(path="c"))
        await harness.wait()
        (attempt,) = await harness.store.attempts(job.id)
        agent_dependencies = AgentDependencies(
            open_secrets=no_secrets, checkpoint=slow, accelerators=lambda job, attempt: 0
        )
        sessions = AgentSessions(
            harness.store, harness.clock, harness.control_plane.hint, agent_dependencies
        )
        assert isinstance(await sessions.claim(attempt.gang, 0, "n", "a", HOST), ClaimWait)
        sessions.forget(attempt)
        await harness.wait(1)
        assert ended == [attempt.id]

    in_harness(scenario)


def test_what_starts_from_a_checkpoint_asks_for_the_newest_at_every_start() -> None:
    """A rank that comes back later is not given what was newest when the first one came."""
    brought: list[str] = []

    async def ready(job: JobRecord, attempt: Attempt) -> CheckpointConfig:
        brought.append(attempt.id)
        return CheckpointConfig(path="c", sync=True)

    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit(secrets=(), checkpoint=CheckpointPolicy(path="c"))
        await harness.wait()
        gang = await harness.gang(job)
        agent_dependencies = AgentDependencies(
            open_secrets=no_secrets, checkpoint=ready, accelerators=lambda job, attempt: 0
        )
        sessions = AgentSessions(
            harness.store, harness.clock, harness.control_plane.hint, agent_dependencies
        )
        for times in (1, 2):
            assert isinstance(await sessions.claim(gang, 0, "n", "a", HOST), ClaimGranted)
            assert len(brought) == times

    in_harness(scenario)


def test_a_job_that_comes_a_moment_later_is_not_given_the_same_node() -> None:
    """What places told of free nodes is a few seconds old, and knows nothing of the first."""

    async def scenario(harness: ControlHarness) -> None:
        first = await harness.submit()
        await harness.wait(0.5)
        second = await harness.submit(name="next")
        await harness.wait(2)
        assert len(await harness.store.attempts(first.id)) == 1
        assert await harness.store.attempts(second.id) == []

    in_harness(scenario, offers=(replace(DEFAULT.offers[0], capacity=1),))
