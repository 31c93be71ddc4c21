"""What the jobs of a group do because of each other: pure decisions."""

from datetime import UTC, datetime, timedelta
from typing import Any

from tests.records import FIXED, make_attempt_record, make_job_record

from cavvy.control.decide.groups import PATIENCE, decide_end, decide_return, is_assembled
from cavvy.domain.jobs import AttemptPhase, JobPhase, JobRecord, Node
from cavvy.domain.tasks import JobGroup, TaskSpec

NOW = datetime(2030, 1, 1, tzinfo=UTC)
EARLY = NOW - PATIENCE


def make(name: str, phase: JobPhase, joins: bool = False, **changes: Any) -> JobRecord:
    group = JobGroup(name="g", joins=joins, helper=name == "helper", linger=timedelta(minutes=1))
    task = TaskSpec(name=name, run="x", group=group)
    return make_job_record(EARLY, id=name, name=name, task=task, phase=phase, **changes)


def test_a_job_that_joined_and_failed_stops_no_other_job() -> None:
    own = make("own", JobPhase.RUNNING)
    assert decide_end(own, [own, make("late", JobPhase.FAILED, joins=True)], NOW).changes is None
    assert decide_end(own, [own, make("first", JobPhase.FAILED)], NOW).changes is not None


def test_a_helper_lingers_after_the_last_of_the_others() -> None:
    own = make("helper", JobPhase.RUNNING)
    ended = [make(name, JobPhase.DONE, ended_at=at) for name, at in (("a", EARLY), ("b", NOW))]
    step = decide_end(own, [own, *ended], NOW)
    assert (step.changes, step.after) == (None, timedelta(minutes=1))
    assert decide_end(own, [own, *ended], NOW + timedelta(minutes=1)).changes is not None


def test_nodes_are_given_back_for_founding_jobs_only() -> None:
    own, gang = make("own", JobPhase.STARTING), make_attempt_record(NOW, FIXED)
    for joins in (False, True):
        group = [own, make("other", JobPhase.QUEUED, joins=joins)]
        assert (decide_return(own, gang, group, NOW).changes is None) == joins
        assert decide_return(own, gang, group, EARLY).changes is None
    worked = make_attempt_record(NOW, FIXED, phase=AttemptPhase.RUNNING)
    assert decide_return(own, worked, [own, make("x", JobPhase.QUEUED)], NOW).changes is None


def test_a_group_starts_when_each_node_of_each_founding_job_has_an_agent() -> None:
    def nodes(*claims: str) -> list[Node]:
        return [
            Node(attempt_id="a", project="p", rank=rank, claim=claim or None)
            for rank, claim in enumerate(claims)
        ]

    one, two = (make(name, JobPhase.STARTING) for name in ("one", "two"))
    group = [one, two, make("late", JobPhase.QUEUED, joins=True), make("gone", JobPhase.DONE)]
    assert is_assembled(group, {"one": nodes("n"), "two": nodes("n", "n")})
    assert not is_assembled(group, {"one": nodes("n"), "two": nodes("n", "")})
    assert not is_assembled(group, {"one": nodes("n")})
    waits = [one, make("two", JobPhase.QUEUED)]
    assert not is_assembled(waits, {"one": nodes("n")})
