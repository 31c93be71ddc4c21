"""A second gang beside a job's own: when it gets the job, and what may not happen to the first meanwhile."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from remuda.control.clock import VirtualClock
from remuda.control.jobs import Requeue
from remuda.control.markets.reliefs import Beside, Reliefs
from remuda.control.scene import Scene
from remuda.domain.jobs import Attempt, AttemptPhase, Job, JobPhase, Node, NodePhase, Origin, Outcome
from remuda.domain.offers import Offer, Purchase
from remuda.domain.tasks import Limits, Resources, SpotPolicy, Task
from remuda.domain.units import HourlyRate, Money
from remuda.planner.courses import Advice
from remuda.planner.spot.view import Mode

NOW = datetime(2030, 1, 1, tzinfo=UTC)
SPOT = Offer(provider="p", region="r", instance_type="t", purchase=Purchase.SPOT, rate=HourlyRate(600_000))
FIXED = replace(SPOT, purchase=Purchase.ON_DEMAND, rate=HourlyRate(1_200_000))
TASK = Task(
    name="digits",
    run="train",
    nodes=2,
    resources=Resources(spot=SpotPolicy.AUTO),
    limits=Limits(deadline_after=timedelta(hours=8), budget=Money(2_000_000)),
)
JOB = Job(
    id="j",
    project="p",
    name="digits",
    task=TASK,
    origin=Origin(),
    phase=JobPhase.STARTING,
    submitted_at=NOW,
    since=NOW,
    attempt=1,
    numbered=1,
)


def attempt(number: int, phase: AttemptPhase = AttemptPhase.BOOTING) -> Attempt:
    return Attempt(
        id=f"j-{number}",
        job_id="j",
        project="p",
        number=number,
        gang=f"g{number}",
        offer=SPOT if number == 1 else FIXED,
        nodes=2,
        phase=phase,
        created_at=NOW,
        since=NOW,
    )


def ranks(number: int, *claims: str | None) -> list[Node]:
    return [
        Node(attempt_id=f"j-{number}", project="p", rank=rank, claim=claim, phase=NodePhase.CLAIMED)
        for rank, claim in enumerate(claims)
    ]


class Advisor:
    """Wants the job to be on demand."""

    async def review(self, *_: object) -> Advice:
        return Advice(mode=Mode.ON_DEMAND, offers=(FIXED,), reason="this is the last moment")


class Nowhere:
    """A list of places that nobody asks."""

    def expire(self) -> None:
        return


def reliefs() -> Reliefs:
    beside = Beside(guide=cast("Any", Advisor()), places=cast("Any", Nowhere()), gang_of=lambda name: f"gang-{name}")
    return Reliefs(VirtualClock(NOW), beside)


def test_a_rank_of_the_old_gang_that_is_being_claimed_is_not_granted_once_the_job_changed_hands() -> None:
    """All its rows are written with the takeover, so a claim that read them before is stale."""
    job = replace(JOB, reliefs=(2,), numbered=2)
    scene = Scene(job, [attempt(1), attempt(2)], [ranks(1, "a", None), ranks(2, "b", "c")])
    assert asyncio.run(reliefs().step(scene)) is None
    changes = scene.take_changes()
    assert changes.jobs[0].attempt == 2
    assert {(node.attempt_id, node.rank) for node in changes.nodes} >= {("j-1", 0), ("j-1", 1)}


def test_a_gang_that_may_have_its_work_keeps_the_job() -> None:
    job = replace(JOB, reliefs=(2,), numbered=2)
    scene = Scene(job, [attempt(1), attempt(2)], [ranks(1, "a", "d"), ranks(2, "b", "c")])
    asyncio.run(reliefs().step(scene))
    assert scene.job.attempt == 1


@pytest.mark.parametrize(
    ("phases", "phase", "attempts"),
    [
        ((NodePhase.EXITED, NodePhase.RUNNING), AttemptPhase.ENDING, 1),
        ((NodePhase.EXITED, NodePhase.EXITED), AttemptPhase.ENDING, 2),
        ((NodePhase.RUNNING, NodePhase.RUNNING), AttemptPhase.ENDED, 2),
    ],
)
def test_a_lost_gang_gives_the_job_away_once_none_of_it_can_work(
    phases: tuple[NodePhase, ...], phase: AttemptPhase, attempts: int
) -> None:
    lost = replace(attempt(1, phase), outcome=Outcome.PREEMPTED)
    nodes = [replace(node, phase=now) for node, now in zip(ranks(1, "a", "b"), phases, strict=True)]
    scene = Scene(replace(JOB, reliefs=(2,), numbered=2), [lost, attempt(2)], [nodes, ranks(2, "c", "d")])
    reliefs().take_over(scene, Requeue(kind="preemption", reason="taken"), NOW)
    assert scene.job.attempt == attempts


@pytest.mark.parametrize(("spent", "starts"), [(0, True), (1_150_000, True), (1_250_000, False), (None, False)])
def test_a_second_gang_starts_only_if_the_budget_pays_for_two(spent: int | None, starts: bool) -> None:
    """Ten minutes of two nodes at 1.20 an hour are 0.40, and twice that has to be left."""
    scene = Scene(JOB, [attempt(1)], [ranks(1, "a", "b")])
    scene.spent = None if spent is None else Money(spent)
    asyncio.run(reliefs().step(scene))
    assert bool(scene.job.reliefs) is starts
