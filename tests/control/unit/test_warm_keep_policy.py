"""Whose nodes are kept after their work, for how long, and for whom: nobody else's, and nothing
that nobody pays.
"""

from datetime import datetime, timedelta
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.store_suite import NOW, begin, make_charge, make_job, submit
from tests.records import make_attempt_record, make_job_record

from cavvy.control.clock import ControlClock
from cavvy.control.decide.attempt import AdvanceAttempt
from cavvy.control.decide.attempt_snapshot import MARGIN
from cavvy.control.decide.bills import bill_gang, closing_charges
from cavvy.control.decide.warm_pool import (
    fits,
    hand_over,
    keeps_until,
    list_kept,
    paid_for,
    waits_on,
)
from cavvy.control.warm_pool import WarmGang, WarmGangNotReady, WarmPool
from cavvy.costs.metering import total
from cavvy.domain import jobs
from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import (
    JobLimits,
    NetworkNeed,
    RetryPolicy,
    TaskSpec,
    TopologyNeed,
    Volume,
    VolumeKind,
)
from cavvy.domain.units import HourlyRate, Money, format_usd
from cavvy.domain.values import replace
from cavvy.providers.base import GangSeen, GangState, NodeSeen
from cavvy.store.base import AtomicWrite
from cavvy.store.open import MemoryStore

LATER = NOW + timedelta(minutes=5)
OFFER = Offer(provider="p", region="r", instance_type="t", rate=HourlyRate(1_000_000))
TASK = TaskSpec(name="n", run="x", keep=timedelta(minutes=10))
JOB = make_job_record(NOW, task=TASK, phase=jobs.JobPhase.RUNNING, attempt=1)
ATTEMPT = make_attempt_record(NOW, OFFER, phase=jobs.AttemptPhase.RUNNING)
NODE = jobs.Node(
    attempt_id="j-1",
    project="p",
    rank=0,
    phase=jobs.NodePhase.EXITED,
    exit_outcome=jobs.AttemptOutcome.SUCCEEDED,
)
END = AdvanceAttempt(
    phase=jobs.AttemptPhase.ENDING,
    reason="the work succeeded",
    outcome=jobs.AttemptOutcome.SUCCEEDED,
    exit_code=0,
)
FAILED = replace(END, outcome=jobs.AttemptOutcome.EXIT, exit_code=3)


def kept_for(
    job: jobs.JobRecord,
    attempt: jobs.Attempt,
    node: jobs.Node,
    end: AdvanceAttempt,
    spent: Money | None = None,
) -> timedelta | None:
    """How long the gang is kept; None where it is not."""
    until = keeps_until(job, attempt, [node], (end.outcome, end.exit_code), spent, NOW)
    return None if until is None else until - NOW


def asking(**changes: object) -> jobs.JobRecord:
    return replace(JOB, task=replace(TASK, **changes))  # type: ignore[arg-type]


def test_nodes_are_kept_when_their_work_ends_the_job_by_itself() -> None:
    assert kept_for(JOB, ATTEMPT, NODE, END) == TASK.keep
    assert kept_for(JOB, replace(ATTEMPT, phase=jobs.AttemptPhase.BOOTING), NODE, END) == TASK.keep
    assert (
        kept_for(JOB, ATTEMPT, replace(NODE, exit_outcome=jobs.AttemptOutcome.EXIT), FAILED)
        == TASK.keep
    )


def test_nodes_of_a_machine_are_kept_whatever_else_the_task_says() -> None:
    bound = asking(machine="m", limits=JobLimits(duration=timedelta(hours=1)))
    assert kept_for(bound, replace(ATTEMPT, offer=replace(OFFER, shared=True)), NODE, END)


@pytest.mark.parametrize(
    ("phase", "node", "waits"),
    [
        (jobs.AttemptPhase.RUNNING, NODE, True),
        (jobs.AttemptPhase.BOOTING, NODE, True),
        (jobs.AttemptPhase.RUNNING, replace(NODE, phase=jobs.NodePhase.RUNNING), False),
        (
            jobs.AttemptPhase.RUNNING,
            replace(NODE, exit_outcome=jobs.AttemptOutcome.PREEMPTED),
            False,
        ),
        (jobs.AttemptPhase.KEPT, NODE, True),
        (jobs.AttemptPhase.KEPT, replace(NODE, phase=jobs.NodePhase.RUNNING), True),
        (jobs.AttemptPhase.ENDING, NODE, False),
    ],
)
def test_an_agent_may_wait_for_the_next_job_once_its_work_is_over(
    phase: jobs.AttemptPhase, node: jobs.Node, waits: bool
) -> None:
    attempt = replace(ATTEMPT, phase=phase)
    assert waits_on(JOB, attempt, node) is waits
    if phase is not jobs.AttemptPhase.KEPT:
        assert not waits_on(replace(JOB, released=True), attempt, node)
        assert not waits_on(asking(keep=timedelta(0)), attempt, node)


def test_the_idle_period_before_a_takeover_costs_only_what_was_charged_for_it() -> None:
    kept = replace(ATTEMPT, phase=jobs.AttemptPhase.KEPT, kept_since=NOW)
    idle = replace(make_charge(kept, 10), kind=ChargeKind.KEPT, amount=Money(250_000))
    work = replace(make_charge(kept, 10), amount=Money(9_000_000))
    changes = hand_over(kept, JOB, [work, idle], replace(JOB, id="k", name="next"), LATER)
    assert changes.events[1].text == (
        f"job next took over the gang, whose last idle period cost {format_usd(Money(250_000))}"
    )


@pytest.mark.parametrize(
    ("job", "attempt", "node", "end"),
    [
        (asking(keep=timedelta(0)), ATTEMPT, NODE, END),
        (
            asking(volumes=(Volume(kind=VolumeKind.NAMED, source="v", path="/v"),)),
            ATTEMPT,
            NODE,
            END,
        ),
        (asking(limits=JobLimits(duration=timedelta(hours=1))), ATTEMPT, NODE, END),
        (replace(JOB, stop_reason="enough"), ATTEMPT, NODE, END),
        (replace(JOB, attempt=2), ATTEMPT, NODE, END),
        (replace(JOB, standbys=(2,)), ATTEMPT, NODE, END),
        (JOB, replace(ATTEMPT, offer=replace(OFFER, shared=True)), NODE, END),
        (JOB, replace(ATTEMPT, drill_until=NOW), NODE, END),
        (JOB, ATTEMPT, replace(NODE, notice_until=NOW), END),
        (JOB, ATTEMPT, replace(NODE, phase=jobs.NodePhase.RUNNING), END),
        (JOB, ATTEMPT, replace(NODE, exit_outcome=jobs.AttemptOutcome.PREEMPTED), END),
        (JOB, ATTEMPT, NODE, replace(END, outcome=jobs.AttemptOutcome.PREEMPTED)),
        (JOB, ATTEMPT, NODE, replace(END, outcome=jobs.AttemptOutcome.NODE)),
    ],
    ids=[
        *(
            "not asked for",
            "volumes",
            "duration",
            "stopped",
            "overtaken",
            "a second gang",
            "a shared host",
        ),
        *("drilled", "on notice", "at work", "not by itself", "preempted", "lost"),
    ],
)
def test_other_nodes_are_given_back(
    job: jobs.JobRecord, attempt: jobs.Attempt, node: jobs.Node, end: AdvanceAttempt
) -> None:
    assert kept_for(job, attempt, node, end) is None


def test_work_that_is_tried_again_keeps_nothing() -> None:
    job, node = (
        asking(retry=RetryPolicy(exit=1)),
        replace(NODE, exit_outcome=jobs.AttemptOutcome.EXIT),
    )
    assert kept_for(job, ATTEMPT, node, FAILED) is None
    assert kept_for(replace(job, retries={"exit": 1}), ATTEMPT, node, FAILED) == TASK.keep
    assert kept_for(asking(retry=RetryPolicy(exit=None)), ATTEMPT, node, FAILED) is None


def test_no_longer_than_the_budget_pays() -> None:
    job = asking(limits=JobLimits(budget=Money(200_000)))  # a dollar an hour: 12 minutes in all
    removal = timedelta(seconds=5)
    assert kept_for(job, ATTEMPT, NODE, END, Money(100_000)) == timedelta(minutes=6) - removal
    assert kept_for(job, ATTEMPT, NODE, END, Money(200_000)) is None
    assert kept_for(job, ATTEMPT, NODE, END, Money(300_000)) is None
    assert kept_for(job, ATTEMPT, NODE, END) is None  # nobody knows what is left
    capped = replace(JOB, ceiling=Money(50_000))
    assert kept_for(capped, ATTEMPT, NODE, END, Money(0)) == timedelta(minutes=3) - removal


def test_a_kept_gang_is_for_a_job_of_its_project_that_wants_the_same() -> None:
    assert fits(ATTEMPT, JOB, JOB)
    assert not fits(ATTEMPT, JOB, replace(JOB, project="q"))
    assert not fits(ATTEMPT, JOB, asking(nodes=2))
    assert not fits(ATTEMPT, JOB, asking(topology=TopologyNeed(same="rack")))
    by_user, other = replace(ATTEMPT, offer=replace(OFFER, by_user=True)), replace(JOB, user="eve")
    assert fits(ATTEMPT, JOB, other)
    assert fits(by_user, JOB, JOB)
    assert not fits(by_user, JOB, other), "it runs as the Unix user of the former job"
    assert not fits(ATTEMPT, JOB, asking(image="ubuntu:24.04"))
    assert not fits(ATTEMPT, JOB, asking(retry=RetryPolicy(parallel=2)))
    assert not fits(ATTEMPT, JOB, asking(image_login="KEY"))
    assert not fits(ATTEMPT, JOB, asking(grace=TASK.grace + MINUTE))
    assert not fits(ATTEMPT, JOB, asking(tags={"team": "vision"}))
    for other in ({"disk_gib": 100}, {"disk_type": "io2"}, {"network": NetworkNeed(min_mbps=1000)}):
        assert not fits(ATTEMPT, JOB, asking(resources=replace(TASK.resources, **other)))  # type: ignore[arg-type]


def test_a_project_takes_its_own_gangs_the_longest_kept_first() -> None:
    kept = [
        replace(ATTEMPT, id=name, project=project, kept_since=NOW + minute * MINUTE)
        for name, project, minute in (("a", "p", 3), ("b", "q", 1), ("c", "p", 2))
    ]
    assert [each.id for each in list_kept(kept, "p")] == ["c", "a"]


def test_a_takeover_of_a_machine_says_which_machine() -> None:
    kept = replace(ATTEMPT, phase=jobs.AttemptPhase.KEPT, kept_since=NOW)
    changes = hand_over(kept, JOB, [], asking(machine="m"), LATER)
    assert changes.job is not None
    assert changes.job.reason.startswith("starts on machine m, ")
    plain = hand_over(kept, JOB, [], JOB, LATER).job
    assert plain is not None
    assert plain.reason == f"starts on {OFFER.key}, on the gang kept by job n"


class Ready:
    """Agents that wait for work, and a clock that stands."""

    def now(self) -> datetime:
        return LATER

    def waits(self, attempt: jobs.Attempt) -> bool:
        return True

    def forget(self, attempt: jobs.Attempt) -> None:
        return


@pytest.mark.parametrize(("seconds", "found"), [(1, True), (0, False), (-1, False)])
async def test_a_gang_whose_time_is_over_is_nobodys(seconds: float, found: bool) -> None:
    """Its agents leave then, whether or not the server has looked at it since."""
    store, until = MemoryStore(make_id=lambda: "test"), LATER + timedelta(seconds=seconds)
    former = await submit(store, "j")
    kept = await begin(
        store, former, phase=jobs.AttemptPhase.KEPT, kept_since=NOW, kept_until=until
    )
    await store.commit(AtomicWrite(charges=[make_charge(kept, 10)]))
    ready = Ready()
    warm = WarmPool(store, cast(ControlClock, ready), ready)
    assert (
        isinstance(await warm.find(make_job("k", name="next"), lambda offer: True), WarmGang)
        is found
    )


MINUTE = timedelta(minutes=1)


def seen(*lives: tuple[float, float | None], rates: tuple[tuple[float, int], ...] = ()) -> GangSeen:
    """A gang whose ranks began and ended at these minutes, at prices per hour since when."""
    nodes = [
        NodeSeen(
            rank=rank,
            engine_id=str(rank),
            started_at=NOW + since * MINUTE,
            ended_at=None if until is None else NOW + until * MINUTE,
        )
        for rank, (since, until) in enumerate(lives)
    ]
    prices = tuple((NOW + at * MINUTE, HourlyRate(micros)) for at, micros in rates)
    return GangSeen(name="g", state=GangState.RUNNING, nodes=nodes, rates=prices)


def lines(charges: list[Charge]) -> list[tuple[str, int, float, float, int]]:
    """Kind, rank, from and until in minutes, and micro-dollars."""
    return [
        (str(c.kind), c.rank, (c.since - NOW) / MINUTE, (c.until - NOW) / MINUTE, c.amount.micros)
        for c in charges
    ]


AN_HOUR = replace(
    ATTEMPT, offer=replace(OFFER, rate=HourlyRate(60), minimum_charge=30 * MINUTE)
)  # 1 a minute


def test_the_time_in_which_a_gang_is_kept_has_lines_of_its_own() -> None:
    kept = replace(AN_HOUR, kept_since=NOW + 10 * MINUTE)
    assert lines(bill_gang(kept, seen((0, None), (2, 15)), NOW + 20 * MINUTE, final=False)) == [
        ("node", 0, 0, 10, 10),
        ("kept", 0, 10, 20, 10),
        ("node", 1, 2, 10, 8),
        ("kept", 1, 10, 15, 5),
    ]
    assert lines(bill_gang(kept, seen((0, 8)), NOW + 20 * MINUTE, final=False)) == [
        ("node", 0, 0, 8, 8)
    ]
    early = replace(seen((0, None)), nodes=[NodeSeen(rank=0, engine_id="0")])
    assert bill_gang(kept, early, NOW + 20 * MINUTE, final=True) == [], "it has not begun"


def test_who_takes_a_gang_over_pays_from_then_on_and_the_minimum_is_of_the_whole_life() -> None:
    adopted = replace(AN_HOUR, adopted_at=NOW + 10 * MINUTE)
    assert lines(bill_gang(adopted, seen((0, 20)), NOW + 99 * MINUTE, final=True)) == [
        ("node", 0, 10, 20, 10),
        ("minimum", 0, 20, 30, 10),
    ]
    assert lines(bill_gang(adopted, seen((0, 40)), NOW + 99 * MINUTE, final=True)) == [
        ("node", 0, 10, 40, 30)
    ]
    assert lines(bill_gang(adopted, seen((12, None)), NOW + 14 * MINUTE, final=False)) == [
        ("node", 0, 12, 14, 2)
    ]
    dearer = seen((0, None), rates=((0, 60), (15, 120)))
    assert lines(bill_gang(adopted, dearer, NOW + 20 * MINUTE, final=False)) == [
        ("node", 0, 10, 15, 5),
        ("node", 0, 15, 20, 10),
    ]


KEPT = replace(AN_HOUR, nodes=2, kept_since=NOW + 10 * MINUTE)


def written(
    attempt: jobs.Attempt, told: GangSeen, minute: float, *, final: bool = False
) -> dict[object, Charge]:
    """The rows as a store keeps them: one for each rank, kind and beginning."""
    charges = bill_gang(attempt, told, NOW + minute * MINUTE, final=final)
    return {(c.attempt_id, c.rank, c.kind, c.since): c for c in charges}


@pytest.mark.parametrize("looked", [8, 10, 11])
def test_a_gang_that_is_handed_on_is_paid_until_that_moment(looked: float) -> None:
    """However long ago the last look was: rows that it wrote are made longer, or closed where
    the keeping began.
    """
    rows = written(KEPT, seen((0, None), (2, None)), looked)
    closed = closing_charges(KEPT, rows.values(), NOW + 12 * MINUTE)
    assert closed is not None
    rows.update({(c.attempt_id, c.rank, c.kind, c.since): c for c in closed})
    assert sorted(lines(list(rows.values()))) == [
        ("kept", 0, 10, 12, 2),
        ("kept", 1, 10, 12, 2),
        ("node", 0, 0, 10, 10),
        ("node", 1, 2, 10, 8),
    ]


def test_a_gang_that_is_not_billed_whole_is_not_handed_on() -> None:
    rows = list(written(KEPT, seen((0, None)), 11).values())
    assert closing_charges(KEPT, rows, NOW + 12 * MINUTE) is None
    others = [replace(row, attempt_id="j-9", rank=1) for row in rows]
    minimum = [replace(row, kind=ChargeKind.MINIMUM, rank=1) for row in rows]
    assert closing_charges(KEPT, [*rows, *others, *minimum], NOW + 12 * MINUTE) is None
    assert closing_charges(KEPT, [*rows, replace(rows[-1], rank=1)], NOW + 12 * MINUTE) is not None


minutes = st.integers(1, 50)


@given(minutes, minutes, minutes, minutes, st.integers(0, 60))
def test_the_owners_of_a_gang_pay_its_life_together_once(
    work: int, wait: int, again: int, late: int, least: int
) -> None:
    """Of whole minutes at a whole price, so that nothing is rounded."""
    offer = replace(OFFER, rate=HourlyRate(60), minimum_charge=least * MINUTE)
    first = replace(ATTEMPT, offer=offer, kept_since=NOW + work * MINUTE)
    handed, end = work + wait, work + wait + again
    rows = written(first, seen((0, None)), max(0.5, handed - late))
    closed = closing_charges(first, rows.values(), NOW + handed * MINUTE)
    assert closed is not None
    rows.update({(c.attempt_id, c.rank, c.kind, c.since): c for c in closed})
    second = replace(ATTEMPT, id="k-1", offer=offer, adopted_at=NOW + handed * MINUTE)
    rows.update(written(second, seen((0, end)), end + late, final=True))
    assert total(rows.values()).micros == max(end, least)
    stretches = sorted((c.since, c.until) for c in rows.values())
    assert stretches[0][0] == NOW
    assert all(one[1] == two[0] for one, two in pairwise(stretches))


def test_of_several_stretches_the_last_is_made_longer() -> None:
    dearer = seen((0, None), (0, None), rates=((0, 60), (5, 120)))
    closed = closing_charges(KEPT, written(KEPT, dearer, 8).values(), NOW + 12 * MINUTE)
    assert closed is not None
    assert sorted(lines(closed)) == [
        ("kept", 0, 10, 12, 4),
        ("kept", 1, 10, 12, 4),
        ("node", 0, 0, 5, 5),
        ("node", 0, 5, 10, 10),
        ("node", 1, 0, 5, 5),
        ("node", 1, 5, 10, 10),
    ]


class Busy(Ready):
    """Agents that do not ask for work yet."""

    def waits(self, attempt: jobs.Attempt) -> bool:
        return False


@pytest.mark.parametrize(("age", "soon"), [(9, True), (10, False)])
async def test_a_gang_whose_agents_do_not_wait_yet_is_handed_to_nobody(
    age: float, soon: bool
) -> None:
    """A moment after its work ended they will; later they are gone."""
    store, since = MemoryStore(make_id=lambda: "test"), LATER - timedelta(seconds=age)
    former = await submit(store, "j")
    kept = await begin(
        store, former, phase=jobs.AttemptPhase.KEPT, kept_since=since, kept_until=LATER + MINUTE
    )
    await store.commit(AtomicWrite(charges=[make_charge(kept, 10)]))
    busy = Busy()
    found = await WarmPool(store, cast(ControlClock, busy), busy).find(
        make_job("k", name="next"), lambda offer: True
    )
    assert isinstance(found, WarmGangNotReady) if soon else found is None


@pytest.mark.parametrize(
    ("cap", "spent", "paid_s"),
    [
        (2_000_000, 1_000_000, 3600 - MARGIN.total_seconds()),
        (1_001_000, 1_000_000, 1.8),  # half of 3.6 seconds
        (1_000_000, 1_500_000, 0),
    ],
)
def test_a_gang_is_kept_for_the_rest_of_the_budget_minus_its_removal(
    cap: int, spent: int, paid_s: float
) -> None:
    job = replace(JOB, task=replace(TASK, limits=JobLimits(budget=Money(cap))))
    assert paid_for(job, ATTEMPT, Money(spent)).total_seconds() == paid_s
    assert paid_for(JOB, ATTEMPT, Money(spent)) == timedelta.max
