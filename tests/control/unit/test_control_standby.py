"""A second gang for a job with a gang: when it gets the job, and what may not happen to the first
meanwhile.
"""

from datetime import UTC, datetime, timedelta

import pytest
from tests.records import make_attempt_record, make_job_record

from cavvy.control.decide.job import AdvanceJob, JobSnapshot, RequeueJob, TakeOver, decide_job
from cavvy.control.decide.rows import NEVER, RowChanges, Step
from cavvy.control.decide.standby import (
    AskAdvisor,
    StandbyQuestion,
    answer_standby,
    decide_standby,
    list_started,
    take_over,
)
from cavvy.control.unit_of_work import UnitOfWork
from cavvy.domain import tasks
from cavvy.domain.jobs import (
    Attempt,
    AttemptOutcome,
    AttemptPhase,
    JobPhase,
    Node,
    NodePhase,
    PlanState,
    RunOrigin,
)
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.planner.deadline.recommendation import Recommendation
from cavvy.planner.spot.view import RunMode

NOW = datetime(2030, 1, 1, tzinfo=UTC)
SPOT = Offer(
    provider="p", region="r", instance_type="t", purchase=Purchase.SPOT, rate=HourlyRate(600_000)
)
FIXED = replace(SPOT, purchase=Purchase.ON_DEMAND, rate=HourlyRate(1_200_000))
FREE = replace(FIXED, rate=HourlyRate(0))
ELSEWHERE = replace(SPOT, region="s")
NEAR = replace(FIXED, region="s")
TASK = tasks.TaskSpec(
    name="digits",
    run="train",
    nodes=2,
    resources=tasks.ResourceSpec(spot=tasks.SpotPolicy.AUTO),
    limits=tasks.JobLimits(deadline_after=timedelta(hours=8), budget=Money(2_000_000)),
)
JOB = make_job_record(
    NOW,
    name="digits",
    task=TASK,
    origin=RunOrigin(),
    phase=JobPhase.STARTING,
    attempt=1,
    numbered=1,
)


def attempt(number: int, phase: AttemptPhase = AttemptPhase.BOOTING) -> Attempt:
    return make_attempt_record(
        NOW,
        SPOT if number == 1 else FIXED,
        id=f"j-{number}",
        number=number,
        gang=f"g{number}",
        nodes=2,
        phase=phase,
    )


def ranks(number: int, *claims: str | None) -> list[Node]:
    return [
        Node(attempt_id=f"j-{number}", project="p", rank=rank, claim=claim, phase=NodePhase.CLAIMED)
        for rank, claim in enumerate(claims)
    ]


WANTED = Recommendation(mode=RunMode.ON_DEMAND, offers=(FIXED,), reason="on-demand must start now")


def step(
    uow: UnitOfWork, recommendation: Recommendation | None = None, at: datetime = NOW
) -> timedelta | None:
    """One step of a job whose advisor says this, where it is asked."""
    told = recommendation or WANTED
    decided = decide_standby(uow.rows, {}, at)
    if decided.changes is not None:
        uow.apply(decided.changes)
    if isinstance(decided, AskAdvisor):
        if decided.question is StandbyQuestion.AHEAD:
            told = replace(told, offers=(ELSEWHERE,), stay=False, reason="at risk")
        decided = answer_standby(uow.rows, decided, told, lambda name: f"gang-{name}", at)
        if decided.changes is not None:
            uow.apply(decided.changes)
    return decided.after


def hand_over(uow: UnitOfWork, again: TakeOver) -> None:
    changes = take_over(uow.rows, again, NOW).changes
    if changes is not None:
        uow.apply(changes)


def test_a_rank_of_the_old_gang_that_is_being_claimed_is_not_granted_once_the_job_changed_hands() -> (
    None
):
    """All its rows are written with the takeover, so a claim that read them before is stale."""
    job = replace(JOB, standbys=(2,), numbered=2)
    uow = UnitOfWork(job, [attempt(1), attempt(2)], [ranks(1, "a", None), ranks(2, "b", "c")])
    assert step(uow) is None
    changes = uow.take_changes()
    assert changes.job is not None
    assert changes.job.attempt == 2
    assert {(node.attempt_id, node.rank) for node in changes.nodes} >= {("j-1", 0), ("j-1", 1)}


def test_a_gang_that_may_have_its_work_keeps_the_job() -> None:
    job = replace(JOB, standbys=(2,), numbered=2)
    uow = UnitOfWork(job, [attempt(1), attempt(2)], [ranks(1, "a", "d"), ranks(2, "b", "c")])
    step(uow)
    assert uow.job.attempt == 1


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
    lost = replace(attempt(1, phase), outcome=AttemptOutcome.PREEMPTED)
    nodes = [replace(node, phase=now) for node, now in zip(ranks(1, "a", "b"), phases, strict=True)]
    uow = UnitOfWork(
        replace(JOB, standbys=(2,), numbered=2), [lost, attempt(2)], [nodes, ranks(2, "c", "d")]
    )
    hand_over(uow, TakeOver(kind="preemption", reason="taken"))
    assert uow.job.attempt == attempts


def test_a_lost_gang_of_which_a_rank_was_never_claimed_has_no_work_to_end() -> None:
    lost = replace(attempt(1, AttemptPhase.ENDING), outcome=AttemptOutcome.NODE)
    uow = UnitOfWork(
        replace(JOB, standbys=(2,), numbered=2),
        [lost, attempt(2)],
        [ranks(1, "a", None), ranks(2, "c", "d")],
    )
    hand_over(uow, TakeOver(kind="node", reason="lost"))
    assert uow.job.attempt == 2


@pytest.mark.parametrize(
    ("spent", "starts"), [(0, True), (1_150_000, True), (1_250_000, False), (None, False)]
)
def test_a_second_gang_starts_only_if_the_budget_pays_for_two(
    spent: int | None, starts: bool
) -> None:
    """Ten minutes of two nodes at 1.20 an hour are 0.40, and twice that has to be left."""
    uow = UnitOfWork(JOB, [attempt(1)], [ranks(1, "a", "b")])
    if spent is not None:
        uow.set_spent(Money(spent))
    step(uow)
    assert bool(uow.job.standbys) is starts


@pytest.mark.parametrize(
    ("capacity", "shared", "starts"),
    [(None, False, True), (2, False, True), (1, False, False), (None, True, False)],
)
def test_a_second_gang_starts_only_where_all_its_nodes_fit(
    capacity: int | None, shared: bool, starts: bool
) -> None:
    uow = UnitOfWork(JOB, [attempt(1)], [ranks(1, "a", "b")])
    uow.set_spent(Money(0))
    step(uow, replace(WANTED, offers=(replace(FIXED, capacity=capacity, shared=shared),)))
    assert bool(uow.job.standbys) is starts


@pytest.mark.parametrize("risk", [None, NOW])
@pytest.mark.parametrize(
    ("allowed", "used", "starts"), [(None, 5, True), (2, 1, True), (2, 2, True), (0, 0, False)]
)
def test_a_gang_that_works_is_left_however_often_the_job_was_preempted(
    risk: datetime | None, allowed: int | None, used: int, starts: bool
) -> None:
    """A move is no preemption; but work that bears none at all is not begun again."""
    task = replace(TASK, retry=tasks.RetryPolicy(preemption=allowed))
    job = replace(JOB, task=task, phase=JobPhase.RUNNING, retries={"preemption": used})
    nodes = [replace(node, risk_at=risk) for node in ranks(1, "a", "b")]
    uow = UnitOfWork(job, [attempt(1, AttemptPhase.RUNNING)], [nodes])
    uow.set_spent(Money(0))
    step(uow)
    assert bool(uow.job.standbys) is starts
    assert bool(uow.job.avoid) is (starts and risk is not None), (
        "a place that the job stays at is not avoided"
    )


@pytest.mark.parametrize(
    ("moves", "ran", "starts"),
    [
        (0, 0, True),
        (1, 4, False),
        (1, 5, True),
        (4, 39, False),
        (4, 40, True),
        (99, 359, False),
        (99, 360, True),
    ],
)
def test_a_job_that_moved_on_advice_moves_on_it_again_later_and_later(
    moves: int, ran: int, starts: bool
) -> None:
    job = replace(JOB, phase=JobPhase.RUNNING, retries={"advice": moves} if moves else {})
    began = NOW - timedelta(minutes=ran)
    own = replace(attempt(1, AttemptPhase.RUNNING), created_at=began, running_at=began)
    uow = UnitOfWork(job, [own], [[replace(node, risk_at=NOW) for node in ranks(1, "a", "b")]])
    uow.set_spent(Money(0))
    stays = Recommendation(mode=RunMode.SPOT, stay=True, reason="it stays")
    after = step(uow, stays)
    assert bool(uow.job.standbys) is starts
    assert uow.job.retries.get("advice", 0) == moves + starts
    if not starts:
        assert after is not None
        assert after <= timedelta(minutes=1)
        assert "already moved after an earlier warning" in uow.rows.attempts[1].reason
        events = len(uow.take_changes().events)
        step(uow, stays)
        assert (events, len(uow.take_changes().events)) == (1, 0), "told once"


def test_a_second_gang_that_came_to_nothing_counts_as_a_move() -> None:
    """A market that always says no is not asked every minute for as long as the gang is at risk."""
    own = replace(
        attempt(1, AttemptPhase.RUNNING),
        created_at=NOW - timedelta(days=1),
        running_at=NOW - timedelta(days=1),
    )
    lost = replace(
        attempt(2, AttemptPhase.ENDED),
        created_at=NOW - timedelta(minutes=1),
        outcome=AttemptOutcome.CAPACITY,
    )
    job = replace(JOB, phase=JobPhase.RUNNING, numbered=2, retries={"advice": 1})
    uow = UnitOfWork(
        job, [own, lost], [[replace(node, risk_at=NOW) for node in ranks(1, "a", "b")]]
    )
    uow.set_spent(Money(0))
    step(uow, Recommendation(mode=RunMode.SPOT, stay=True, reason="it stays"))
    assert not uow.job.standbys


def test_an_offer_that_a_job_left_on_advice_is_avoided_for_a_while() -> None:
    own = replace(attempt(1, AttemptPhase.RUNNING), running_at=NOW)
    nodes = [replace(node, risk_at=NOW) for node in ranks(1, "a", "b")]
    uow = UnitOfWork(replace(JOB, phase=JobPhase.RUNNING), [own], [nodes])
    uow.set_spent(Money(0))
    step(uow)
    assert uow.rows.attempts[2].offer == ELSEWHERE
    assert set(uow.job.avoid) == {SPOT.key}
    assert uow.job.avoid[SPOT.key] > NOW


@pytest.mark.parametrize(
    ("phase", "limits", "asks"),
    [
        (AttemptPhase.RUNNING, TASK.limits, True),
        (AttemptPhase.LAUNCHING, TASK.limits, False),
        (AttemptPhase.RUNNING, tasks.JobLimits(), False),
    ],
)
def test_only_a_gang_of_a_job_with_a_deadline_is_reviewed_once_it_is_launched(
    phase: AttemptPhase, limits: tasks.JobLimits, asks: bool
) -> None:
    job = replace(JOB, phase=JobPhase.RUNNING, task=replace(TASK, limits=limits))
    own = replace(attempt(1, phase), offer=FIXED)
    uow = UnitOfWork(job, [own], [ranks(1, "a", "b")])
    uow.set_spent(Money(0))
    decided = decide_standby(uow.rows, {}, NOW)
    assert isinstance(decided, AskAdvisor) is asks
    assert decided == Step(after=NEVER) or asks


@pytest.mark.parametrize("phase", [AttemptPhase.RUNNING, AttemptPhase.ENDING])
def test_a_gang_on_a_shared_host_or_at_its_end_gets_no_second_one(phase: AttemptPhase) -> None:
    running = phase is AttemptPhase.RUNNING
    own = replace(attempt(1, phase), offer=replace(SPOT, shared=running))
    nodes = [replace(node, risk_at=NOW) for node in ranks(1, "a", "b")]
    uow = UnitOfWork(replace(JOB, phase=JobPhase.RUNNING), [own], [nodes])
    assert decide_standby(uow.rows, {}, NOW) == Step(after=NEVER)
    stopping = replace(JOB, phase=JobPhase.RUNNING, stop_reason="enough")
    stopped = UnitOfWork(stopping, [attempt(1, AttemptPhase.RUNNING)], [nodes])
    assert decide_standby(stopped.rows, {}, NOW) == Step(after=NEVER)
    lost = UnitOfWork(replace(JOB, phase=JobPhase.RUNNING), [], [])
    assert decide_standby(lost.rows, {}, NOW) == Step(after=NEVER)


def test_a_gang_that_the_job_leaves_of_its_own_accord_is_no_preemption() -> None:
    job = replace(
        JOB, task=replace(TASK, retry=tasks.RetryPolicy(preemption=2)), retries={"preemption": 2}
    )
    taken = replace(
        attempt(1, AttemptPhase.ENDED), outcome=AttemptOutcome.PREEMPTED, reason="because"
    )
    view = JobSnapshot(job=job, attempt=taken, spent=Money(0), rate=HourlyRate(0))
    failed = decide_job(view, NOW)
    assert isinstance(failed, AdvanceJob)
    assert failed.phase is JobPhase.FAILED
    assert decide_job(replace(view, attempt=replace(taken, moved=True)), NOW) == RequeueJob(
        kind="move", reason="because"
    )


@pytest.mark.parametrize(
    ("used", "offer", "starts"), [(1, SPOT, True), (2, SPOT, False), (2, NEAR, True)]
)
def test_a_job_that_bears_no_more_preemptions_leaves_on_demand_for_no_spot(
    used: int, offer: Offer, starts: bool
) -> None:
    own = replace(attempt(1, AttemptPhase.RUNNING), offer=FIXED, checkpoint_at=NOW)
    task = replace(TASK, retry=tasks.RetryPolicy(preemption=2))
    job = replace(JOB, task=task, phase=JobPhase.RUNNING, retries={"preemption": used})
    uow = UnitOfWork(job, [own], [ranks(1, "a", "b")])
    uow.set_spent(Money(0))
    step(uow, Recommendation(mode=RunMode.SPOT, offers=(offer,), reason="cheaper"))
    assert bool(uow.job.standbys) is starts
    uow = UnitOfWork(job, [own], [ranks(1, "a", "b")])
    uow.set_spent(Money(0))
    step(uow, Recommendation(mode=RunMode.IDLE, reason="spot comes back"))
    assert (uow.rows.attempts[1].drill_until is not None) is (used < 2)


def test_a_gang_on_demand_is_reviewed_whatever_its_place_says_of_risk() -> None:
    own = replace(attempt(1, AttemptPhase.RUNNING), offer=FIXED)
    nodes = [replace(node, risk_at=NOW) for node in ranks(1, "a", "b")]
    uow = UnitOfWork(replace(JOB, phase=JobPhase.RUNNING), [own], [nodes])
    uow.set_spent(Money(0))
    step(uow, Recommendation(mode=RunMode.SPOT, offers=(SPOT,), reason="spot is there"))
    assert uow.rows.attempts[2].offer == SPOT


def test_a_gang_that_is_given_back_has_its_grace_once() -> None:
    """However long it goes on to save: else it would never end."""
    idle = PlanState(at=NOW, mode="idle", reason="waits for spot")
    own = replace(attempt(1, AttemptPhase.RUNNING), offer=FIXED, checkpoint_at=NOW, drill_until=NOW)
    uow = UnitOfWork(
        replace(JOB, phase=JobPhase.RUNNING, plan_state=idle), [own], [ranks(1, "a", "b")]
    )
    step(uow, Recommendation(mode=RunMode.IDLE, reason="waits for spot"))
    assert uow.rows.attempts[1].drill_until == NOW


MINUTE = timedelta(minutes=1)
SAVES = replace(TASK, checkpoint=tasks.CheckpointPolicy(path="c", every=5 * MINUTE))


def watched(
    task: tasks.TaskSpec = SAVES,
    *,
    own: dict[str, object] | None = None,
    ready: timedelta | None = MINUTE,
) -> tuple[UnitOfWork, timedelta | None]:
    """A job whose gang has worked for four minutes, beside one that has been ready for so long;
    the step's answer.
    """
    began = NOW - 4 * MINUTE
    works = replace(attempt(1, AttemptPhase.RUNNING), created_at=NOW - 9 * MINUTE, running_at=began)
    beside = replace(attempt(2), created_at=began + MINUTE)
    claims = ranks(2, *((None, None) if ready is None else ("c", "d")))
    if ready is not None:
        claims = [
            replace(claims[0], claimed_at=NOW - 2 * ready),
            replace(claims[1], claimed_at=NOW - ready),
        ]
    job = replace(JOB, task=task, phase=JobPhase.RUNNING, standbys=(2,), numbered=2)
    uow = UnitOfWork(job, [replace(works, **(own or {})), beside], [ranks(1, "a", "b"), claims])  # type: ignore[arg-type]
    return uow, step(uow)


@pytest.mark.parametrize(
    ("task", "saved", "wait"),
    [
        (TASK, None, None),  # without checkpoints there is nothing to wait for
        (
            SAVES,
            None,
            4 * MINUTE,
        ),  # as long as the next checkpoint may take since both ranks were ready
        (SAVES, 2 * MINUTE, 4 * MINUTE),
        (SAVES, MINUTE, None),
        (SAVES, timedelta(0), None),
        (SAVES, 8 * MINUTE, None),  # it saves no more
        (SAVES, 7.5 * MINUTE, 4 * MINUTE),
        (replace(TASK, checkpoint=tasks.CheckpointPolicy(path="c")), None, 9 * MINUTE),
        (
            replace(TASK, checkpoint=tasks.CheckpointPolicy(path="c", every=60 * MINUTE)),
            None,
            9 * MINUTE,
        ),
    ],
)
def test_a_gang_that_works_leaves_for_one_that_is_ready_at_a_checkpoint(
    task: tasks.TaskSpec, saved: timedelta | None, wait: timedelta | None
) -> None:
    uow, after = watched(task, own={"checkpoint_at": None if saved is None else NOW - saved})
    own = uow.rows.attempts[1]
    assert after == wait
    assert (own.drill_until, own.moved) == (
        (NOW + timedelta(seconds=30), True) if wait is None else (None, False)
    )
    assert [event.kind for event in uow.take_changes().events] == (
        ["handover"] if wait is None else []
    )
    assert uow.job.attempt == 1, "it has the job until it has left"


def test_a_ready_gang_is_waited_for_no_longer_than_a_checkpoint_may_take() -> None:
    uow, after = watched(ready=5 * MINUTE)
    assert (after, uow.rows.attempts[1].moved) == (None, True)


def test_a_gang_that_leaves_has_its_grace_where_that_is_longer() -> None:
    uow, _ = watched(replace(TASK, grace=2 * MINUTE))
    assert uow.rows.attempts[1].drill_until == NOW + 2 * MINUTE


@pytest.mark.parametrize("own", [{"drill_until": NOW + MINUTE}, {"drill_until": NOW - MINUTE}])
def test_a_gang_that_is_being_taken_away_is_told_once(own: dict[str, object]) -> None:
    uow, after = watched(TASK, own=own)
    assert after == timedelta.max
    assert uow.rows.attempts[1].drill_until == own["drill_until"]
    assert not uow.dirty


def test_a_gang_that_is_not_ready_moves_nothing() -> None:
    uow, after = watched(TASK, ready=None)
    assert (after, uow.dirty) == (timedelta.max, False)


def test_a_gang_whose_work_has_not_begun_has_nothing_to_save() -> None:
    uow, after = watched(own={"phase": AttemptPhase.BOOTING, "running_at": None})
    assert (after, uow.rows.attempts[1].moved) == (None, True)


def test_gangs_that_were_started_before_the_work_began_are_given_back() -> None:
    uow, after = watched(own={"running_at": NOW - timedelta(seconds=1)})
    assert (after, uow.job.standbys, uow.rows.attempts[1].moved) == (None, (), False)
    assert [event.kind for event in uow.take_changes().events] == ["standby"]


def test_who_takes_over_counts_the_loss_and_keeps_only_gangs_younger_than_itself() -> None:
    lost = replace(attempt(1, AttemptPhase.ENDED), outcome=AttemptOutcome.PREEMPTED)
    job = replace(
        JOB,
        phase=JobPhase.RUNNING,
        standbys=(2, 3, 4),
        numbered=4,
        retries={"preemption": 1, "node": 1},
    )
    gangs = [
        ranks(number, *claims)
        for number, claims in ((2, (None, "b")), (3, ("c", "d")), (4, ("e", "f")))
    ]
    uow = UnitOfWork(job, [lost, *(attempt(number) for number in (2, 3, 4))], gangs)
    hand_over(uow, TakeOver(kind="preemption", reason="taken"))
    assert (uow.job.attempt, uow.job.standbys, uow.job.phase) == (3, (4,), JobPhase.STARTING)
    assert uow.job.retries == {"preemption": 2, "node": 1}
    assert uow.job.reason.endswith("takes over: taken")


def test_a_second_gang_that_failed_is_forgotten_and_its_place_rests() -> None:
    lost = replace(
        attempt(2, AttemptPhase.ENDING), outcome=AttemptOutcome.CAPACITY, reason="no capacity"
    )
    old = {SPOT.key: NOW - MINUTE, NEAR.key: NOW + 9 * MINUTE}
    uow = UnitOfWork(
        replace(JOB, standbys=(2, 3), numbered=3, avoid=old), [attempt(1), lost, attempt(3)], []
    )
    assert step(uow) is None
    assert uow.job.standbys == (3,)
    assert uow.job.avoid == {NEAR.key: NOW + 9 * MINUTE, FIXED.key: NOW + timedelta(seconds=30)}


def test_a_second_gang_that_was_stopped_says_nothing_about_its_place() -> None:
    lost = replace(attempt(2, AttemptPhase.ENDED), outcome=AttemptOutcome.STOPPED)
    uow = UnitOfWork(replace(JOB, standbys=(2,), numbered=2), [attempt(1), lost], [])
    assert step(uow) is None
    assert (uow.job.standbys, uow.job.avoid) == ((), {})


@pytest.mark.parametrize(("saved", "gives"), [(0, True), (60, True), (61, False), (None, False)])
def test_a_gang_on_demand_is_given_back_only_where_it_has_just_saved(
    saved: int | None, gives: bool
) -> None:
    at = None if saved is None else NOW - timedelta(seconds=saved)
    own = replace(attempt(1, AttemptPhase.RUNNING), offer=FIXED, checkpoint_at=at)
    uow = UnitOfWork(replace(JOB, phase=JobPhase.RUNNING), [own], [ranks(1, "a", "b")])
    step(uow, Recommendation(mode=RunMode.IDLE, reason="spot comes back"))
    assert uow.rows.attempts[1].moved is gives
    assert (uow.rows.attempts[1].drill_until == NOW + timedelta(seconds=30)) is gives
    assert uow.job.plan_state is not None
    assert (uow.job.plan_state.place is None) is gives


@pytest.mark.parametrize(("used", "starts"), [(1, True), (2, False)])
def test_a_gang_that_is_taken_is_followed_only_where_the_job_bears_that(
    used: int, starts: bool
) -> None:
    job = replace(
        JOB, task=replace(TASK, retry=tasks.RetryPolicy(preemption=2)), phase=JobPhase.RUNNING
    )
    noticed = [replace(node, notice_until=NOW + MINUTE) for node in ranks(1, "a", "b")]
    uow = UnitOfWork(
        replace(job, retries={"preemption": used}), [attempt(1, AttemptPhase.RUNNING)], [noticed]
    )
    uow.set_spent(Money(0))
    step(uow)
    assert bool(uow.job.standbys) is starts


def test_a_gang_at_risk_is_asked_about_again_when_it_is_time() -> None:
    nodes = [replace(node, risk_at=NOW) for node in ranks(1, "a", "b")]
    job = replace(JOB, phase=JobPhase.RUNNING)
    rows = UnitOfWork(job, [attempt(1, AttemptPhase.RUNNING)], [nodes]).rows
    reviews = {"j-1": NOW + MINUTE}
    answers = [
        decide_standby(rows, reviews, NOW + timedelta(seconds=seconds)) for seconds in (50, 59.5)
    ]
    assert [answer.after for answer in answers if isinstance(answer, Step)] == [
        timedelta(seconds=10),
        timedelta(seconds=1),
    ]
    asked = decide_standby(rows, reviews, NOW + MINUTE)
    assert isinstance(asked, AskAdvisor)
    assert (asked.question, asked.key) == (StandbyQuestion.AHEAD, "j-1")
    assert answer_standby(rows, asked, None, str, NOW) == Step(after=MINUTE)


def test_a_gang_that_is_taken_right_after_its_start_keeps_those_beside_it() -> None:
    uow, _ = watched(own={"running_at": NOW - timedelta(seconds=1), "drill_until": NOW + MINUTE})
    assert uow.job.standbys == (2,)


@pytest.mark.parametrize(("number", "starts"), [(1, False), (2, True)])
def test_only_another_gang_is_checked_against_budgets_and_limits(number: int, starts: bool) -> None:
    made = attempt(number)
    assert list_started(Step(changes=RowChanges(attempts=(made,))), JOB) == [made] * starts
    assert not list_started(Step(), JOB)
