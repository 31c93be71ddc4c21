"""The decisions about jobs: what each outcome leads to, how often it is tried again, and where
its limits are.
"""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.records import make_attempt_record

from cavvy.control.decide import job as j
from cavvy.control.decide.job import JobSnapshot, decide_job
from cavvy.control.decide.transitions import requeue_job
from cavvy.domain.jobs import (
    JOB_ENDS,
    JOB_MOVES,
    AttemptOutcome,
    AttemptPhase,
    FailureKind,
    JobPhase,
    JobRecord,
    StopCause,
)
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import JobLimits, RetryPolicy, TaskSpec
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.planner.markets import LONGEST_REST

T0 = datetime(2030, 1, 1, tzinfo=UTC)
OFFER = Offer(provider="p", region="r", instance_type="t", rate=HourlyRate(1_000_000))
HOUR = timedelta(hours=1)


def view(
    phase: JobPhase = JobPhase.RUNNING,
    *,
    attempt: AttemptPhase | None = AttemptPhase.RUNNING,
    outcome: AttemptOutcome | None = None,
    exit_code: int | None = None,
    limits: JobLimits = JobLimits(),  # noqa: B008 - frozen
    retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
    spent: int = 0,
    rate: int = 0,
    ran: timedelta = timedelta(0),
    shared: bool = False,
    **changes: object,
) -> JobSnapshot:
    task = TaskSpec(name="n", run="x", limits=limits, retry=retry)
    job = JobRecord(
        id="j", project="p", name="n", task=task, phase=phase, submitted_at=T0, since=T0, attempt=1
    )
    tried = attempt and make_attempt_record(
        T0,
        replace(OFFER, shared=shared),
        phase=attempt,
        reason="because",
        outcome=outcome,
        exit_code=exit_code,
    )
    return JobSnapshot(
        job=replace(job, **changes),  # type: ignore[arg-type]
        attempt=tried or None,
        spent=Money(spent),
        rate=HourlyRate(rate),
        ran=ran,
    )


def ended(outcome: AttemptOutcome, **more: object) -> JobSnapshot:
    return view(attempt=AttemptPhase.ENDING, outcome=outcome, **more)  # type: ignore[arg-type]


def turned(action: j.Action) -> tuple[JobPhase, int | None]:
    assert isinstance(action, j.AdvanceJob)
    return action.phase, action.exit_code


def test_work_that_fails_while_it_reads_its_checkpoint_gets_the_one_before() -> None:
    failed = ended(AttemptOutcome.EXIT, exit_code=1)
    action = decide_job(replace(failed, fallback=(2, 1)), T0)
    assert isinstance(action, j.RequeueJob)
    assert (action.kind, action.skip) == ("checkpoint", 2)
    assert "checkpoint 2" in action.reason
    assert "checkpoint 1 is used" in action.reason
    again = requeue_job(failed.job, failed.attempt, action, "", T0).job
    assert again is not None
    assert again.skipped_checkpoints == (2,)
    assert turned(decide_job(failed, T0)) == (JobPhase.FAILED, 1), "no older one is stored"


def test_a_checkpoint_is_not_blamed_for_a_failure_of_a_known_cause() -> None:
    failed = ended(AttemptOutcome.EXIT, exit_code=1)
    assert failed.attempt is not None
    attempt = replace(failed.attempt, failure=FailureKind.PROGRAM)
    action = decide_job(replace(failed, attempt=attempt, fallback=(2, 1)), T0)
    assert turned(action) == (JobPhase.FAILED, 1)


def test_a_checkpoint_is_used_again_if_the_one_before_fails_too() -> None:
    failed = ended(
        AttemptOutcome.EXIT, exit_code=1, retry=RetryPolicy(exit=1), retries={"checkpoint": 1}
    )
    job = replace(failed.job, skipped_checkpoints=(7, 2))
    action = decide_job(replace(failed, job=job, fallback=(1, None)), T0)
    assert isinstance(action, j.RequeueJob)
    again = requeue_job(job, failed.attempt, action, "", T0).job
    assert again is not None
    assert again.skipped_checkpoints == (7,), "which a person chose"
    assert again.retries == {"checkpoint": 0, "exit": 1}


@pytest.mark.parametrize("saved", [True, False])
def test_losses_of_nodes_count_anew_when_an_attempt_has_saved(saved: bool) -> None:
    lost = ended(AttemptOutcome.NODE, retry=RetryPolicy(node=3), retries={"node": 3})
    assert lost.attempt is not None
    attempt = replace(lost.attempt, checkpoint_at=T0 if saved else None)
    action = decide_job(replace(lost, attempt=attempt), T0)
    if not saved:
        assert turned(action) == (JobPhase.FAILED, None)
        return
    assert isinstance(action, j.RequeueJob)
    again = requeue_job(lost.job, attempt, action, "", T0).job
    assert again is not None
    assert again.retries == {"node": 1}


def test_it_runs_when_its_attempt_does() -> None:
    assert turned(decide_job(view(JobPhase.STARTING), T0)) == (JobPhase.RUNNING, None)
    assert decide_job(view(), T0) == j.RecheckJob()
    starting = view(JobPhase.STARTING)
    again = replace(starting, job=replace(starting.job, attempt=2))
    assert decide_job(again, T0) == j.RecheckJob(), "an earlier attempt runs"


def test_it_is_done_before_its_nodes_are_gone() -> None:
    assert turned(decide_job(ended(AttemptOutcome.SUCCEEDED), T0)) == (JobPhase.DONE, 0)
    starting = view(JobPhase.STARTING, attempt=AttemptPhase.ENDED, outcome=AttemptOutcome.SUCCEEDED)
    assert turned(decide_job(starting, T0)) == (JobPhase.DONE, 0)


@pytest.mark.parametrize("outcome", [AttemptOutcome.EXIT, AttemptOutcome.SETUP])
def test_the_users_failure_is_not_tried_on_five_clouds(outcome: AttemptOutcome) -> None:
    assert turned(decide_job(ended(outcome, exit_code=3), T0)) == (JobPhase.FAILED, 3)


def test_chosen_exit_codes_are_tried_again_so_often() -> None:
    retry = RetryPolicy(exit=2, exit_codes=(3,))
    again = decide_job(
        ended(AttemptOutcome.EXIT, exit_code=3, retry=retry, retries={"exit": 1}), T0
    )
    assert isinstance(again, j.RequeueJob)
    assert turned(
        decide_job(ended(AttemptOutcome.EXIT, exit_code=3, retry=retry, retries={"exit": 2}), T0)
    ) == (
        JobPhase.FAILED,
        3,
    )
    assert turned(decide_job(ended(AttemptOutcome.EXIT, exit_code=4, retry=retry), T0)) == (
        JobPhase.FAILED,
        4,
    )


def test_a_preemption_is_tried_again_without_end_by_default() -> None:
    often = ended(AttemptOutcome.PREEMPTED, retries={"preemption": 1000})
    action = decide_job(often, T0)
    assert isinstance(action, j.RequeueJob)
    assert action.avoid == timedelta(0)
    once = ended(AttemptOutcome.PREEMPTED, retry=RetryPolicy(preemption=0))
    assert turned(decide_job(once, T0)) == (JobPhase.FAILED, None)


@pytest.mark.parametrize("outcome", [AttemptOutcome.NODE, AttemptOutcome.TIMEOUT, None])
def test_a_lost_node_is_tried_three_times_and_elsewhere(outcome: AttemptOutcome | None) -> None:
    action = decide_job(ended(outcome, retries={"node": 2}), T0)
    assert isinstance(action, j.RequeueJob)
    assert action.avoid == 4 * (
        timedelta(minutes=1) if outcome is AttemptOutcome.TIMEOUT else timedelta(seconds=30)
    )
    assert turned(decide_job(ended(outcome, retries={"node": 3}), T0)) == (JobPhase.FAILED, None)


def test_an_exit_0_after_a_signal_is_resumed_and_never_the_code_of_a_failure() -> None:
    told = ended(AttemptOutcome.PREEMPTED, exit_code=0)
    assert isinstance(decide_job(told, T0), j.RequeueJob)
    last = ended(AttemptOutcome.PREEMPTED, exit_code=0, retry=RetryPolicy(preemption=0))
    assert turned(decide_job(last, T0)) == (JobPhase.FAILED, None)
    idle = ended(AttemptOutcome.LIMIT, exit_code=0)
    assert turned(decide_job(idle, T0)) == (JobPhase.FAILED, None)
    stopping = {"phase": JobPhase.STOPPING, "stop_reason": "enough"}
    while_it_went = ended(AttemptOutcome.PREEMPTED, exit_code=0, **stopping)
    assert turned(decide_job(while_it_went, T0))[0] is JobPhase.STOPPED


def test_this_machine_is_not_avoided_for_a_lost_process() -> None:
    action = decide_job(ended(AttemptOutcome.NODE, shared=True), T0)
    assert isinstance(action, j.RequeueJob)
    assert action.avoid == timedelta(0)


def test_a_gang_that_we_take_away_ourselves_may_work_until_it_is_gone() -> None:
    """Else the next try would begin beside it. What the place takes is no longer there, and who
    reported is done.
    """
    taken = ended(AttemptOutcome.PREEMPTED)
    assert taken.attempt is not None
    ours = replace(taken, attempt=replace(taken.attempt, drill_until=T0))
    assert decide_job(ours, T0) == j.RecheckJob(after=timedelta(seconds=1))
    assert ours.attempt is not None
    for over in (
        taken,
        replace(ours, attempt=replace(ours.attempt, exit_code=75)),
        replace(ours, attempt=replace(ours.attempt, phase=AttemptPhase.ENDED)),
    ):
        assert isinstance(decide_job(over, T0), j.RequeueJob)


def test_a_cancelled_gang_ends_its_job_and_no_gang_replaces_it_before_that_is_known() -> None:
    reclaimed = replace(ended(AttemptOutcome.PREEMPTED), awaits_end=True)
    assert isinstance(decide_job(reclaimed, T0), j.RecheckJob)
    assert reclaimed.attempt is not None
    over = replace(reclaimed, attempt=replace(reclaimed.attempt, phase=AttemptPhase.ENDED))
    assert isinstance(decide_job(over, T0), j.RequeueJob)
    cancelled = ended(AttemptOutcome.STOPPED, reason="the job was cancelled", exit_code=143)
    assert turned(decide_job(cancelled, T0)) == (JobPhase.STOPPED, 143)


def test_no_capacity_is_looked_for_elsewhere_at_once_and_here_later_and_later() -> None:
    first = decide_job(ended(AttemptOutcome.CAPACITY), T0)
    assert first == j.RequeueJob(kind="capacity", reason="because", avoid=timedelta(seconds=30))
    later = decide_job(ended(AttemptOutcome.CAPACITY, retries={"capacity": 50}), T0)
    assert isinstance(later, j.RequeueJob)
    assert later.avoid == LONGEST_REST


def test_what_was_refused_waits_for_a_person() -> None:
    action = decide_job(ended(AttemptOutcome.REFUSED), T0)
    assert isinstance(action, j.RequeueJob)
    assert action.avoid == timedelta(days=1)


def test_a_job_says_that_it_is_tried_again_only_if_its_tries_are_limited() -> None:
    lost = decide_job(ended(AttemptOutcome.NODE), T0)
    assert isinstance(lost, j.RequeueJob)
    assert lost.text == "because; tried again"
    elsewhere = decide_job(ended(AttemptOutcome.CAPACITY), T0)
    assert isinstance(elsewhere, j.RequeueJob)
    assert elsewhere.text == "because"


def test_the_delay_doubles_up_to_an_hour() -> None:
    retry = RetryPolicy(delay=timedelta(minutes=10))
    delays = []
    for used in (0, 1, 2, 3, 60):
        action = decide_job(
            ended(AttemptOutcome.PREEMPTED, retry=retry, retries={"preemption": used}), T0
        )
        assert isinstance(action, j.RequeueJob)
        delays.append(action.delay // timedelta(minutes=1))
    assert delays == [10, 20, 40, 60, 60]


def test_a_stop_of_a_queued_job_is_immediate() -> None:
    queued = view(JobPhase.QUEUED, attempt=None, stop_reason="enough", stop_cause=StopCause.USER)
    stopped = decide_job(queued, T0)
    assert turned(stopped) == (JobPhase.STOPPED, None)
    assert isinstance(stopped, j.AdvanceJob)
    assert stopped.reason == "enough"


def test_a_stop_waits_for_the_attempt() -> None:
    stopping = {
        "phase": JobPhase.STOPPING,
        "stop_reason": "enough",
        "stop_cause": StopCause.USER,
    }
    assert decide_job(view(**stopping), T0) == j.RecheckJob()  # type: ignore[arg-type]
    assert turned(decide_job(ended(AttemptOutcome.STOPPED, exit_code=143, **stopping), T0)) == (
        JobPhase.STOPPED,
        143,
    )
    assert turned(decide_job(ended(AttemptOutcome.PREEMPTED, **stopping), T0)) == (
        JobPhase.STOPPED,
        None,
    )
    assert turned(decide_job(ended(AttemptOutcome.SUCCEEDED, **stopping), T0)) == (JobPhase.DONE, 0)
    failed = decide_job(ended(AttemptOutcome.EXIT, exit_code=3, **stopping), T0)
    assert turned(failed) == (JobPhase.FAILED, 3)
    limit = {**stopping, "stop_cause": StopCause.BUDGET}
    assert turned(decide_job(ended(AttemptOutcome.LIMIT, **limit), T0)) == (JobPhase.FAILED, None)


def test_the_deadline_is_the_earlier_of_two() -> None:
    limits = JobLimits(deadline=T0 + 3 * HOUR, deadline_after=2 * HOUR)
    assert decide_job(view(limits=limits), T0) == j.RecheckJob(after=2 * HOUR)
    assert isinstance(decide_job(view(limits=limits), T0 + 2 * HOUR), j.StopAtLimit)
    assert isinstance(
        decide_job(view(JobPhase.QUEUED, attempt=None, limits=limits), T0 + 2 * HOUR), j.StopAtLimit
    )


def test_the_duration_counts_all_attempts() -> None:
    limits = JobLimits(duration=HOUR)
    assert decide_job(view(limits=limits, ran=HOUR / 2), T0) == j.RecheckJob(after=HOUR / 2)
    assert isinstance(decide_job(view(limits=limits, ran=HOUR), T0), j.StopAtLimit)


def test_the_budget_leaves_room_for_the_end() -> None:
    limits = JobLimits(budget=Money(1_000_000))
    action = decide_job(view(limits=limits, rate=3_600_000, spent=400_000), T0)
    # 1,000 micro-dollars a second; the grace of 10 s and the margin of 5 s cost 15,000.
    assert action == j.RecheckJob(after=timedelta(seconds=585))
    assert isinstance(
        decide_job(view(limits=limits, rate=3_600_000, spent=985_000), T0), j.StopAtLimit
    )


def test_a_budget_that_is_used_up_reserves_nothing() -> None:
    limits = JobLimits(budget=Money(1_000_000))
    for spent, reserved in ((990_000, True), (1_000_000, False), (1_100_000, False)):
        action = decide_job(view(limits=limits, rate=3_600_000, spent=spent), T0)
        assert isinstance(action, j.StopAtLimit)
        assert ("reserved for the grace period" in action.reason) is reserved


def test_the_end_takes_no_more_than_half_of_a_budget() -> None:
    """Else work with a long grace would be ended before it begins."""
    small = JobLimits(budget=Money(10_000))
    assert decide_job(view(limits=small, rate=3_600_000), T0) == j.RecheckJob(
        after=timedelta(seconds=5)
    )
    assert isinstance(
        decide_job(view(limits=small, rate=3_600_000, spent=5_000), T0), j.StopAtLimit
    )


def test_the_lower_of_budget_and_ceiling_counts() -> None:
    capped = view(limits=JobLimits(budget=Money(100)), ceiling=Money(50), spent=50)
    limit = decide_job(capped, T0)
    assert isinstance(limit, j.StopAtLimit)
    assert limit.cause is StopCause.BUDGET


def test_what_is_free_may_run_on_a_budget_of_nothing() -> None:
    assert decide_job(view(limits=JobLimits(budget=Money(0))), T0) == j.RecheckJob()
    assert isinstance(
        decide_job(view(limits=JobLimits(budget=Money(0)), rate=1), T0), j.StopAtLimit
    )


lengths = st.none() | st.integers(0, 10_000).map(lambda seconds: timedelta(seconds=seconds))
views = st.builds(
    view,
    st.sampled_from(JobPhase),
    attempt=st.none() | st.sampled_from(AttemptPhase),
    outcome=st.none() | st.sampled_from(AttemptOutcome),
    exit_code=st.none() | st.integers(0, 255),
    limits=st.builds(
        JobLimits,
        deadline_after=lengths,
        duration=lengths,
        budget=st.none() | st.integers(0, 10**9).map(Money),
    ),
    retry=st.builds(
        RetryPolicy, exit=st.none() | st.integers(0, 3), node=st.none() | st.integers(0, 3)
    ),
    spent=st.integers(0, 10**9),
    rate=st.integers(0, 10**8),
    ran=st.integers(0, 10_000).map(lambda seconds: timedelta(seconds=seconds)),
    stop_reason=st.none() | st.just("x"),
    stop_cause=st.none() | st.sampled_from(StopCause),
    retries=st.dictionaries(
        st.sampled_from(["exit", "node", "preemption", "capacity"]), st.integers(0, 100)
    ),
)


@given(views, st.integers(0, 100_000).map(lambda seconds: T0 + timedelta(seconds=seconds)))
def test_every_view_has_a_legal_answer(given_view: JobSnapshot, now: datetime) -> None:
    phase = given_view.job.phase
    action = decide_job(given_view, now)
    match action:
        case j.AdvanceJob():
            assert action.phase in JOB_MOVES[phase]
            assert action.reason
        case j.RequeueJob():
            assert JobPhase.QUEUED in JOB_MOVES[phase]
            assert phase not in JOB_ENDS
            assert action.reason
        case j.StopAtLimit():
            assert phase not in JOB_ENDS | {JobPhase.STOPPING}
        case j.RecheckJob():
            assert action.after > timedelta(0)
    if (
        given_view.attempt is not None
        and given_view.attempt.phase is AttemptPhase.ENDED
        and phase not in JOB_ENDS
    ):
        assert phase is JobPhase.QUEUED or not isinstance(action, j.RecheckJob), (
            "nothing else will wake this job"
        )


def test_a_session_that_was_idle_is_done() -> None:
    idle = ended(AttemptOutcome.LIMIT)
    session = replace(idle, job=replace(idle.job, task=replace(idle.job.task, session=True)))
    assert turned(decide_job(session, T0)) == (JobPhase.DONE, None)
    late = replace(session, job=replace(session.job, stop_cause=StopCause.DEADLINE))
    assert turned(decide_job(late, T0)) == (JobPhase.FAILED, None)
