"""Jobs that wait for other jobs, with the server killed at every call."""

from datetime import UTC, datetime, timedelta

import pytest
from tests.records import make_job_record
from tests.sim.sim.test_sim_scenarios import CHEAP, run_scenario, task

from cavvy.control.decide.groups import decide_dependent
from cavvy.domain.jobs import JobPhase, StopCause
from cavvy.domain.tasks import IndexRange, JobDependency, StartCondition, TaskSpec
from cavvy.domain.values import replace
from cavvy.sim.scenario import (
    CrashMoment,
    JobTrace,
    ServerCrash,
    SimSubmission,
    UserAction,
    UserIntervention,
)

SUCCESS, FAILURE, ANY = StartCondition
FAILS = {"FAKE_EXIT_CODE": "3"}


def named(name: str, *after: JobDependency, fails: bool = False) -> TaskSpec:
    return replace(task(60, env=FAILS if fails else {}), name=name, after=after)


def run(*tasks: TaskSpec, **more: object) -> list[JobTrace]:
    """Run the tasks, each submitted ten seconds after the one before it."""
    submissions = tuple(SimSubmission(task=each, at_s=10 * at) for at, each in enumerate(tasks))
    return list(run_scenario(submissions=submissions, offers=(CHEAP,), **more).traces)


def phases(traces: list[JobTrace]) -> list[JobPhase]:
    return [each.job.phase for each in traces]


def retry(job: int, at_s: float) -> UserIntervention:
    return UserIntervention(action=UserAction.RETRY, job=job, at_s=at_s)


def test_a_job_starts_only_after_the_jobs_before_it() -> None:
    a, b, c = run(named("a"), named("b"), named("c", JobDependency("a"), JobDependency("b", ANY)))
    assert phases([a, b, c]) == [JobPhase.DONE] * 3
    ended = max(each.job.ended_at for each in (a, b) if each.job.ended_at)
    assert c.attempts[0].created_at >= ended
    assert c.job.after == ()
    texts = [each.text for each in c.events if each.kind == "queued"]
    assert texts == [
        "submitted, waits until a succeeds and b ends",
        "a succeeded and b succeeded",
    ]


@pytest.mark.parametrize(
    ("fails", "on", "starts"),
    [
        (False, SUCCESS, True),
        (False, FAILURE, False),
        (False, ANY, True),
        (True, SUCCESS, False),
        (True, FAILURE, True),
        (True, ANY, True),
    ],
)
def test_the_condition_decides(fails: bool, on: StartCondition, starts: bool) -> None:
    _, after, last, always = run(
        named("a", fails=fails),
        named("b", JobDependency("a", on)),
        named("c", JobDependency("b")),
        named("d", JobDependency("b", ANY)),
    )
    expected = JobPhase.DONE if starts else JobPhase.STOPPED
    assert phases([after, last, always]) == [expected, expected, JobPhase.DONE]
    assert bool(after.attempts) is bool(last.attempts) is starts
    if not starts:
        assert after.job.stop_cause is last.job.stop_cause is StopCause.DEPENDENCY
        end = "failed" if fails else "succeeded"
        how = "succeeds" if fails else "fails"
        assert after.job.reason == f"did not start: it starts after a {how}, but a {end}"
        assert last.job.reason.endswith("b was stopped or did not start")


@pytest.mark.parametrize("first", range(8, 11))
def test_a_job_starts_after_one_that_ended_while_the_disk_was_full(first: int) -> None:
    full = frozenset(range(first, first + 30))
    found = run(named("a"), named("b", JobDependency("a")), broken=full)
    assert phases(found) == [JobPhase.DONE] * 2


def test_a_stopped_job_meets_only_the_condition_any() -> None:
    stop = UserIntervention(action=UserAction.STOP, job=0, at_s=20)
    found = run(
        named("a"),
        named("b", JobDependency("a")),
        named("c", JobDependency("a", FAILURE)),
        named("d", JobDependency("a", ANY)),
        interventions=(stop,),
    )
    assert phases(found) == [*[JobPhase.STOPPED] * 3, JobPhase.DONE]


def test_a_retry_lets_all_later_jobs_run() -> None:
    found = run(
        named("a", fails=True),
        named("b", JobDependency("a", FAILURE)),
        named("c", JobDependency("b")),
        named("d", JobDependency("a")),
        named("e", JobDependency("d")),
        interventions=(retry(0, 7200),),
    )
    # the job fails again, so those after its success wait again, and end again
    assert phases(found) == [
        JobPhase.FAILED,
        JobPhase.DONE,
        JobPhase.DONE,
        JobPhase.STOPPED,
        JobPhase.STOPPED,
    ]
    for each in found[3:]:
        kinds = [event.kind for event in each.events]
        assert kinds == ["queued", "stopped", "queued", "stopped"]
        assert each.events[2].text == "a job before it was retried"
        assert not each.attempts


@pytest.mark.parametrize("fails", [False, True])
def test_a_job_waits_for_all_jobs_of_an_array_and_an_array_for_a_job(fails: bool) -> None:
    first = replace(named("a", fails=fails), array=(IndexRange(0, 2),), parallel=1)
    last = replace(named("c", JobDependency("b")), array=(IndexRange(0, 2),))
    found = run(first, named("b", JobDependency("a")), last, named("d", JobDependency("a", ANY)))
    by_name = {each.job.name: each for each in found}
    ended = [by_name[f"a.{index}"].job.ended_at for index in range(3)]
    expected = JobPhase.STOPPED if fails else JobPhase.DONE
    assert {by_name[name].job.phase for name in ("b", "c.0", "c.1", "c.2")} == {expected}
    assert by_name["d"].job.phase is JobPhase.DONE
    assert by_name["d"].attempts[0].created_at >= max(each for each in ended if each)
    if fails:
        assert by_name["b"].events[-1].at >= max(each for each in ended if each)


def test_a_job_whose_condition_is_missed_is_not_retried_alone() -> None:
    found = run(
        named("a", fails=True), named("b", JobDependency("a")), interventions=(retry(1, 7200),)
    )
    assert [each.kind for each in found[1].events] == ["queued", "stopped"]


@pytest.mark.parametrize("on", [SUCCESS, FAILURE, ANY])
def test_a_job_after_a_removed_job_never_starts(on: StartCondition) -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    changes = decide_dependent(make_job_record(now, after=(JobDependency("a", on, "j1"),)), {}, now)
    assert changes is not None
    assert changes.job is not None
    assert changes.job.phase is JobPhase.STOPPED
    assert changes.job.reason.endswith("but a was removed")


def test_a_waiting_job_keeps_its_deadline_and_can_be_stopped() -> None:
    limits = replace(task().limits, deadline_after=timedelta(seconds=20))
    stop = UserIntervention(action=UserAction.STOP, job=2, at_s=25)
    late = replace(named("b", JobDependency("a")), limits=limits)
    found = run(named("a"), late, named("c", JobDependency("a")), interventions=(stop,))
    assert phases(found) == [JobPhase.DONE, JobPhase.FAILED, JobPhase.STOPPED]
    assert found[1].job.stop_cause is StopCause.DEADLINE
    assert found[2].job.stop_cause is StopCause.USER


@pytest.mark.parametrize("when", CrashMoment)
@pytest.mark.parametrize("first", [1, 2, 3])
def test_no_crash_loses_or_repeats_a_job(when: CrashMoment, first: int) -> None:
    """The server is killed at every third call, so the three cases include every call."""
    crashes = tuple(ServerCrash(call=each, when=when, down_s=2) for each in range(first, 150, 3))
    found = run(
        named("a", fails=True),
        named("b", JobDependency("a", FAILURE)),
        named("c", JobDependency("a"), JobDependency("b", ANY)),
        named("d", JobDependency("c", ANY)),
        interventions=(retry(0, 600),),
        crashes=crashes,
    )
    assert phases(found) == [JobPhase.FAILED, JobPhase.DONE, JobPhase.STOPPED, JobPhase.DONE]
    starts = [[event.kind for event in each.events].count("placed") for each in found]
    assert starts == [2, 1, 0, 1]
    kinds = [event.kind for event in found[2].events]
    assert kinds == ["queued", "stopped", "queued", "stopped"]
