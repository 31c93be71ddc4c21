"""The spans of ended jobs."""

from datetime import UTC, datetime, timedelta
from typing import Any

from tests.records import FIXED, make_attempt_record, make_job_record

from cavvy.control.decide.job_traces import (
    JobSpan,
    is_traceable,
    trace_job,
    write_traceparent,
)
from cavvy.domain.events import Event
from cavvy.domain.jobs import AttemptOutcome, AttemptPhase, JobPhase
from cavvy.domain.values import replace

NOW = datetime(2027, 1, 1, tzinfo=UTC)


def after(seconds: int) -> datetime:
    return NOW + timedelta(seconds=seconds)


JOB = make_job_record(NOW, phase=JobPhase.DONE, ended_at=after(1000), exit_code=0)
ATTEMPT = make_attempt_record(
    after(10),
    FIXED,
    phase=AttemptPhase.ENDED,
    outcome=AttemptOutcome.SUCCEEDED,
    launched_at=after(12),
    running_at=after(60),
    finished_at=after(990),
    ended_at=after(1000),
)


def show(spans: list[JobSpan]) -> list[tuple[Any, ...]]:
    names = {each.span_id: each.name for each in spans}
    return [
        (
            each.name,
            names.get(each.parent_id or 0),
            round((each.begin - NOW).total_seconds()),
            round((each.end - NOW).total_seconds()),
        )
        for each in spans
    ]


def test_a_life_has_a_span_for_each_step() -> None:
    save = Event(
        id=7, project="p", job_id="j", attempt=1, at=after(500), kind="checkpoint", text=""
    )
    attempt = replace(ATTEMPT, checkpoint_at=after(500), checkpoint_cost=timedelta(seconds=9))
    attempt = replace(attempt, planned=(after(10), after(11)))
    assert show(trace_job(JOB, [attempt], [save])) == [
        ("job", None, 0, 1000),
        ("queue", "job", 0, 10),
        ("attempt", "job", 10, 1000),
        ("plan", "attempt", 10, 11),
        ("launch", "attempt", 11, 12),
        ("start", "attempt", 12, 60),
        ("run", "attempt", 60, 990),
        ("end", "attempt", 990, 1000),
        ("save", "run", 491, 500),
    ]


def test_ids_are_unique_in_a_trace_and_the_same_each_time() -> None:
    lost = replace(
        ATTEMPT, outcome=AttemptOutcome.PREEMPTED, reason="taken", finished_at=after(100)
    )
    second = replace(ATTEMPT, id="j-2", number=2, created_at=after(200), launched_at=after(201))
    spans = trace_job(JOB, [second, lost], [])
    assert spans == trace_job(JOB, [lost, second], [])
    assert len({each.span_id for each in spans}) == len(spans)
    assert {each.trace_id for each in spans} == {spans[0].trace_id}
    assert ("queue", "job", 100, 200) in show(spans)
    assert [each.failed for each in spans if each.name == "attempt"] == ["taken", ""]
    other = trace_job(replace(JOB, id="k"), [], [])
    assert other[0].trace_id != spans[0].trace_id
    run = next(each for each in spans if each.name == "run")
    assert write_traceparent("j", 1) == f"00-{run.trace_id:032x}-{run.span_id:016x}-01"


def test_a_job_that_never_got_nodes_only_waited() -> None:
    failed = replace(JOB, phase=JobPhase.FAILED, reason="no offer", exit_code=None)
    spans = trace_job(failed, [], [])
    assert show(spans) == [("job", None, 0, 1000), ("queue", "job", 0, 1000)]
    assert spans[0].failed == "no offer"


def test_a_launch_that_was_refused_has_no_work() -> None:
    refused = replace(
        ATTEMPT,
        outcome=AttemptOutcome.CAPACITY,
        launched_at=None,
        running_at=None,
        finished_at=None,
    )
    names = [each.name for each in trace_job(JOB, [refused], [])]
    assert names == ["job", "queue", "attempt", "end"]


def test_a_retry_is_another_root_of_the_same_trace() -> None:
    first = trace_job(JOB, [ATTEMPT], [])
    retried = replace(JOB, ended_spells=((after(1000), after(2000)),), ended_at=after(3000))
    second = replace(
        ATTEMPT,
        id="j-2",
        number=2,
        created_at=after(2100),
        launched_at=after(2101),
        running_at=after(2102),
        finished_at=after(2900),
        ended_at=after(3000),
    )
    spans = trace_job(retried, [ATTEMPT, second], [])
    assert show(spans)[:2] == [("job", None, 2000, 3000), ("queue", "job", 2000, 2100)]
    assert not {each.span_id for each in first} & {each.span_id for each in spans}
    assert first[0].trace_id == spans[0].trace_id


def test_only_jobs_without_nodes_of_their_own_are_traceable() -> None:
    assert is_traceable(JOB, [ATTEMPT])
    assert is_traceable(JOB, [replace(ATTEMPT, phase=AttemptPhase.KEPT)])
    assert not is_traceable(JOB, [replace(ATTEMPT, phase=AttemptPhase.ENDING)])
    assert not is_traceable(replace(JOB, phase=JobPhase.RUNNING), [])


def test_clocks_that_disagree_make_no_negative_span() -> None:
    odd = replace(ATTEMPT, running_at=after(5), finished_at=after(3), ended_at=after(1))
    spans = trace_job(replace(JOB, ended_at=after(-5)), [odd], [])
    assert all(each.begin <= each.end for each in spans)
