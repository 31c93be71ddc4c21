"""What the job reconciler makes of a look at a place: what a job is told, what is charged, when
it looks again.
"""

from datetime import UTC, datetime, timedelta

import pytest
from tests.records import make_attempt_record, make_job_record

from cavvy.control.decide import attempt as gangs
from cavvy.control.decide.attempt_snapshot import GangAbsence, Seen
from cavvy.control.decide.bills import accrue
from cavvy.control.decide.looks import (
    GangLook,
    after_look,
    first_look,
    look_interval,
    note_failed_removal,
    note_wait,
)
from cavvy.control.decide.rows import JobRows, RowChanges
from cavvy.control.decide.transitions import advance_attempt, failed_place, is_told_by_job
from cavvy.control.unit_of_work import UnitOfWork
from cavvy.domain import jobs
from cavvy.domain.allocations import Allocation
from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.base import GangSeen, GangState, NodeSeen

NOW = datetime(2030, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)
OFFER = Offer(provider="p", region="r", instance_type="t", rate=HourlyRate(3_600_000))
JOB = make_job_record(NOW, phase=jobs.JobPhase.STARTING, reason="starts on p/r/t", attempt=1)
QUEUED = GangSeen(name="g1", state=GangState.QUEUED, reason="Resources")
STARTING = GangSeen(name="g1", state=GangState.STARTING, reason="pulls the image")


def make_attempt(
    number: int = 1, phase: jobs.AttemptPhase = jobs.AttemptPhase.BOOTING, **changes: object
) -> jobs.Attempt:
    made = make_attempt_record(
        NOW,
        OFFER,
        id=f"j-{number}",
        number=number,
        gang=f"g{number}",
        phase=phase,
        reason="the provider accepted the launch",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def tell_wait(
    seen: Seen, attempt: jobs.Attempt, job: jobs.JobRecord = JOB, times: int = 1
) -> tuple[JobRows, list[str]]:
    """The rows after so many looks that saw this, and the texts of the events."""
    uow = UnitOfWork(job, [make_attempt(), attempt], [])
    for _ in range(times):
        look = GangLook(seen=seen)
        uow.apply(note_wait(uow.rows, uow.rows.attempts[attempt.number], look, NOW))
    return uow.rows, [event.text for event in uow.take_changes().events]


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        (QUEUED, "waits at p: Resources"),
        (replace(QUEUED, reason=""), "waits at p: in its queue"),
        (STARTING, "starts at p: pulls the image"),
        (replace(STARTING, state=GangState.RUNNING), "starts at p: pulls the image"),
        (
            replace(QUEUED, eta=NOW + timedelta(hours=1)),
            "waits at p: Resources, expected to start 2030-01-01 01:00 UTC",
        ),
        (replace(QUEUED, eta=NOW), "waits at p: Resources"),
    ],
)
def test_a_job_is_told_once_what_its_gang_waits_for(seen: GangSeen, told: str) -> None:
    rows, events = tell_wait(seen, make_attempt(), times=3)
    assert (rows.job.reason, rows.attempts[1].standing, events) == (told, told, [told])


@pytest.mark.parametrize(
    "seen",
    [
        replace(STARTING, reason=""),
        replace(STARTING, state=GangState.RUNNING, reason=""),
        replace(STARTING, state=GangState.ENDED),
        GangAbsence.ABSENT,
        GangAbsence.UNKNOWN,
    ],
)
def test_what_says_no_reason_changes_none(seen: Seen) -> None:
    rows, events = tell_wait(seen, make_attempt())
    assert (rows.job, rows.attempts[1], events) == (JOB, make_attempt(), [])


def test_a_gang_that_works_waits_for_nothing() -> None:
    running = make_attempt(phase=jobs.AttemptPhase.RUNNING)
    rows, events = tell_wait(QUEUED, running)
    assert (rows.job, rows.attempts[1], events) == (JOB, running, [])


def tell(
    attempt: jobs.Attempt, look: GangLook, after: float = 0, **node: object
) -> tuple[JobRows, int]:
    """The rows after one look so many seconds later, and the number of events."""
    nodes = [jobs.Node(attempt_id=attempt.id, project="p", rank=0, **node)]  # type: ignore[arg-type]
    uow = UnitOfWork(JOB, [attempt], [])
    uow.read_nodes(attempt, nodes)
    uow.apply(note_wait(uow.rows, attempt, look, NOW + timedelta(seconds=after)))
    return uow.rows, len(uow.take_changes().events)


NOT_CALLED = "starts at p: the nodes run, but no agent of rank 0 has contacted the server yet"
NOT_STARTED = "starts at p: the provider has not started all nodes yet, and states no reason"


@pytest.mark.parametrize(
    ("state", "after", "claim", "told"),
    [
        (GangState.RUNNING, 59, None, JOB.reason),
        (GangState.RUNNING, 60, None, NOT_CALLED),
        (GangState.RUNNING, 600, "agent", JOB.reason),
        (GangState.STARTING, 60, None, NOT_STARTED),
    ],
)
def test_a_job_is_told_which_agents_are_late(
    state: GangState, after: float, claim: str | None, told: str
) -> None:
    nodes = [NodeSeen(rank=0, engine_id="0", started_at=NOW)]
    look = GangLook(seen=GangSeen(name="g1", state=state, nodes=nodes))
    rows, _ = tell(make_attempt(), look, after, claim=claim)
    assert rows.job.reason == told


@pytest.mark.parametrize(
    ("phase", "after", "told"),
    [
        (jobs.NodePhase.SETUP, 59, JOB.reason),
        (jobs.NodePhase.SETUP, 60, "starts at p: the setup has not ended yet on rank 0"),
        (
            jobs.NodePhase.CLAIMED,
            60,
            "starts at p: the work is being prepared (its files, inputs or image) on rank 0",
        ),
        (jobs.NodePhase.RUNNING, 600, JOB.reason),
    ],
)
def test_a_long_preparation_is_told_without_an_event(
    phase: jobs.NodePhase, after: float, told: str
) -> None:
    look = GangLook(seen=GangSeen(name="g1", state=GangState.RUNNING))
    rows, events = tell(make_attempt(), look, after, claim="agent", claimed_at=NOW, phase=phase)
    assert (rows.job.reason, events) == (told, 0)


def test_a_wait_that_is_over_is_not_told_any_more() -> None:
    """Otherwise, the job would seem to wait in a queue while its setup runs."""
    waiting, _ = tell_wait(replace(QUEUED, eta=NOW + timedelta(hours=1)), make_attempt())
    look = GangLook(seen=GangSeen(name="g1", state=GangState.RUNNING))
    rows, events = tell(waiting.attempts[1], look, 9, claim="agent")
    assert (rows.job.reason, rows.attempts[1].wait, events) == (f"starts on {OFFER.key}", None, 0)
    assert rows.attempts[1].standing == f"starts on {OFFER.key}"


def test_a_provider_that_does_not_answer_is_told_once_and_only_after_a_while() -> None:
    attempt = make_attempt(launched_at=NOW)
    for after, trouble, told, news in (
        (59, "no route", JOB.reason, 0),
        (60, "no route", "starts at p: the gang's state is unknown: no route", 1),
        (75, "timed\nout", "starts at p: the gang's state is unknown: timed out", 0),
        (90, "", "starts at p: the gang's state is unknown: timed out", 0),
    ):
        look = after_look(GangLook(), GangAbsence.UNKNOWN, NOW, trouble)
        rows, events = tell(attempt, look, after)
        assert (rows.attempts[1].reason == told or rows.job.reason == told, events) == (True, news)
        attempt = rows.attempts[1]


def test_a_queued_gang_whose_provider_does_not_answer_still_waits() -> None:
    waiting, _ = tell_wait(QUEUED, make_attempt())
    look = after_look(GangLook(), GangAbsence.UNKNOWN, NOW, "e" * 999)
    rows, events = tell(waiting.attempts[1], look, 60)
    assert rows.job.reason == f"waits at p: the gang's state is unknown: {'e' * 399}…"
    assert events == 1


def test_a_launch_that_must_be_repeated_is_told_until_it_succeeds() -> None:
    launching = make_attempt(phase=jobs.AttemptPhase.LAUNCHING)
    rows, events = tell(launching, GangLook(trouble="1 of 2 nodes have been started"))
    assert (rows.job.reason, events) == ("starts at p: 1 of 2 nodes have been started", 1)
    booting = gangs.AdvanceAttempt(phase=jobs.AttemptPhase.BOOTING, reason="accepted")
    absent = after_look(GangLook(trouble="full"), GangAbsence.ABSENT, NOW)
    assert absent.trouble == "full"
    changes = advance_attempt(rows, rows.attempts[1], booting, GangLook(), NOW)
    assert changes.job is not None
    assert changes.job.reason == f"starts on {OFFER.key}"
    assert advance_attempt(rows, launching, booting, GangLook(), NOW).job is None


@pytest.mark.parametrize("phase", [jobs.JobPhase.STARTING, jobs.JobPhase.RUNNING])
def test_what_a_second_gang_waits_for_is_not_the_jobs_reason(phase: jobs.JobPhase) -> None:
    job = replace(JOB, phase=phase, standbys=(2,), numbered=2)
    rows, events = tell_wait(QUEUED, make_attempt(2), job)
    assert rows.job == job
    assert (rows.attempts[2].reason, events) == (
        "waits at p: Resources",
        ["waits at p: Resources"],
    )


def test_a_job_that_is_being_stopped_keeps_the_reason_of_its_stop() -> None:
    job = replace(
        JOB,
        phase=jobs.JobPhase.STOPPING,
        reason="stopped by its user",
        stop_reason="stopped by its user",
    )
    rows, _ = tell_wait(QUEUED, make_attempt(), job)
    assert rows.job == job


def test_another_expected_start_is_written_and_is_no_event() -> None:
    uow = UnitOfWork(JOB, [make_attempt()], [])
    for hours in (1, 2):
        seen = replace(QUEUED, eta=NOW + timedelta(hours=hours))
        uow.apply(note_wait(uow.rows, uow.rows.attempts[1], GangLook(seen=seen), NOW))
    assert uow.job.reason.endswith("02:00 UTC")
    assert len(uow.take_changes().events) == 1


def test_another_wait_is_an_event_though_it_has_the_same_words() -> None:
    """The words are for people: what is compared is the state and the provider's own report."""
    uow = UnitOfWork(JOB, [make_attempt()], [])
    for state in (GangState.QUEUED, GangState.STARTING):
        seen = replace(QUEUED, state=state)
        attempt = replace(uow.rows.attempts[1], reason="x")
        uow.apply(note_wait(uow.rows, attempt, GangLook(seen=seen), NOW))
    assert len(uow.take_changes().events) == 2


@pytest.mark.parametrize(
    ("outcome", "stop", "told"),
    [
        (jobs.AttemptOutcome.SUCCEEDED, None, True),
        (jobs.AttemptOutcome.STOPPED, None, True),
        (jobs.AttemptOutcome.LIMIT, jobs.StopCause.DURATION, True),
        (jobs.AttemptOutcome.LIMIT, None, False),
        (jobs.AttemptOutcome.NODE, jobs.StopCause.DURATION, False),
        (None, None, False),
    ],
)
def test_an_end_is_told_by_the_job_or_by_its_attempt(
    outcome: jobs.AttemptOutcome | None, stop: jobs.StopCause | None, told: bool
) -> None:
    assert is_told_by_job(replace(JOB, stop_cause=stop), outcome) is told


def allocation(host: str, rank: int, gang: str = "g1") -> Allocation:
    return Allocation(host=host, gang=gang, rank=rank, project="p", cpus=1, memory_mib=0)


ALLOCATIONS = (allocation("farm/z", 1, "other"), allocation("farm/a", 0), allocation("farm/b", 1))
BROKEN = make_attempt(
    nodes=2,
    offer=replace(OFFER, shared=True),
    outcome=jobs.AttemptOutcome.NODE,
    failure=jobs.FailureKind.GPU,
    first_failed_rank=1,
)


@pytest.mark.parametrize(
    ("attempt", "place"),
    [
        (BROKEN, "farm/b"),
        (replace(BROKEN, first_failed_rank=0), "farm/a"),
        (replace(BROKEN, first_failed_rank=None), BROKEN.offer.key),
        (replace(BROKEN, gang="unknown"), BROKEN.offer.key),
        (replace(BROKEN, nodes=1), BROKEN.offer.key),
        (replace(BROKEN, offer=OFFER), OFFER.key),
        (replace(BROKEN, failure=jobs.FailureKind.LINK), BROKEN.offer.key),
    ],
)
def test_of_several_shared_hosts_the_one_with_the_broken_gpu_is_avoided(
    attempt: jobs.Attempt, place: str
) -> None:
    assert failed_place(attempt, ALLOCATIONS) == place


def look(started: int) -> GangSeen:
    nodes = [
        NodeSeen(rank=rank, engine_id=str(rank), started_at=NOW if rank < started else None)
        for rank in range(2)
    ]
    return GangSeen(name="g1", state=GangState.RUNNING, nodes=nodes)


def test_charges_are_due_again_at_once_while_a_place_has_not_told_of_every_node() -> None:
    attempt = make_attempt(phase=jobs.AttemptPhase.RUNNING, nodes=2)
    known = GangLook()
    for started, seconds, charged in ((1, 10, 1), (2, 20, 2), (2, 64, 0), (2, 65, 2)):
        known = replace(known, told=look(started), told_at=NOW + timedelta(seconds=seconds))
        charges, known = accrue(attempt, known, ())
        assert len(charges) == charged, (started, seconds)
        assert all(charge.amount.micros == 1000 * seconds for charge in charges)


def test_a_kept_gang_that_is_not_billed_yet_is_looked_at_often() -> None:
    """Until then no job can take it over."""
    attempt, look = make_attempt(phase=jobs.AttemptPhase.KEPT), GangLook()
    for age, after in ((0.0, 0.1), (4.0, 1.0), (400.0, 15.0)):
        interval = look_interval(attempt, look, SECOND, NOW + timedelta(seconds=age))
        assert interval.total_seconds() == after
    billed = replace(look, accrued_at=NOW)
    assert look_interval(attempt, billed, SECOND, NOW) == gangs.POLL


def test_a_server_that_has_just_begun_is_not_sure_what_an_earlier_one_asked_for() -> None:
    old = first_look(make_attempt(created_at=NOW - timedelta(seconds=1)), NOW)
    new = first_look(make_attempt(2), NOW)
    assert [(each.doubt, each.unsure) for each in (old, new)] == [(True, True), (False, False)]


@pytest.mark.parametrize(
    ("state", "ended", "seconds", "more"),
    [
        (GangState.ENDED, NOW - 30 * SECOND, 70, 0),
        (GangState.ENDED, None, 75, 25),  # it was seen alive 25 s ago; its end was not recorded
        (GangState.RUNNING, None, 80, 20),  # it was last seen then, and is not there any more
    ],
)
def test_a_gang_is_paid_until_its_end_or_its_last_sighting(
    state: GangState, ended: datetime | None, seconds: int, more: int
) -> None:
    attempt = make_attempt(phase=jobs.AttemptPhase.ENDING, finished_at=NOW - 90 * SECOND)
    node = NodeSeen(rank=0, engine_id="0", started_at=NOW - 100 * SECOND)
    alive = GangSeen(name="g1", state=GangState.RUNNING, nodes=[node])
    told = GangSeen(name="g1", state=state, nodes=[replace(node, ended_at=ended)])
    look = after_look(GangLook(), alive, NOW - 25 * SECOND)
    look = after_look(look, told, NOW - 20 * SECOND)
    over = gangs.AdvanceAttempt(phase=jobs.AttemptPhase.ENDED, reason="it is gone")
    rows = UnitOfWork(JOB, [attempt], []).rows
    changes = advance_attempt(rows, attempt, over, look, NOW)
    assert [charge.amount.micros for charge in changes.charges] == [1000 * seconds]
    [closed] = changes.attempts
    assert closed.ended_at == NOW + (seconds - 100) * SECOND
    unseen = closed.unsure_bill
    assert (unseen.more.micros if unseen else 0) == 1000 * more
    assert unseen is None or unseen.latest == NOW
    assert changes.release == ("g1",)


def test_a_removal_that_keeps_failing_is_told_once_by_all_servers() -> None:
    """The write of the event may fail, and the server may restart."""

    def tell(rows: JobRows, failures: int) -> RowChanges:
        look = replace(GangLook(), failed_removals=failures)
        return note_failed_removal(rows, rows.attempts[attempt.number], look, "503", NOW)

    attempt = make_attempt()
    uow = UnitOfWork(JOB, [attempt], [])
    assert tell(uow.rows, 9) == RowChanges()
    assert len(tell(uow.rows, 10).events) == 1  # this write fails
    uow.apply(tell(uow.rows, 11))
    assert tell(uow.rows, 10) == RowChanges()
    assert [event.kind for event in uow.take_changes().events] == ["unremoved"]
