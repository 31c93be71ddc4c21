"""What a service does while a new revision of it is tried out."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cavvy.capabilities.serving.decide.service import (
    ReplicaSeen,
    ServiceSnapshot,
    ServiceStep,
    list_serving,
    order_replica,
)
from cavvy.capabilities.serving.decide.update import (
    as_revision,
    begin_update,
    decide_update,
    remember_former,
    remember_worked,
)
from cavvy.capabilities.serving.replicas import CandidateRevision, ReplicaState, RevisionTraffic
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.control.decide.budgets import ServiceStop
from cavvy.domain.jobs import JobPhase
from cavvy.domain.service_updates import RevisionSums, UpdateEnd
from cavvy.domain.services import ReplicaCount, ServiceSpec, ServiceUpdate, UpdateStrategy
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SPEC = ServiceSpec(port=80, replicas=ReplicaCount(least=4, most=8))
OLD = TaskSpec(name="chat", run="old", service=SPEC)
RUNS = ReplicaSeen(phase=JobPhase.RUNNING, answers=True)
FAILS = ReplicaSeen(phase=JobPhase.FAILED, reason="exit code 1")


def ask(strategy: UpdateStrategy, run: str = "new", **more: Any) -> CandidateRevision:
    update = ServiceUpdate(strategy=strategy, **more)
    task = TaskSpec(name="chat", run=run, service=replace(SPEC, update=update))
    return CandidateRevision(revision=0, task=task, user="ada", created_at=NOW)


def begin(strategy: UpdateStrategy, **more: Any) -> StoredService:
    """A service with four ready replicas, and with a candidate."""
    service = StoredService(
        project="p", name="chat", id="s", task=OLD, created_at=NOW, target=4, version=1
    )
    for number in range(4):
        service = order_replica(service, f"old{number}", 1, NOW)
    ready = [
        replace(each, state=ReplicaState.READY, running_at=NOW, ready_at=NOW)
        for each in service.replicas
    ]
    begun = begin_update(replace(service, replicas=tuple(ready)), ask(strategy, **more))
    assert begun is not None
    return begun


class Rollout:
    """Carries the steps out; replicas of the candidate become what `new` says."""

    def __init__(self, service: StoredService) -> None:
        self.service, self.new, self.now = service, RUNS, NOW
        self.traffic: RevisionTraffic | None = None
        self.stop, self.backlog = ServiceStop(), 0
        self.ended: dict[str, ReplicaSeen] = {}

    def step(self, after_s: float = 1) -> ServiceStep:
        self.now += timedelta(seconds=after_s)
        tried = self.service.newest
        seen = {each.id: self.new if each.revision == tried else RUNS for each in self.service.open}
        seen |= self.ended
        view = ServiceSnapshot(
            service=self.service,
            seen=seen,
            backlog=self.backlog,
            tried=self.traffic,
            stop=self.stop,
        )
        step = decide_update(view, self.now)
        service = step.service
        orders = [(service.revision, each) for each in step.orders]
        for revision, market in orders + [(service.tried, "")] * step.candidates:
            name = f"r{service.ordered}"
            service = order_replica(service, name, 1, self.now, market, revision)
        self.service = service
        return step

    def run(self, steps: int = 4) -> None:
        for _ in range(steps):
            self.step()

    def count(self, errors: int, requests: int = 500) -> None:
        """The canary has answered so many requests, with errors."""
        new = RevisionSums(requests=requests, errors=errors)
        self.traffic = RevisionTraffic(
            revision=self.service.tried, old=RevisionSums(requests=9 * requests), new=new
        )

    def serving(self) -> list[int]:
        return [each.revision for each in list_serving(self.service)]


def test_a_canary_gets_its_share_of_replicas_beside_those_that_serve() -> None:
    rollout = Rollout(begin(UpdateStrategy.CANARY, weight=30))
    rollout.run()
    assert sorted(rollout.serving()) == [1, 1, 1, 1, 2, 2]
    assert (rollout.service.task, rollout.service.revision) == (OLD, 1)
    assert as_revision(rollout.service, 2).task.run == "new"
    assert as_revision(rollout.service, 2).user == "ada"


def test_a_worse_canary_is_rolled_back_and_its_requests_finish() -> None:
    rollout = Rollout(begin(UpdateStrategy.CANARY))
    rollout.run()
    rollout.count(errors=20)
    rollout.step()
    outcome = rollout.service.outcome
    assert outcome is not None
    assert (outcome.end, outcome.revision, outcome.requests) == (UpdateEnd.ERRORS, 2, 500)
    assert outcome.errors == (0.0, 0.04)
    assert rollout.serving() == [1, 1, 1, 1]
    gone = [each for each in rollout.service.replicas if each.revision == 2]
    assert [each.state for each in gone] == [ReplicaState.DRAINING]
    assert gone[0].reason == "the replica's revision was rolled back"
    assert (rollout.service.candidate, rollout.service.task) == (None, OLD)


def test_a_canary_takes_over_after_enough_requests_and_then_replaces_the_old_ones() -> None:
    rollout = Rollout(begin(UpdateStrategy.CANARY))
    rollout.run()
    rollout.count(errors=0, requests=2000)
    step = rollout.step()
    assert not step.stop
    assert rollout.service.outcome is not None
    assert rollout.service.outcome.end is UpdateEnd.ENOUGH
    assert (rollout.service.revision, rollout.service.user) == (2, "ada")
    for _ in range(5):
        rollout.step()
        assert len(rollout.serving()) >= 4
    assert rollout.serving() == [2, 2, 2, 2]


def test_a_canary_takes_over_after_its_time_but_not_before_it_was_ready() -> None:
    rollout = Rollout(begin(UpdateStrategy.CANARY, within=timedelta(minutes=5)))
    rollout.new = ReplicaSeen(phase=JobPhase.STARTING)
    rollout.run()
    rollout.step(after_s=1000)
    assert rollout.service.tried == 2
    rollout.new = RUNS
    rollout.step()
    rollout.step(after_s=299)
    assert rollout.service.tried == 2
    rollout.step()
    assert rollout.service.outcome is not None
    assert rollout.service.outcome.end is UpdateEnd.TIME


def test_a_canary_whose_time_is_over_is_judged_once_more() -> None:
    rollout = Rollout(begin(UpdateStrategy.CANARY, within=timedelta(minutes=5)))
    rollout.run()
    rollout.traffic = RevisionTraffic(
        revision=2,
        old=RevisionSums(requests=900, errors=9),
        new=RevisionSums(requests=100, errors=6),
    )
    rollout.step()
    assert rollout.service.tried == 2, "an earlier look may not spend so much"
    rollout.step(after_s=300)
    assert rollout.service.outcome is not None
    assert rollout.service.outcome.end is UpdateEnd.ERRORS


@pytest.mark.parametrize("strategy", [UpdateStrategy.CANARY, UpdateStrategy.BLUE_GREEN])
def test_a_revision_that_cannot_start_never_stops_a_healthy_one(strategy: UpdateStrategy) -> None:
    rollout = Rollout(begin(strategy))
    rollout.new = FAILS
    for _ in range(30):
        rollout.step()
        assert rollout.serving() == [1, 1, 1, 1]
    outcome = rollout.service.outcome
    assert outcome is not None
    assert (outcome.end, outcome.problem) == (UpdateEnd.FAILED, "exit code 1")
    assert (rollout.service.revision, rollout.service.failures) == (1, 0)


def test_a_blue_green_revision_gets_all_requests_at_once() -> None:
    rollout = Rollout(begin(UpdateStrategy.BLUE_GREEN))
    seen = []
    for _ in range(6):
        rollout.step()
        seen.append(tuple(rollout.serving()))
    assert set(seen) == {(1, 1, 1, 1), (2, 2, 2, 2)}
    assert rollout.service.revision == 2


@pytest.mark.parametrize("strategy", [UpdateStrategy.CANARY, UpdateStrategy.BLUE_GREEN])
def test_a_spent_budget_promotes_nothing(strategy: UpdateStrategy) -> None:
    rollout = Rollout(begin(strategy, within=timedelta(minutes=10)))
    rollout.run(2 if strategy is UpdateStrategy.CANARY else 1)  # it is ready, or starts
    rollout.stop = ServiceStop(hard="team")
    for _ in range(30):
        rollout.step(60)
    assert (rollout.serving(), rollout.service.outcome) == ([], None)
    assert (rollout.service.revision, rollout.service.task) == (1, OLD)
    for replica in rollout.service.open:
        rollout.ended[replica.id] = ReplicaSeen(phase=JobPhase.STOPPED, reason="budget")
    rollout.stop = ServiceStop()  # the next month
    rollout.step()
    assert rollout.service.outcome is None
    rollout.run(3)
    assert 1 in rollout.serving() or strategy is UpdateStrategy.BLUE_GREEN


def test_the_old_file_withdraws_a_candidate_and_numbers_are_not_used_again() -> None:
    rollout = Rollout(begin(UpdateStrategy.CANARY))
    rollout.run()
    back = begin_update(rollout.service, replace(ask(UpdateStrategy.CANARY), task=OLD))
    assert back is not None
    rollout.service = back
    rollout.step()
    assert rollout.service.outcome is not None
    assert rollout.service.outcome.end is UpdateEnd.WITHDRAWN
    again = begin_update(rollout.service, ask(UpdateStrategy.CANARY))
    assert again is not None
    assert again.tried == 3


def test_the_same_candidate_again_goes_on_and_another_one_replaces_it() -> None:
    rollout = Rollout(begin(UpdateStrategy.CANARY))
    rollout.run()
    same = begin_update(rollout.service, ask(UpdateStrategy.CANARY))
    assert same is not None
    assert same.candidate == rollout.service.candidate
    other = begin_update(rollout.service, ask(UpdateStrategy.CANARY, run="newer"))
    assert other is not None
    assert other.tried == 3
    rollout.service = other
    rollout.run()
    assert sorted(rollout.serving()) == [1, 1, 1, 1, 3]


def test_a_new_or_a_rolling_revision_serves_at_once() -> None:
    service = StoredService(project="p", name="chat", id="s", task=OLD, created_at=NOW)
    assert begin_update(service, ask(UpdateStrategy.CANARY)) is None
    assert begin_update(replace(service, version=1), ask(UpdateStrategy.ROLLING)) is None


def test_a_service_that_ends_ends_its_candidate_too() -> None:
    rollout = Rollout(begin(UpdateStrategy.CANARY))
    rollout.run()
    rollout.service = replace(rollout.service, wanted=False)
    rollout.run(2)
    assert rollout.serving() == []
    assert {str(each.state) for each in rollout.service.open} <= {"draining", "ending"}


def test_a_candidate_keeps_its_host_names_from_other_services() -> None:
    asked = ask(UpdateStrategy.CANARY)
    spec = replace(asked.task.service or SPEC, hosts=("New.example.com",))
    asked = replace(asked, task=replace(asked.task, service=spec))
    service = begin(UpdateStrategy.CANARY)
    assert service.hosts == frozenset()
    begun = begin_update(service, asked)
    assert begun is not None
    assert begun.hosts == {"new.example.com"}
    assert begun.spec.hosts == (), "its requests come there only when it takes over"


def begin_rolling() -> Rollout:
    """A rolling update of a service with four ready replicas."""
    ready = replace(begin(UpdateStrategy.CANARY), candidate=None)
    new = ask(UpdateStrategy.ROLLING).task
    return Rollout(replace(ready, task=new, revision=2, former=remember_former(ready)))


def test_a_rolling_update_whose_replicas_never_answer_is_rolled_back() -> None:
    rollout = begin_rolling()
    rollout.new = FAILS
    while rollout.service.revision == 2 and rollout.now < NOW + timedelta(minutes=5):
        assert rollout.serving() == [1] * 4
        rollout.step()
    service = rollout.service
    assert (service.revision, service.task, service.former) == (1, OLD, None)
    assert service.outcome is not None
    assert (service.outcome.revision, service.outcome.end) == (2, UpdateEnd.FAILED)
    assert (service.newest, service.outcome.problem) == (2, "exit code 1")
    rollout.run(10)
    assert [each.revision for each in rollout.service.open] == [1] * 4


def test_failures_of_a_revision_count_although_an_old_replica_has_been_ready_for_long() -> None:
    rollout = begin_rolling()
    service, one = rollout.service, ReplicaCount(least=1, most=1)
    assert service.former is not None
    task = replace(service.task, service=replace(service.spec, replicas=one))
    rollout.service = replace(service, task=task, target=1, replicas=service.replicas[:1])
    rollout.new, rollout.now = FAILS, NOW + timedelta(hours=1)
    tries = 0
    while rollout.service.revision == 2 and rollout.now < NOW + timedelta(hours=1, minutes=1):
        tries += len(rollout.step(0.1).orders)
    assert (rollout.service.revision, tries) == (1, 3)
    assert rollout.now > NOW + timedelta(hours=1, seconds=3), "it pauses after each failure"


def test_a_rolling_update_with_a_ready_replica_is_not_rolled_back() -> None:
    rollout = begin_rolling()
    rollout.run(3)
    assert (rollout.service.former, set(rollout.serving())) == (None, {2})
    rollout.new = FAILS
    for _ in range(60):
        rollout.step(10)
    assert (rollout.service.revision, rollout.service.outcome) == (2, None)


def test_an_update_of_an_update_goes_back_to_what_was_ready() -> None:
    rollout = begin_rolling()
    assert remember_former(rollout.service) == rollout.service.former
    rollout.run()
    later = remember_former(rollout.service)
    assert later is not None
    assert later.revision == 2


def end_all(rollout: Rollout) -> None:
    """Let the replicas that nobody needs end."""
    rollout.run(4)
    for each in rollout.service.open:
        if each.state is ReplicaState.ENDING:
            rollout.ended[each.id] = ReplicaSeen(phase=JobPhase.STOPPED)
    rollout.run(2)


def update_at_zero(strategy: UpdateStrategy = UpdateStrategy.ROLLING) -> Rollout:
    """A service without replicas, whose first revision has worked and gets an update."""
    rollout = Rollout(replace(begin(UpdateStrategy.CANARY), candidate=None))
    spec = replace(SPEC, replicas=ReplicaCount(least=0, most=4))
    rollout.service = replace(rollout.service, task=replace(OLD, service=spec), target=0)
    end_all(rollout)
    assert (rollout.service.open, rollout.service.steady) == ((), True)
    asked = ask(strategy)
    service = replace(spec, update=ServiceUpdate(strategy=strategy))
    asked = replace(asked, task=replace(asked.task, service=service))
    old = rollout.service
    rollout.service = begin_update(old, asked) or replace(
        old,
        task=asked.task,
        revision=2,
        former=remember_former(old),
        steady=False,
        worked=remember_worked(old),
    )
    return rollout


@pytest.mark.parametrize("strategy", [UpdateStrategy.ROLLING, UpdateStrategy.BLUE_GREEN])
def test_a_cold_request_wakes_the_revision_that_worked_if_the_newest_one_fails(
    strategy: UpdateStrategy,
) -> None:
    rollout = update_at_zero(strategy)
    rollout.run()
    assert (rollout.service.revision, rollout.service.candidate) == (2, None), "no request waits"
    rollout.new, rollout.backlog = FAILS, 1
    rollout.run(3)
    assert rollout.service.revision == 1, "the newest revision has failed once"
    assert 1 in [each.revision for each in rollout.service.open]
    assert rollout.service.candidate is not None
    assert rollout.service.candidate.problem == "exit code 1"
    rollout.run(2)
    assert rollout.serving() == [1]
    rollout.run(10)
    assert rollout.service.outcome is not None
    assert (rollout.service.outcome.end, rollout.service.revision) == (UpdateEnd.FAILED, 1)
    assert [each.revision for each in rollout.service.open] == [1]


def test_the_newest_revision_takes_over_if_only_its_first_start_failed() -> None:
    rollout = update_at_zero()
    rollout.new, rollout.backlog = FAILS, 1
    rollout.run(3)
    rollout.new = RUNS
    rollout.run(6)
    assert (rollout.service.revision, rollout.service.candidate) == (2, None)
    assert rollout.serving() == [2]
    worked = rollout.service.worked
    assert worked is not None
    assert worked.revision == 1, "the newest revision has not been ready for a minute"
    for _ in range(7):
        rollout.step(10)
    assert (rollout.service.steady, rollout.service.worked) == (True, None)


def test_a_failed_revision_does_not_take_over_because_no_replica_is_needed() -> None:
    rollout = update_at_zero()
    rollout.new, rollout.backlog = FAILS, 1
    rollout.run(3)
    rollout.backlog = 0
    end_all(rollout)
    assert (rollout.service.open, rollout.service.revision) == ((), 1)
    assert rollout.service.candidate is not None
    rollout.backlog = 1
    rollout.run(2)
    assert 1 in [each.revision for each in rollout.service.open], "the next request wakes it"
    rollout.run(20)
    assert (rollout.service.candidate, rollout.serving()) == (None, [1])


def test_a_revision_that_answers_its_probe_and_then_dies_has_not_worked() -> None:
    rollout = update_at_zero()
    rollout.backlog = 1
    rollout.run(3)
    assert (rollout.serving(), rollout.service.steady) == ([2], False)
    rollout.new = FAILS
    rollout.run(5)
    assert rollout.serving() == [1]


def test_a_revision_whose_program_hangs_does_not_let_requests_wait_in_vain() -> None:
    rollout = update_at_zero()
    rollout.new, rollout.backlog = ReplicaSeen(phase=JobPhase.RUNNING), 1
    rollout.run(3)
    rollout.step(297)
    assert rollout.service.revision == 2, "requests may wait for ten minutes"
    rollout.run(6)
    assert rollout.serving() == [1]
    assert rollout.service.candidate is not None
    assert "has not answered within 5m00s" in rollout.service.candidate.problem
    rollout.backlog = 0
    end_all(rollout)
    assert (rollout.service.revision, rollout.service.open) == (1, ())
    rollout.new, rollout.backlog = RUNS, 1
    rollout.run(6)
    assert (rollout.service.revision, rollout.serving()) == (2, [2])


def test_a_failed_revision_with_keys_does_not_open_the_service() -> None:
    keyed = replace(SPEC, keys=True)
    rollout = update_at_zero()
    rollout.service = replace(
        rollout.service, task=replace(rollout.service.task, service=keyed), former=None
    )
    rollout.new, rollout.backlog = FAILS, 1
    rollout.run(15)
    assert (rollout.service.revision, rollout.service.task.run) == (1, "old")
    assert rollout.service.spec.keys
    rollout = begin_rolling()
    rollout.service = replace(rollout.service, task=replace(rollout.service.task, service=keyed))
    rollout.new = FAILS
    rollout.run(15)
    assert (rollout.service.revision, rollout.service.task.run) == (1, "old")
    assert rollout.service.spec.keys


def test_without_a_revision_that_worked_the_newest_one_is_tried_again() -> None:
    rollout = update_at_zero()
    rollout.service = replace(rollout.service, worked=None)
    rollout.new, rollout.backlog = FAILS, 1
    rollout.run(20)
    assert (rollout.service.revision, rollout.service.candidate) == (2, None)
    assert rollout.service.failures > 3


def test_the_revision_to_which_a_service_may_return_keeps_its_names() -> None:
    spec = replace(SPEC, hosts=("Old.example.com",), models=("m",))
    old = replace(begin(UpdateStrategy.CANARY), candidate=None, steady=True)
    old = replace(old, task=replace(OLD, service=spec))
    new = replace(old, task=OLD, revision=2, steady=False, worked=remember_worked(old))
    assert (new.hosts, new.open_models) == ({"old.example.com"}, {"m"})
