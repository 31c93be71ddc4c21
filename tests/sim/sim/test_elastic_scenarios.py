"""Jobs that run on as many nodes as there are."""

from datetime import timedelta

from tests.records import make_offer
from tests.sim.scenario_checks import check_all, tell

from cavvy.domain.elastic import NodeRange
from cavvy.domain.jobs import AttemptOutcome, JobPhase
from cavvy.domain.policies import BoundPolicy, ProjectPolicy
from cavvy.domain.tasks import CheckpointPolicy, TaskSpec
from cavvy.domain.values import replace
from cavvy.providers.fake.script import CallOutcome, CloudScript, FaultScript
from cavvy.sim.harness import play
from cavvy.sim.scenario import (
    JobTrace,
    ScenarioResult,
    SimScenario,
    SimSubmission,
    UserAction,
    UserIntervention,
)

FEW = make_offer("fake/r/cheap", 1_000_000, vcpus=8, memory_mib=32768, capacity=5)
RANGE = NodeRange(least=2, most=16)
TASK = TaskSpec(
    name="train",
    run="train",
    nodes=2,
    elastic=RANGE,
    env={"FAKE_RUN_S": "1800"},
    checkpoint=CheckpointPolicy(path="c", every=timedelta(minutes=5)),
)


def run(task: TaskSpec = TASK, *launches: FaultScript, **more: object) -> ScenarioResult:
    offers = more.pop("offers", (FEW,))
    script = CloudScript(offers=offers, launches=launches)  # type: ignore[arg-type]
    submissions = more.pop("submissions", (SimSubmission(task=task),))
    ending = play(SimScenario(submissions=submissions, script=script, **more))  # type: ignore[arg-type]
    check_all(ending)
    return ending


def sizes(trace: JobTrace) -> list[int]:
    return [attempt.nodes for attempt in trace.attempts]


def test_a_job_starts_on_what_is_there() -> None:
    [trace] = run().traces
    assert sizes(trace) == [5], tell(trace)
    [trace] = run(offers=(replace(FEW, capacity=40),)).traces
    assert sizes(trace) == [16], tell(trace)


def test_a_job_with_a_wide_range_leaves_none_that_are_free() -> None:
    wide = replace(TASK, nodes=1, elastic=NodeRange(least=1, most=20), env={"FAKE_RUN_S": "60"})
    assert wide.elastic is not None
    assert 13 not in wide.elastic.list_sizes(), "it is tried only once 12 fits, and 14 does not"
    [trace] = run(wide, offers=(replace(FEW, capacity=13),)).traces
    assert sizes(trace) == [13], tell(trace)


def test_a_job_waits_for_its_least_number_of_nodes() -> None:
    rigid = replace(TASK, name="rigid", elastic=None, nodes=4, env={"FAKE_RUN_S": "600"})
    submissions = (SimSubmission(task=rigid), SimSubmission(task=TASK, at_s=60))
    ending = run(submissions=submissions)
    first, second = ending.traces
    assert sizes(second) == [5], tell(second)
    assert first.job.ended_at is not None
    assert second.attempts[0].created_at >= first.job.ended_at


def test_a_resized_job_goes_on_from_its_checkpoint() -> None:
    ask = UserIntervention(action=UserAction.RESIZE, job=0, at_s=700, nodes=3)
    [trace] = run(interventions=(ask,)).traces
    assert sizes(trace) == [5, 3], tell(trace)
    assert trace.job.retries == {"move": 1}, "no failure is counted"
    assert trace.job.phase is JobPhase.DONE
    [text] = [event.text for event in trace.events if event.kind == "resize"]
    assert text == "the job is resized from 5 to 3 nodes"


def test_a_loss_without_capacity_is_gone_on_with_fewer_nodes() -> None:
    """Another job has taken the last node meanwhile."""
    other = replace(TASK, name="other", elastic=None, nodes=1, env={"FAKE_RUN_S": "9000"})
    submissions = (SimSubmission(task=TASK), SimSubmission(task=other, at_s=903))
    loss = FaultScript(lost_rank=4, lost_after_s=900)
    none = FaultScript(reply=CallOutcome.NO_CAPACITY)
    ending = run(TASK, loss, none, submissions=submissions)
    trace = ending.traces[0]
    assert trace.job.phase is JobPhase.DONE, tell(trace)
    assert [each.outcome for each in trace.attempts[:2]] == [
        AttemptOutcome.NODE,
        AttemptOutcome.CAPACITY,
    ], tell(trace)
    assert sizes(trace)[-1] == 4, tell(trace)
    second = trace.attempts[1]
    assert second.finished_at is not None
    waited = second.finished_at - second.created_at
    assert waited <= timedelta(seconds=10), "the others do not wait, since the job can go on"


def test_a_quota_bounds_the_size() -> None:
    policy = ProjectPolicy(max_micros_per_hour=3_000_000)
    [trace] = run(policies=(BoundPolicy(project="default", policy=policy),)).traces
    assert sizes(trace) == [3], tell(trace)


def test_a_drill_takes_one_node_and_the_others_are_kept() -> None:
    drill = UserIntervention(action=UserAction.LOSE_NODE, job=0, at_s=700, notice_s=0, rank=1)
    ending = run(replace(TASK, elastic=None, nodes=4), interventions=(drill,))
    [trace] = ending.traces
    assert [each.outcome for each in trace.attempts] == [
        AttemptOutcome.PREEMPTED,
        AttemptOutcome.SUCCEEDED,
    ], tell(trace)
    assert len(ending.cloud.lives()) == 4 + 1
    assert trace.attempts[1].repairs == (1,)
