"""Whose nodes are kept after their work, for how long, and for whom: nobody else's, and nothing that nobody pays."""

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta
from typing import cast

import pytest
from tests.contract.store_suite import NOW, begin, make_charge, make_job, submit

from remuda.control.attempts import Advance
from remuda.control.clock import Clock
from remuda.control.warm.gangs import Kept, WarmGangs
from remuda.control.warm.keep import fits, keep_or_end
from remuda.domain.jobs import Attempt, AttemptPhase, Job, JobPhase, Node, NodePhase, Outcome
from remuda.domain.offers import Offer
from remuda.domain.tasks import Limits, Retry, Task, Volume, VolumeKind
from remuda.domain.units import HourlyRate, Money
from remuda.store.base import Changes
from remuda.store.memory import MemoryStore

LATER = NOW + timedelta(minutes=5)
OFFER = Offer(provider="p", region="r", instance_type="t", rate=HourlyRate(1_000_000))
TASK = Task(name="n", run="x", keep=timedelta(minutes=10))
JOB = Job(id="j", project="p", name="n", task=TASK, phase=JobPhase.RUNNING, submitted_at=NOW, since=NOW, attempt=1)
ATTEMPT = Attempt(
    id="j-1", job_id="j", project="p", number=1, gang="g", offer=OFFER, nodes=1, phase=AttemptPhase.RUNNING,
    created_at=NOW, since=NOW,
)  # fmt: skip
NODE = Node(attempt_id="j-1", project="p", rank=0, phase=NodePhase.EXITED, exit_outcome=Outcome.SUCCEEDED)
END = Advance(phase=AttemptPhase.ENDING, reason="the work ended well", outcome=Outcome.SUCCEEDED, exit_code=0)
FAILED = replace(END, outcome=Outcome.EXIT, exit_code=3)


def kept_for(job: Job, attempt: Attempt, node: Node, end: Advance, spent: Money | None = None) -> timedelta | None:
    """How long the gang is kept; None where it is not."""
    found = keep_or_end(job, attempt, [node], end, spent, NOW)
    if found.phase is AttemptPhase.KEPT:
        assert found.until is not None
        return found.until - NOW
    assert found == end
    return None


def asking(**changes: object) -> Job:
    return replace(JOB, task=replace(TASK, **changes))  # type: ignore[arg-type]


def test_nodes_are_kept_when_their_work_ends_the_job_by_itself() -> None:
    assert kept_for(JOB, ATTEMPT, NODE, END) == TASK.keep
    assert kept_for(JOB, replace(ATTEMPT, phase=AttemptPhase.BOOTING), NODE, END) == TASK.keep
    assert kept_for(JOB, ATTEMPT, replace(NODE, exit_outcome=Outcome.EXIT), FAILED) == TASK.keep


@pytest.mark.parametrize(
    ("job", "attempt", "node", "end"),
    [
        (asking(keep=timedelta(0)), ATTEMPT, NODE, END),
        (asking(volumes=(Volume(kind=VolumeKind.NAMED, source="v", path="/v"),)), ATTEMPT, NODE, END),
        (asking(limits=Limits(duration=timedelta(hours=1))), ATTEMPT, NODE, END),
        (replace(JOB, stop_reason="enough"), ATTEMPT, NODE, END),
        (replace(JOB, attempt=2), ATTEMPT, NODE, END),
        (replace(JOB, reliefs=(2,)), ATTEMPT, NODE, END),
        (JOB, replace(ATTEMPT, offer=replace(OFFER, shared=True)), NODE, END),
        (JOB, replace(ATTEMPT, drill_until=NOW), NODE, END),
        (JOB, ATTEMPT, replace(NODE, notice_until=NOW), END),
        (JOB, ATTEMPT, replace(NODE, phase=NodePhase.RUNNING), END),
        (JOB, ATTEMPT, replace(NODE, exit_outcome=Outcome.PREEMPTED), END),
        (JOB, ATTEMPT, NODE, replace(END, outcome=Outcome.PREEMPTED)),
        (JOB, ATTEMPT, NODE, replace(END, outcome=Outcome.NODE)),
    ],
    ids=[
        *("not asked for", "volumes", "duration", "stopped", "overtaken", "a second gang", "a shared host"),
        *("drilled", "on notice", "at work", "not by itself", "preempted", "lost"),
    ],
)
def test_other_nodes_are_given_back(job: Job, attempt: Attempt, node: Node, end: Advance) -> None:
    assert kept_for(job, attempt, node, end) is None


def test_work_that_is_tried_again_keeps_nothing() -> None:
    job, node = asking(retry=Retry(exit=1)), replace(NODE, exit_outcome=Outcome.EXIT)
    assert kept_for(job, ATTEMPT, node, FAILED) is None
    assert kept_for(replace(job, retries={"exit": 1}), ATTEMPT, node, FAILED) == TASK.keep
    assert kept_for(asking(retry=Retry(exit=None)), ATTEMPT, node, FAILED) is None


def test_no_longer_than_the_budget_pays() -> None:
    job = asking(limits=Limits(budget=Money(200_000)))  # a dollar an hour: 12 minutes in all
    assert kept_for(job, ATTEMPT, NODE, END, Money(100_000)) == timedelta(minutes=6)
    assert kept_for(job, ATTEMPT, NODE, END, Money(200_000)) is None
    assert kept_for(job, ATTEMPT, NODE, END, Money(300_000)) is None
    assert kept_for(job, ATTEMPT, NODE, END) is None  # nobody knows what is left
    assert kept_for(replace(JOB, ceiling=Money(50_000)), ATTEMPT, NODE, END, Money(0)) == timedelta(minutes=3)


def test_a_kept_gang_is_for_a_job_of_its_project_that_wants_the_same() -> None:
    assert fits(ATTEMPT, JOB, JOB)
    assert not fits(ATTEMPT, JOB, replace(JOB, project="q"))
    assert not fits(ATTEMPT, JOB, asking(nodes=2))
    assert not fits(ATTEMPT, JOB, asking(image="ubuntu:24.04"))
    assert not fits(ATTEMPT, JOB, asking(retry=Retry(parallel=2)))


class Ready:
    """Agents that wait for work, and a clock that stands."""

    def now(self) -> datetime:
        return LATER

    def waits(self, attempt: Attempt) -> bool:
        return True

    def forget(self, attempt: Attempt) -> None:
        return


@pytest.mark.parametrize(("seconds", "found"), [(1, True), (0, False), (-1, False)])
def test_a_gang_whose_time_is_over_is_nobodys(seconds: float, found: bool) -> None:
    """Its agents leave then, whether or not the server has looked at it since."""

    async def story() -> None:
        store, until = MemoryStore(make_id=lambda: "test"), LATER + timedelta(seconds=seconds)
        former = await submit(store, "j")
        kept = await begin(store, former, phase=AttemptPhase.KEPT, kept_since=NOW, kept_until=until)
        await store.commit(Changes(charges=[make_charge(kept, 10)]))
        ready = Ready()
        warm = WarmGangs(store, cast(Clock, ready), ready)
        assert isinstance(await warm.find(make_job("k", name="next"), lambda offer: True), Kept) is found

    asyncio.run(story())
