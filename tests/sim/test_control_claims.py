"""Claims by agents that are older than the server, and what is left of a claim when its attempt
is over.
"""

import asyncio
from dataclasses import replace
from datetime import timedelta

from tests.sim.test_control_desks import HOST, House, in_house, no_secrets

from cavvy.control.agents.desk import AgentDesk, Supplies
from cavvy.domain.jobs import Attempt, AttemptPhase, Job, Outcome
from cavvy.domain.messages import CheckpointWork, Go, MessageKind, Refused, Wait
from cavvy.domain.protocol import OLDEST, PROTOCOL
from cavvy.domain.tasks import Checkpoint, Transfer
from cavvy.providers.fake.script import DEFAULT

FAR = (Transfer(source="s3://bucket/data", target="data"),)


def test_an_older_agent_gets_no_work_that_it_would_do_without_a_part() -> None:
    async def story(house: House) -> None:
        job = await house.submit(secrets=(), inputs=FAR)
        await house.wait()
        gang, desk = await house.gang(job), house.plant.agents
        refused = await desk.claim(gang, 0, "old", "a", HOST, protocol=OLDEST)
        assert isinstance(refused, Refused)
        assert (
            refused.reason
            == f"it speaks protocol {OLDEST}, which has no inputs or outputs at a URL"
        )
        assert (await house.node(job)).claim is None, "the rank is left for an agent of today"
        told = [event.text for event in await house.store.events(job.id) if event.kind == "agent"]
        assert told == [
            f"the agent of rank 0 is older than the server and got no work: {refused.reason}"
        ]
        go = await desk.claim(gang, 0, "new", "a", HOST, protocol=PROTOCOL)
        assert isinstance(go, Go)
        assert [item["source"] for item in go.work.inputs] == ["s3://bucket/data"]

    in_house(story)


def test_an_older_agent_gets_work_all_of_which_it_knows() -> None:
    async def story(house: House) -> None:
        job = await house.submit()
        await house.wait()
        gang = await house.gang(job)
        for protocol in (OLDEST, PROTOCOL + 1):
            assert isinstance(
                await house.plant.agents.claim(gang, 0, "n", "a", HOST, protocol=protocol), Go
            )

    in_house(story)


def test_an_older_agent_does_not_wait_for_the_next_job_on_a_kept_gang() -> None:
    """It would be given work of which nobody has asked whether it knows all."""

    async def story(house: House) -> None:
        job = await house.submit(keep=timedelta(minutes=10))
        await house.wait()
        gang, desk = await house.gang(job), house.plant.agents
        await desk.claim(gang, 0, "n", "a", HOST)
        over = house.message(2, MessageKind.EXITED, outcome=Outcome.SUCCEEDED, exit_code=0)
        await house.report(gang, house.message(1, MessageKind.RUNNING), over)
        await house.wait()
        (kept,) = await house.store.attempts(job.id)
        assert kept.phase is AttemptPhase.KEPT
        refused = await desk.claim(gang, 0, "old", "a", HOST, protocol=PROTOCOL - 1)
        assert isinstance(refused, Refused)
        assert f"protocol {PROTOCOL}" in refused.reason
        assert not desk.waits(kept)
        assert isinstance(await desk.claim(gang, 0, "new", "a", HOST), Wait)
        assert desk.waits(kept)

    in_house(story)


def test_a_checkpoint_that_nobody_waits_for_any_more_is_not_brought() -> None:
    ended: list[str] = []

    async def slow(job: Job, attempt: Attempt) -> CheckpointWork:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            ended.append(attempt.id)
            raise
        return CheckpointWork(path="c", sync=True)

    async def story(house: House) -> None:
        job = await house.submit(secrets=(), checkpoint=Checkpoint(path="c"))
        await house.wait()
        (attempt,) = await house.store.attempts(job.id)
        supplies = Supplies(
            open_secrets=no_secrets, checkpoint=slow, accelerators=lambda job, attempt: 0
        )
        desk = AgentDesk(house.store, house.clock, house.plant.hint, supplies)
        assert isinstance(await desk.claim(attempt.gang, 0, "n", "a", HOST), Wait)
        desk.forget(attempt)
        await house.wait(1)
        assert ended == [attempt.id]

    in_house(story)


def test_what_starts_from_a_checkpoint_asks_for_the_newest_at_every_start() -> None:
    """A rank that comes back later is not given what was newest when the first one came."""
    brought: list[str] = []

    async def ready(job: Job, attempt: Attempt) -> CheckpointWork:
        brought.append(attempt.id)
        return CheckpointWork(path="c", sync=True)

    async def story(house: House) -> None:
        job = await house.submit(secrets=(), checkpoint=Checkpoint(path="c"))
        await house.wait()
        gang = await house.gang(job)
        supplies = Supplies(
            open_secrets=no_secrets, checkpoint=ready, accelerators=lambda job, attempt: 0
        )
        desk = AgentDesk(house.store, house.clock, house.plant.hint, supplies)
        for times in (1, 2):
            assert isinstance(await desk.claim(gang, 0, "n", "a", HOST), Go)
            assert len(brought) == times

    in_house(story)


def test_a_job_that_comes_a_moment_later_is_not_given_the_same_node() -> None:
    """What places told of free nodes is a few seconds old, and knows nothing of the first."""

    async def story(house: House) -> None:
        first = await house.submit()
        await house.wait(0.5)
        second = await house.submit(name="next")
        await house.wait(2)
        assert len(await house.store.attempts(first.id)) == 1
        assert await house.store.attempts(second.id) == []

    in_house(story, offers=(replace(DEFAULT.offers[0], capacity=1),))
