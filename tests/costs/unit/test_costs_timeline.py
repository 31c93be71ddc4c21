"""Every moment of a job's life is counted exactly once, under one name."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st
from tests.records import make_attempt_record, make_job_record

from cavvy.costs.timeline import TimeUse, trace
from cavvy.domain.jobs import Attempt, AttemptOutcome, JobRecord
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace

START = datetime(2026, 1, 1, tzinfo=UTC)
OFFER = Offer(provider="p", region="r", instance_type="t", rate=HourlyRate(1))


def at(minutes: float) -> datetime:
    return START + timedelta(minutes=minutes)


def make_job(ended: float | None = None) -> JobRecord:
    return make_job_record(
        START, task=TaskSpec(name="n", run="true"), ended_at=None if ended is None else at(ended)
    )


def make_attempt(number: int, created: float, **times: float | AttemptOutcome) -> Attempt:
    moments = {
        f"{name}_at": at(value)
        for name, value in times.items()
        if not isinstance(value, AttemptOutcome)
    }
    return replace(
        make_attempt_record(at(created), OFFER, id=f"j-{number}", number=number),
        outcome=next(
            (value for value in times.values() if isinstance(value, AttemptOutcome)), None
        ),
        **moments,
    )


def minutes(job: JobRecord, attempts: list[Attempt], now: float) -> dict[str, float]:
    totals = trace(job, attempts, at(now)).totals
    return {
        spell.value: length / timedelta(minutes=1) for spell, length in totals.items() if length
    }


def test_a_simple_run() -> None:
    attempt = make_attempt(1, 2, running=5, finished=15, ended=16, outcome=AttemptOutcome.SUCCEEDED)
    assert minutes(make_job(16), [attempt], 99) == {
        "queued": 2,
        "starting": 3,
        "running": 10,
        "stopping": 1,
    }


def test_work_since_the_newest_checkpoint_is_lost_with_the_node() -> None:
    first = make_attempt(
        1, 0, running=1, checkpoint=7, finished=10, ended=11, outcome=AttemptOutcome.PREEMPTED
    )
    second = make_attempt(
        2, 12, running=13, finished=20, ended=21, outcome=AttemptOutcome.SUCCEEDED
    )
    found = minutes(make_job(21), [second, first], 99)
    assert found == {"queued": 1, "starting": 2, "running": 6 + 7, "lost": 3, "stopping": 2}


def test_without_a_checkpoint_all_running_is_lost() -> None:
    first = make_attempt(1, 0, running=1, finished=10, ended=10, outcome=AttemptOutcome.NODE)
    assert minutes(make_job(), [first], 12) == {"starting": 1, "lost": 9, "queued": 2}


def test_a_checkpoint_of_the_attempt_before_saves_nothing_of_this_one() -> None:
    first = make_attempt(
        1, 0, running=5, checkpoint=3, finished=10, ended=10, outcome=AttemptOutcome.PREEMPTED
    )
    assert minutes(make_job(10), [first], 99) == {"starting": 5, "lost": 5}


def test_a_failed_program_loses_nothing_to_the_place() -> None:
    first = make_attempt(1, 0, running=1, finished=10, ended=10, outcome=AttemptOutcome.EXIT)
    assert minutes(make_job(10), [first], 99) == {"starting": 1, "running": 9}


def test_an_attempt_that_never_ran_is_starting() -> None:
    first = make_attempt(1, 0, finished=4, ended=5, outcome=AttemptOutcome.CAPACITY)
    assert minutes(make_job(), [first], 9) == {"starting": 4, "stopping": 1, "queued": 4}


def test_a_job_that_lives_is_traced_to_now() -> None:
    assert minutes(make_job(), [], 3) == {"queued": 3}
    assert minutes(make_job(), [make_attempt(1, 1, running=2)], 5) == {
        "queued": 1,
        "starting": 1,
        "running": 3,
    }


def test_a_new_attempt_ends_the_stopping_of_the_old() -> None:
    first = make_attempt(1, 0, running=1, finished=3, ended=8, outcome=AttemptOutcome.EXIT)
    second = make_attempt(2, 4, running=5)
    assert minutes(make_job(), [first, second], 9) == {
        "starting": 2,
        "running": 2 + 4,
        "stopping": 1,
    }


def test_a_gang_beside_the_first_counts_from_when_it_has_the_work() -> None:
    job = replace(make_job(ended=60), attempt=2)
    first = make_attempt(
        1, 0, running=2, finished=30, ended=31, checkpoint=30, outcome=AttemptOutcome.PREEMPTED
    )
    second = make_attempt(
        2, 20, running=31, finished=60, ended=60, outcome=AttemptOutcome.SUCCEEDED
    )
    told = minutes(job, [first, second], 60)
    assert told == {"starting": 3, "running": 57}


def test_a_gang_beside_that_never_got_the_work_changes_nothing() -> None:
    job = replace(make_job(ended=60), attempt=1)
    own = make_attempt(1, 0, running=2, finished=60, ended=60, outcome=AttemptOutcome.SUCCEEDED)
    refused = make_attempt(2, 20, ended=21, outcome=AttemptOutcome.CAPACITY)
    given_back = make_attempt(3, 40, launched=41, ended=50, outcome=AttemptOutcome.STOPPED)
    assert minutes(job, [own, refused, given_back], 60) == minutes(job, [own], 60)


def test_an_attempt_that_begins_when_the_one_before_it_ends_is_no_gang_beside_it() -> None:
    attempts = [
        make_attempt(1, 0, running=2, finished=10, ended=10, outcome=AttemptOutcome.NODE),
        make_attempt(2, 10, ended=15),
        make_attempt(3, 20, running=21),
    ]
    job = replace(make_job(30), attempt=3)
    stretches = trace(job, attempts, at(30)).stretches
    assert [each.attempt for each in stretches if each.spell is TimeUse.STARTING] == [1, 2, 3]


def test_stretches_name_their_attempt() -> None:
    first = make_attempt(1, 1, running=2, finished=3, ended=3, outcome=AttemptOutcome.PREEMPTED)
    second = make_attempt(2, 4)
    stretches = trace(make_job(), [first, second], at(5)).stretches
    assert [(s.spell, s.attempt) for s in stretches] == [
        (TimeUse.QUEUED, 0),
        (TimeUse.STARTING, 1),
        (TimeUse.LOST, 1),
        (TimeUse.QUEUED, 1),
        (TimeUse.STARTING, 2),
    ]


moment = st.none() | st.integers(-5, 60).map(at)


@st.composite
def wild_attempts(draw: st.DrawFn) -> list[Attempt]:
    """Attempts whose times contradict each other, as several machines' clocks can make them."""
    return [
        replace(
            make_attempt(number, draw(st.integers(-5, 60))),
            running_at=draw(moment),
            checkpoint_at=draw(moment),
            finished_at=draw(moment),
            ended_at=draw(moment),
            outcome=draw(st.none() | st.sampled_from(AttemptOutcome)),
        )
        for number in range(1, draw(st.integers(0, 4)) + 1)
    ]


@given(wild_attempts(), st.none() | st.integers(0, 60), st.integers(0, 60))
def test_the_life_is_covered_exactly_once(
    attempts: list[Attempt], ended: int | None, now: int
) -> None:
    job = make_job(ended)
    timeline = trace(job, attempts, at(now))
    end = at(now if ended is None else ended)
    edges = [START, *(stretch.until for stretch in timeline.stretches)]
    assert [stretch.since for stretch in timeline.stretches] == edges[:-1]
    assert edges[-1] == end
    assert timeline.total() == sum(timeline.totals.values(), timedelta(0)) == end - START


def test_a_gang_beside_the_jobs_own_that_never_worked_is_no_part_of_its_life() -> None:
    own = make_attempt(1, 0, running=10, finished=100, ended=110, outcome=AttemptOutcome.PREEMPTED)
    beside = make_attempt(2, 50, ended=130)
    after = make_attempt(
        3, 120, running=140, finished=200, ended=200, outcome=AttemptOutcome.SUCCEEDED
    )
    told = trace(replace(make_job(200), attempt=3), [own, beside, after], at(500))
    assert {stretch.attempt for stretch in told.stretches} <= {0, 1, 3} | {
        2 * (s.spell is TimeUse.QUEUED) for s in told.stretches
    }
    assert told.total(TimeUse.STARTING) == timedelta(minutes=10 + 20)


def test_the_time_between_an_end_and_a_retry_is_not_queued() -> None:
    first = make_attempt(1, 1, running=2, finished=5, ended=6, outcome=AttemptOutcome.EXIT)
    second = make_attempt(2, 50, running=51, finished=60, ended=61)
    spells = ((at(5), at(40)), (at(62), at(90)))  # the gang ended a minute after the job
    job = replace(make_job(), ended_spells=spells)
    assert minutes(job, [first, second], 100) == {
        "queued": 1 + 10 + 1 + 10,
        "starting": 2,
        "running": 3 + 9,
        "stopping": 2,
        "ended": 34 + 28,
    }
    waiting = minutes(replace(job, ended_spells=spells[:1]), [first], 45)
    assert waiting == {"queued": 1 + 5, "starting": 1, "running": 3, "stopping": 1, "ended": 34}
