"""Groups of jobs, which start together and end together, with the server killed at every call."""

from datetime import timedelta

import pytest
from tests.sim.sim.test_sim_scenarios import CHEAP, DEAR, run_scenario, task

from cavvy.domain.budgets import SpendingBudget
from cavvy.domain.jobs import AttemptOutcome, JobPhase, StopCause
from cavvy.domain.policies import BoundPolicy, ProjectPolicy
from cavvy.domain.shares import WITHOUT_GPU
from cavvy.domain.tasks import JobGroup, ResourceSpec, TaskSpec
from cavvy.domain.units import Money
from cavvy.domain.values import replace
from cavvy.providers.fake.script import CallOutcome, CloudScript, FaultScript
from cavvy.sim.harness import START, play
from cavvy.sim.scenario import (
    CrashMoment,
    JobTrace,
    ServerCrash,
    SimScenario,
    SimSubmission,
    UserAction,
    UserIntervention,
)

TRAINER = replace(task(600), name="trainer", group=JobGroup(name="rl"))
REWARD = replace(
    task(100_000),
    name="reward",
    group=JobGroup(name="rl", helper=True, linger=timedelta(minutes=1)),
)
FAILS = {"FAKE_EXIT_CODE": "3"}


def on(instance: str, one: TaskSpec) -> TaskSpec:
    return replace(one, resources=ResourceSpec(instance=instance))


def run(*tasks: TaskSpec, later: tuple[SimSubmission, ...] = (), **more: object) -> list[JobTrace]:
    first, *others = tasks
    group = SimSubmission(task=first, others=tuple(others))
    return list(run_scenario(submissions=(group, *later), **more).traces)


def phases(traces: list[JobTrace]) -> dict[str, JobPhase]:
    return {each.job.name: each.job.phase for each in traces}


def ran_together(one: JobTrace, other: JobTrace) -> bool:
    """Return whether the last attempts began together; simulated agents ask every ten seconds."""
    starts = [each.attempts[-1].running_at for each in (one, other)]
    return None not in starts and abs(starts[0] - starts[1]) <= timedelta(seconds=11)  # type: ignore[operator]


def test_a_group_starts_together_and_its_helper_ends_after_the_others() -> None:
    trainer, reward = run(on("dear", TRAINER), on("cheap", REWARD))
    assert phases([trainer, reward]) == {"trainer": JobPhase.DONE, "reward": JobPhase.DONE}
    assert ran_together(trainer, reward)
    assert trainer.job.ended_at
    assert reward.job.ended_at
    lingered = reward.job.ended_at - trainer.job.ended_at
    assert timedelta(minutes=1) <= lingered <= timedelta(minutes=2)
    assert reward.job.stop_cause is StopCause.HELPED
    assert reward.job.exit_code == 0


@pytest.mark.parametrize("fails", ["trainer", "reward"])
def test_the_others_are_stopped_if_one_fails(fails: str) -> None:
    tasks = [
        replace(each, env=each.env | FAILS | {"FAKE_RUN_S": "60"}) if each.name == fails else each
        for each in (TRAINER, REWARD)
    ]
    found = {each.job.name: each for each in run(*tasks)}
    assert found.pop(fails).job.phase is JobPhase.FAILED
    [(_, other)] = found.items()
    assert other.job.phase is JobPhase.STOPPED
    assert other.job.stop_cause is StopCause.GROUP
    assert other.job.reason.startswith(f"{fails}, a job of its group, failed")
    assert [each.outcome for each in other.attempts] == [AttemptOutcome.STOPPED]


def test_a_group_waits_until_all_of_its_jobs_have_nodes() -> None:
    """Another job has the only node on which the trainer fits. The helper's node stays free."""
    one = replace(DEAR, capacity=1)
    blocker = SimSubmission(task=replace(on("dear", task(1000)), name="blocker"))
    group = SimSubmission(task=on("dear", TRAINER), others=(on("cheap", REWARD),), at_s=30)
    found = run_scenario(submissions=(blocker, group), offers=(one, CHEAP)).traces
    first, trainer, reward = found
    assert {each.job.phase for each in found} == {JobPhase.DONE}
    for each in (trainer, reward):
        assert len(each.attempts) == 1
        assert first.job.ended_at
        assert each.attempts[0].created_at >= first.job.ended_at
    assert trainer.attempts[0].created_at == reward.attempts[0].created_at


def test_two_groups_that_need_the_same_nodes_run_one_after_the_other() -> None:
    """Each has three jobs, and four nodes exist: none takes two nodes and waits for the third."""

    def make(group: str) -> SimSubmission:
        first, *others = (
            replace(task(300), name=f"{group}-{place}", group=JobGroup(name=group))
            for place in range(3)
        )
        return SimSubmission(task=first, others=tuple(others))

    four = replace(CHEAP, capacity=4)
    found = run_scenario(submissions=(make("a"), make("b")), offers=(four,)).traces
    assert {each.job.phase for each in found} == {JobPhase.DONE}
    assert all(len(each.attempts) == 1 for each in found)
    created = [each.attempts[0].created_at for each in found]
    assert len(set(created[:3])) == len(set(created[3:])) == 1
    assert created[0] != created[3]


def test_a_group_gives_its_nodes_back_while_one_job_finds_none() -> None:
    """The first launch fails, and its job has no other offer."""
    launches = (FaultScript(reply=CallOutcome.NO_CAPACITY),)
    found = run(on("dear", TRAINER), on("cheap", REWARD), launches=launches)
    assert set(phases(found).values()) == {JobPhase.DONE}
    assert ran_together(*found)
    assert [len(each.attempts) for each in found] == [2, 2]
    assert sum("returned" in [event.kind for event in each.events] for each in found) == 1
    assert all(each.attempts[0].running_at is None for each in found)


def test_a_job_that_finds_other_nodes_at_once_does_not_delay_its_group() -> None:
    launches = (FaultScript(reply=CallOutcome.NO_CAPACITY),)
    found = run(TRAINER, REWARD, launches=launches)
    assert set(phases(found).values()) == {JobPhase.DONE}
    assert ran_together(*found)
    assert sorted(len(each.attempts) for each in found) == [1, 2]


def test_a_preempted_job_runs_again_while_the_others_continue() -> None:
    drill = UserIntervention(action=UserAction.DRILL, job=0, at_s=300)
    trainer, reward = run(TRAINER, REWARD, interventions=(drill,))
    assert phases([trainer, reward]) == {"trainer": JobPhase.DONE, "reward": JobPhase.DONE}
    assert [len(each.attempts) for each in (trainer, reward)] == [2, 1]


def test_a_stop_and_a_retry_apply_to_the_whole_group() -> None:
    stop = UserIntervention(action=UserAction.STOP, job=0, at_s=200)
    again = UserIntervention(action=UserAction.RETRY, job=0, at_s=2000)
    trainer, reward = run(TRAINER, REWARD, interventions=(stop, again))
    assert phases([trainer, reward]) == {"trainer": JobPhase.DONE, "reward": JobPhase.DONE}
    assert [len(each.attempts) for each in (trainer, reward)] == [2, 2]
    assert ran_together(trainer, reward)


def test_a_job_joins_a_group_that_has_started() -> None:
    late = replace(task(60), name="evaluate", group=JobGroup(name="rl", joins=True))
    found = run(TRAINER, REWARD, later=(SimSubmission(task=late, at_s=1),))
    by_name = {each.job.name: each for each in found}
    assert set(phases(found).values()) == {JobPhase.DONE}
    assert by_name["evaluate"].job.array_id == by_name["trainer"].job.array_id
    assert by_name["trainer"].attempts[0].running_at
    assert by_name["evaluate"].attempts[0].created_at >= by_name["trainer"].attempts[0].running_at


def test_a_job_that_joined_is_retried_after_its_group() -> None:
    """The jobs with which the group began have succeeded, so that nothing starts again with it."""
    late = replace(task(60), name="evaluate", group=JobGroup(name="rl", joins=True), env=FAILS)
    again = UserIntervention(action=UserAction.RETRY, job=0, at_s=3000)
    second = replace(TRAINER, name="second")
    later = (SimSubmission(task=late, at_s=60),)
    found = run(TRAINER, second, later=later, interventions=(again,))
    assert phases(found).pop("evaluate") is JobPhase.FAILED
    counts = {each.job.name: len(each.attempts) for each in found}
    assert counts == {"trainer": 1, "second": 1, "evaluate": 2}


def begin(*submissions: SimSubmission, **more: object) -> list[JobTrace]:
    """Play only the first half hour."""
    script, longest = CloudScript(offers=(CHEAP, DEAR)), timedelta(minutes=30)
    scenario = SimScenario(submissions=submissions, script=script, longest=longest, **more)  # type: ignore[arg-type]
    return list(play(scenario).traces)


@pytest.mark.parametrize(
    "policy", [ProjectPolicy(user_jobs=1), ProjectPolicy(max_gpus=1.5 * WITHOUT_GPU)]
)
def test_a_limit_counts_all_jobs_of_a_group_before_one_starts(policy: ProjectPolicy) -> None:
    group = SimSubmission(task=TRAINER, others=(REWARD,))
    for each in begin(group, policies=(BoundPolicy("", policy),)):
        assert not each.attempts
        assert each.job.reason.startswith("waits for the limit of the installation")


def test_a_group_waits_while_a_budget_is_used_up() -> None:
    first = SimSubmission(task=replace(task(600), name="first"))
    group = SimSubmission(task=TRAINER, others=(REWARD,), at_s=900)
    budget = SpendingBudget(name="b", limit=Money(1), since=START)
    spender, *others = begin(first, group, budgets=(budget,))
    assert len(spender.attempts) == 1
    for each in others:
        assert not each.attempts
        assert "the budget b permits no new paid work" in each.job.reason


@pytest.mark.parametrize("when", CrashMoment)
@pytest.mark.parametrize("first", [1, 2, 3])
def test_no_crash_loses_or_repeats_a_job_of_a_group(when: CrashMoment, first: int) -> None:
    """The server is killed at every third call, so the three cases include every call."""
    crashes = tuple(ServerCrash(call=each, when=when, down_s=2) for each in range(first, 150, 3))
    late = replace(task(60), name="evaluate", group=JobGroup(name="rl", joins=True))
    launches = (FaultScript(reply=CallOutcome.NO_CAPACITY),)
    found = run(
        on("dear", TRAINER),
        on("cheap", REWARD),
        later=(SimSubmission(task=late, at_s=400),),
        launches=launches,
        crashes=crashes,
    )
    assert set(phases(found).values()) == {JobPhase.DONE}
    trainer, reward = (
        next(x for x in found if x.job.name == name) for name in ("trainer", "reward")
    )
    for each in found:
        assert sum(attempt.running_at is not None for attempt in each.attempts) == 1
    assert ran_together(trainer, reward)
