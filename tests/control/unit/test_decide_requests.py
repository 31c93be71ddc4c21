"""What users' requests and the times of held jobs change; which gangs are orphans."""

from datetime import UTC, datetime, timedelta

import pytest
from tests.records import make_attempt_record, make_job_record

from cavvy.control.clock import WallClock
from cavvy.control.decide.deadline import (
    find_successor,
    go_ahead,
    is_reviewed,
    leave_offer,
    list_worth,
    may_go_ahead,
)
from cavvy.control.decide.requests import (
    drill_attempt,
    find_live,
    hold_job,
    is_stopping,
    is_timed,
    object_to_retry,
    release_kept,
    retry_job,
    stop_job,
)
from cavvy.control.decide.restored import describe_gang, is_orphan
from cavvy.control.decide.schedule import (
    find_hold,
    find_run,
    find_window,
    hold_schedule,
    hold_window,
    make_run_id,
    release_job,
    say_left_out,
)
from cavvy.control.job_service import JobIds
from cavvy.domain.elastic import NodeRange
from cavvy.domain.gangs import GangSeen, GangState, NodeSeen
from cavvy.domain.jobs import FAR, AttemptPhase, JobPhase, JobRecord, StopCause
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import (
    CheckpointPolicy,
    Delivery,
    JobLimits,
    JobSchedule,
    ResourceSpec,
    StartWindow,
    TaskSpec,
    WindowSpan,
)
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.planner.calendar import TimeInterval
from cavvy.planner.candidates import Candidates
from cavvy.planner.deadline.recommendation import Recommendation
from cavvy.planner.spot.view import RunMode

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
SECOND, MINUTE, HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)
SPOT = Offer(
    provider="p", region="r", instance_type="t", purchase=Purchase.SPOT, rate=HourlyRate(100)
)
FIXED = replace(SPOT, purchase=Purchase.ON_DEMAND)
TASK = TaskSpec(name="n", run="x")
HOURLY = JobSchedule(cron="0 * * * *", time_zone="UTC")
JOB = make_job_record(NOW, task=TASK, phase=JobPhase.RUNNING, attempt=1)
ATTEMPT = make_attempt_record(NOW, SPOT, gang="g1", phase=AttemptPhase.RUNNING, running_at=NOW)


def asking(**changes: object) -> JobRecord:
    return replace(JOB, task=replace(TASK, **changes))  # type: ignore[arg-type]


# Requests


def test_a_job_is_queued_at_once_or_held_until_its_time() -> None:
    held, event = hold_job(JOB, NOW)
    assert (held.not_before, held.held_until, event.text, event.fact) == (
        None,
        None,
        "submitted",
        "submitted",
    )
    later, event = hold_job(asking(schedule=JobSchedule(at=NOW + HOUR)), NOW)
    assert (later.not_before, later.held_until, event.fact) == (NOW + HOUR, None, "scheduled")
    repeats, event = hold_job(asking(schedule=HOURLY), NOW)
    assert (repeats.not_before, repeats.held_until) == (FAR, NOW + HOUR)
    assert repeats.reason == "next run at 2030-01-01 13:00 UTC"
    window, _ = hold_job(asking(window=StartWindow(spans=())), NOW)
    assert (window.held_until, window.reason) == (NOW, "submitted")
    assert event.fact == "scheduled"


def test_a_job_with_a_time_is_looked_at_while_it_waits() -> None:
    assert is_timed(replace(JOB, held_until=NOW))
    assert is_timed(asking(limits=JobLimits(deadline=NOW)))
    assert is_timed(asking(limits=JobLimits(deadline_after=HOUR)))
    assert not is_timed(JOB)


@pytest.mark.parametrize(
    ("phase", "after", "ended", "notices"),
    [
        (JobPhase.QUEUED, JobPhase.STOPPED, NOW, (Delivery.FINISH,)),
        (JobPhase.RUNNING, JobPhase.STOPPING, None, ()),
    ],
)
def test_a_stop_is_at_once_only_where_the_job_waits(
    phase: JobPhase, after: JobPhase, ended: datetime | None, notices: tuple[Delivery, ...]
) -> None:
    changes = stop_job(replace(JOB, phase=phase), "enough", NOW)
    job = changes.job
    assert job is not None
    assert (job.phase, job.ended_at, changes.notices) == (after, ended, notices)
    assert (job.stop_reason, job.stop_cause) == ("enough", StopCause.USER)


def test_a_job_is_stopped_once() -> None:
    assert is_stopping(replace(JOB, phase=JobPhase.DONE))
    assert is_stopping(replace(JOB, stop_reason="enough"))
    assert not is_stopping(JOB)


def test_gangs_that_are_kept_end_now() -> None:
    kept = replace(ATTEMPT, phase=AttemptPhase.KEPT, kept_until=NOW + HOUR)
    changes = release_kept(JOB, [ATTEMPT, kept], NOW)
    assert changes is not None
    assert changes.attempts == (replace(kept, kept_until=NOW),)
    assert release_kept(JOB, [ATTEMPT], NOW) is None


def test_only_what_failed_or_was_stopped_is_retried() -> None:
    assert object_to_retry(replace(JOB, phase=JobPhase.FAILED), NOW) is None
    assert object_to_retry(replace(JOB, phase=JobPhase.STOPPED), NOW) is None
    for phase, hint in (
        (JobPhase.DONE, "use `cavvy rerun` to submit the job again"),
        (JobPhase.RUNNING, "the job has not ended"),
    ):
        objection = object_to_retry(replace(JOB, phase=phase), NOW)
        assert objection is not None
        assert objection[1] == hint


def test_a_job_whose_limit_would_end_it_at_once_is_not_retried() -> None:
    failed = replace(JOB, phase=JobPhase.FAILED, stop_cause=StopCause.DURATION)
    limited = replace(failed, task=replace(JOB.task, limits=JobLimits(duration=HOUR)))
    late = replace(failed, task=replace(JOB.task, limits=JobLimits(deadline=NOW)))
    for job, limit in ((limited, "limits.duration"), (late, "limits.deadline")):
        objection = object_to_retry(job, NOW)
        assert objection is not None
        assert limit in objection[1]
    assert object_to_retry(late, NOW - HOUR) is None
    assert object_to_retry(replace(limited, stop_cause=None), NOW) is None


def test_a_retry_starts_counting_anew_and_waits_for_no_time_that_is_over() -> None:
    old = replace(
        asking(schedule=JobSchedule(at=NOW - HOUR)), retries={"node": 1}, avoid={"x": NOW}
    )
    fresh = retry_job(old, NOW).job
    assert fresh is not None
    assert (fresh.phase, fresh.retries, fresh.avoid) == (JobPhase.QUEUED, {}, {})
    assert (fresh.not_before, fresh.held_until) == (None, None)
    again = retry_job(replace(fresh, ended_at=NOW + HOUR), NOW + 2 * HOUR).job
    assert again is not None
    assert again.ended_spells == (*fresh.ended_spells, (NOW + HOUR, NOW + 2 * HOUR))
    repeats = retry_job(asking(schedule=HOURLY), NOW).job
    assert repeats is not None
    assert (repeats.not_before, repeats.held_until) == (FAR, NOW + HOUR)


def test_limits_count_the_least_that_an_elastic_job_needs_while_it_waits_again() -> None:
    grown = replace(asking().task, nodes=8, elastic=NodeRange(least=2, most=16))
    moved = replace(JOB, task=replace(JOB.task, resources=ResourceSpec(cpus_min=3)))
    for fresh in (
        retry_job(replace(JOB, task=grown), NOW).job,
        retry_job(replace(JOB, task=grown), NOW, moved=moved).job,
    ):
        assert fresh is not None
        assert (fresh.task.nodes, fresh.task.elastic) == (2, grown.elastic)
    fixed = retry_job(replace(JOB, task=replace(grown, elastic=None)), NOW).job
    assert fixed is not None
    assert fixed.task.nodes == 8


def test_a_drill_takes_the_nodes_of_an_attempt_that_lives() -> None:
    assert find_live(JOB, [ATTEMPT]) is ATTEMPT
    assert find_live(JOB, [replace(ATTEMPT, phase=AttemptPhase.ENDING)]) is None
    assert find_live(JOB, [replace(ATTEMPT, number=2)]) is None
    assert find_live(replace(JOB, phase=JobPhase.DONE), [ATTEMPT]) is None
    changes = drill_attempt(JOB, ATTEMPT, MINUTE, NOW)
    assert changes.attempts[0].drill_until == NOW + MINUTE


# Held jobs


def test_a_run_of_a_schedule_has_the_same_id_whenever_it_is_made() -> None:
    job = replace(asking(schedule=HOURLY), held_until=NOW)
    run = find_run(job, HOURLY, NOW + SECOND)
    assert run == find_run(job, HOURLY, NOW + MINUTE)
    assert (run.task.schedule, run.task.name) == (None, "n-20300101-1200")
    assert len(run.run_id) == 16
    assert run.run_id < make_run_id("j", NOW + HOUR)


def test_the_ids_of_runs_and_of_other_jobs_sort_by_time() -> None:
    clock = WallClock()
    now = clock.now()
    assert make_run_id("j", now - HOUR) < JobIds(clock).make() < make_run_id("j", now + 24 * HOUR)


def test_a_new_job_with_a_window_is_held_from_its_start_time_or_from_now() -> None:
    window = StartWindow(spans=())
    later = JobSchedule(at=NOW + HOUR, time_zone="UTC")
    assert find_hold(TASK, NOW) == (None, None)
    assert find_hold(replace(TASK, schedule=later), NOW) == (NOW + HOUR, None)
    assert find_hold(replace(TASK, window=window), NOW) == (FAR, NOW)
    assert find_hold(replace(TASK, window=window, schedule=later), NOW) == (FAR, NOW + HOUR)
    assert find_hold(replace(TASK, schedule=HOURLY), NOW) == (FAR, NOW + HOUR)


def test_a_schedule_is_held_until_its_next_run() -> None:
    job = replace(asking(schedule=HOURLY), held_until=NOW, last_run="old")
    begun = hold_schedule(job, HOURLY, "new", "run n begins", NOW).job
    assert begun is not None
    assert (begun.held_until, begun.last_run) == (NOW + HOUR, "new")
    left = hold_schedule(job, HOURLY, None, say_left_out(job, JOB, NOW + MINUTE), NOW)
    assert left.job is not None
    assert left.job.last_run == "old"
    assert left.events[0].text.startswith("the run of 2030-01-01 12:00 UTC is skipped")
    with pytest.raises(ValueError, match="no day ever matches"):
        find_hold(replace(TASK, schedule=JobSchedule(cron="0 0 31 2 *", time_zone="UTC")), NOW)


def test_a_job_waits_for_its_window_no_longer_than_its_deadline() -> None:
    interval = TimeInterval(start=NOW + HOUR, end=NOW + 9 * HOUR)
    job = replace(JOB, held_until=NOW, not_before=FAR)
    changes = hold_window(job, interval, (), NOW)
    assert changes.job is not None
    assert (changes.job.held_until, len(changes.events)) == (NOW + HOUR, 1)
    again = hold_window(changes.job, interval, (), NOW)
    assert (again.job, again.events) == (changes.job, ())
    words = hold_window(replace(changes.job, reason="x"), interval, (), NOW)
    assert (words.job, words.events) == (changes.job, ())
    late = replace(job, task=replace(TASK, limits=JobLimits(deadline=NOW + MINUTE)))
    bound = hold_window(late, interval, (), NOW).job
    assert bound is not None
    assert bound.held_until == NOW + MINUTE
    assert find_window(JOB, NOW) is None
    span = WindowSpan(days=tuple(range(7)), start_minute=0, end_minute=1440)
    always = asking(window=StartWindow(spans=(span,)))
    assert find_window(always, NOW) is not None
    for after in (HOUR, timedelta(0), -HOUR):
        limited = replace(always.task, limits=JobLimits(deadline=NOW + after))
        found = find_window(replace(always, task=limited), NOW)
        assert (found is not None) is (after > timedelta(0))
    freed = release_job(job, "the job no longer waits", NOW).job
    assert freed is not None
    assert (freed.not_before, freed.held_until) == (None, None)


# Orphans


@pytest.mark.parametrize(
    ("known", "first", "started", "delay", "sure"),
    [
        (False, 0, None, 0, False),
        (False, 29, None, 0, False),
        (False, 30, None, 0, True),
        (False, 0, 30, 0, True),
        (True, 0, 30, 0, False),
        (True, 30, None, 0, True),
        (False, 30, None, 60, False),
    ],
)
def test_a_gang_is_an_orphan_once_two_witnesses_agree(
    known: bool, first: int, started: int | None, delay: int, sure: bool
) -> None:
    node = NodeSeen(
        rank=0, engine_id="0", started_at=None if started is None else NOW - started * SECOND
    )
    seen = GangSeen(name="g", state=GangState.RUNNING, nodes=[node])
    attempt = ATTEMPT if known else None
    found = is_orphan(
        seen, attempt, NOW, first=NOW - first * SECOND, visibility_delay=delay * SECOND
    )
    assert found is sure
    gang = describe_gang("p", seen, attempt)
    assert (gang.job_id, gang.why) == (
        ("j", "attempt 1 has ended") if known else (None, "not in the database")
    )


# Deadlines


def test_a_gang_whose_work_would_be_lost_is_not_left() -> None:
    saves = asking(checkpoint=CheckpointPolicy(path="c"))
    assert is_reviewed(saves, ATTEMPT)
    assert not is_reviewed(JOB, ATTEMPT)
    assert is_reviewed(JOB, replace(ATTEMPT, running_at=None))
    assert not is_reviewed(saves, replace(ATTEMPT, phase=AttemptPhase.ENDING))
    assert may_go_ahead(saves, ATTEMPT)
    assert not may_go_ahead(JOB, ATTEMPT)
    assert not may_go_ahead(saves, replace(ATTEMPT, offer=FIXED))


def test_a_gang_at_risk_goes_to_other_spot_of_about_its_price() -> None:
    near, dear = replace(SPOT, region="n"), replace(SPOT, region="d", rate=HourlyRate(200))
    best = Recommendation(mode=RunMode.SPOT, offers=(SPOT, FIXED, dear, near), reason="best")
    moved = go_ahead(JOB, ATTEMPT, best)
    assert (moved.offers, moved.stay) == ((near,), False)
    stays = go_ahead(JOB, ATTEMPT, replace(best, offers=(SPOT, FIXED, dear)))
    assert (stays.offers, stays.stay) == ((), True)
    assert stays.reason != moved.reason


def test_a_successor_has_offers_of_its_own() -> None:
    found = find_successor(Candidates(offers=(replace(SPOT, shared=True), FIXED, SPOT)))
    assert (found.mode, found.offers) == (RunMode.ON_DEMAND, (FIXED, SPOT))
    assert find_successor(Candidates(offers=(SPOT,))).mode is RunMode.SPOT
    assert find_successor(Candidates()).mode is RunMode.ON_DEMAND
    left = leave_offer(JOB, SPOT, NOW)
    assert left.avoid == {SPOT.key: NOW + MINUTE}
    refused = replace(JOB, avoid={SPOT.key: NOW + 2 * HOUR, FIXED.key: NOW + 2 * HOUR + SECOND})
    assert list_worth(refused, [SPOT, FIXED], NOW) == [SPOT]
