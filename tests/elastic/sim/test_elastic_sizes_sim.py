"""Running elastic jobs that grow, give way and go back, in the production control plane on virtual
time."""

from datetime import timedelta

from tests.records import make_offer
from tests.sim.scenario_checks import check_all, tell

from cavvy.domain.accounts import Project
from cavvy.domain.elastic import HoldCause, NodeRange
from cavvy.domain.jobs import JobPhase
from cavvy.domain.offers import Offer
from cavvy.domain.policies import BoundPolicy, ProjectPolicy
from cavvy.domain.tasks import CheckpointPolicy, TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.fake.script import CloudScript
from cavvy.sim.harness import play
from cavvy.sim.scenario import JobTrace, ScenarioResult, SimScenario, SimSubmission

EIGHT = make_offer("fake/r/cheap", 1_000_000, vcpus=8, memory_mib=32768, capacity=8)
ELASTIC = TaskSpec(
    name="train",
    run="train",
    nodes=2,
    elastic=NodeRange(least=2, most=8),
    env={"FAKE_RUN_S": "12000", "FAKE_POWER": "0.9"},
    checkpoint=CheckpointPolicy(path="c", every=timedelta(minutes=5)),
)
RIGID = TaskSpec(name="rigid", run="x", nodes=6, env={"FAKE_RUN_S": "1200"})


def run(*submissions: SimSubmission, offer: Offer = EIGHT, **more: object) -> ScenarioResult:
    script = CloudScript(offers=(offer,))
    ending = play(SimScenario(submissions=submissions, script=script, **more))  # type: ignore[arg-type]
    check_all(ending)
    return ending


def sizes(trace: JobTrace) -> list[int]:
    return [attempt.nodes for attempt in trace.attempts]


def texts(trace: JobTrace, kind: str) -> list[str]:
    return [event.text for event in trace.events if event.kind == kind]


def test_a_job_grows_once_nodes_are_free_and_says_what_that_won() -> None:
    ending = run(SimSubmission(task=RIGID), SimSubmission(task=ELASTIC, at_s=60))
    _, trace = ending.traces
    assert sizes(trace) == [2, 8], tell(trace)
    [why] = texts(trace, "resize")
    assert why.startswith("grows from 2 to 8 nodes, which are free: it should end "), why
    [outcome] = texts(trace, "resized")
    assert outcome.startswith("3.48 times as fast on 8 as on 2 nodes; no work was done for "), (
        outcome
    )
    assert trace.job.phase is JobPhase.DONE


def test_a_job_that_is_nearly_done_does_not_grow() -> None:
    """Its restart would cost more than it wins: the rigid job ends at 20 minutes."""
    short = replace(ELASTIC, env={**ELASTIC.env, "FAKE_RUN_S": "2400"})
    ending = run(SimSubmission(task=RIGID), SimSubmission(task=short, at_s=60))
    assert sizes(ending.traces[1]) == [2], tell(ending.traces[1])


def test_a_rigid_job_loses_nothing_by_an_elastic_one() -> None:
    """Beside an elastic job it starts as it does beside a rigid one of the least size, but for the
    half minute in which the work saves a checkpoint."""
    least = replace(ELASTIC, elastic=None)
    alone = run(SimSubmission(task=least), SimSubmission(task=RIGID, at_s=600)).traces[1]
    beside = run(SimSubmission(task=ELASTIC), SimSubmission(task=RIGID, at_s=600))
    elastic, rigid = beside.traces
    assert sizes(elastic)[:2] == [8, 2], tell(elastic)
    assert sizes(elastic)[-1] == 8, "it has grown again"
    [why] = [each for each in texts(elastic, "resize") if each.startswith("keeps")]
    assert why.startswith("keeps 2 of 8 nodes, because job rigid waits for the others"), why
    began, without = rigid.attempts[0].created_at, alone.attempts[0].created_at
    assert began - without <= timedelta(seconds=60), tell(rigid)
    assert elastic.job.ended_at is not None
    assert alone.job.phase is rigid.job.phase is JobPhase.DONE


def test_nodes_within_a_quota_are_not_lent() -> None:
    """Of eight nodes, five are within the quota of the elastic job's project. A node without GPUs
    counts as an eighth of a GPU."""
    long = replace(ELASTIC, project="a", env={**ELASTIC.env, "FAKE_RUN_S": "30000"})
    small = replace(RIGID, project="b", nodes=3, env={"FAKE_RUN_S": "600"})
    large = replace(small, name="large", nodes=4)
    quota = ProjectPolicy(quota_gpus=5 / 8)
    ending = run(
        SimSubmission(task=long),
        SimSubmission(task=large, at_s=300),
        projects=(Project(name="a"), Project(name="b")),
        policies=(BoundPolicy(project="a", policy=quota),),
    )
    assert sizes(ending.traces[0]) == [8], tell(ending.traces[0])
    ending = run(
        SimSubmission(task=long),
        SimSubmission(task=small, at_s=300),
        projects=(Project(name="a"), Project(name="b")),
        policies=(BoundPolicy(project="a", policy=quota),),
    )
    assert sizes(ending.traces[0])[:2] == [8, 5], tell(ending.traces[0])


def test_only_as_many_jobs_give_way_as_one_waiting_job_needs() -> None:
    """While the nodes that one of them gives are handed over, the others keep theirs."""
    four = replace(ELASTIC, elastic=NodeRange(least=2, most=4))
    two = replace(RIGID, nodes=2, env={"FAKE_RUN_S": "6000"})
    other = replace(four, name="other")
    ending = run(
        *(SimSubmission(task=each) for each in (four, other)), SimSubmission(task=two, at_s=600)
    )
    assert [trace.attempts[0].nodes for trace in ending.traces] == [4, 4, 2]
    gifts = [
        each
        for trace in ending.traces
        for each in texts(trace, "resize")
        if each.startswith("keeps")
    ]
    assert len(gifts) == 1, "\n".join(map(tell, ending.traces))


def test_two_elastic_jobs_share_what_one_of_them_held() -> None:
    second = replace(ELASTIC, name="second")
    ending = run(SimSubmission(task=ELASTIC), SimSubmission(task=second, at_s=300))
    one, other = ending.traces
    assert sizes(one)[:2] == [8, 6], "the second job gets its least"
    assert sizes(other)[0] == 2
    assert sizes(other)[1] in (3, 4, 5), tell(other)
    moves = [each for each in texts(one, "resize") if "other jobs that run" in each]
    assert len(moves) == 1, tell(one)
    assert max(len(trace.attempts) for trace in ending.traces) <= 5, "they do not swing"


def test_a_program_that_fails_on_its_new_size_goes_back() -> None:
    task = replace(ELASTIC, env={**ELASTIC.env, "FAKE_UNTAKEN": "8"})
    trace = run(SimSubmission(task=RIGID), SimSubmission(task=task, at_s=60)).traces[1]
    assert trace.job.phase is JobPhase.DONE, tell(trace)
    assert sizes(trace)[:3] == [2, 8, 2], tell(trace)
    assert 8 not in sizes(trace)[3:], "a size that it did not take is not tried again"
    assert trace.job.untaken == (8,)
    back = "soon after its nodes had changed from 2 to 8: it goes back to 2"
    assert any(back in each for each in texts(trace, "queued")), tell(trace)


def test_a_program_that_is_silent_on_its_new_size_goes_back() -> None:
    task = replace(ELASTIC, env={**ELASTIC.env, "FAKE_SILENT": "8"})
    trace = run(SimSubmission(task=RIGID), SimSubmission(task=task, at_s=60)).traces[1]
    assert trace.job.phase is JobPhase.DONE, tell(trace)
    assert sizes(trace)[:3] == [2, 8, 2], tell(trace)
    assert trace.job.untaken == (8,)
    [why] = [each for each in texts(trace, "resize") if "no progress" in each]
    assert why.endswith("on 8 nodes, and goes back to 2, with which it worked"), why


def test_growth_that_makes_the_job_slower_is_taken_back() -> None:
    task = replace(ELASTIC, env={**ELASTIC.env, "FAKE_POWER": "-0.2", "FAKE_RUN_S": "5000"})
    trace = run(SimSubmission(task=RIGID), SimSubmission(task=task, at_s=60)).traces[1]
    assert sizes(trace) == [2, 8, 2], tell(trace)
    assert any(each.startswith("goes back from 8 to 2 nodes") for each in texts(trace, "resize"))


def test_a_job_without_checkpoints_keeps_its_size() -> None:
    task = replace(ELASTIC, checkpoint=None)
    trace = run(SimSubmission(task=RIGID), SimSubmission(task=task, at_s=60)).traces[1]
    assert sizes(trace) == [2], tell(trace)


def test_a_job_without_room_says_so_once() -> None:
    """The rigid job holds six of eight nodes for 20 minutes."""
    _, trace = run(SimSubmission(task=RIGID), SimSubmission(task=ELASTIC, at_s=60)).traces
    assert sizes(trace) == [2, 8], tell(trace)
    [why] = texts(trace, "size")
    assert why.endswith("nodes, because fewer than 3 nodes like its own are free for it"), why
    assert why.startswith("keeps 2 of at most 8 nodes"), why


def test_a_job_that_is_nearly_done_says_that_growth_does_not_pay() -> None:
    short = replace(ELASTIC, env={**ELASTIC.env, "FAKE_RUN_S": "2400"})
    trace = run(SimSubmission(task=RIGID), SimSubmission(task=short, at_s=60)).traces[1]
    assert [event.fact for event in trace.events if event.kind == "size"] == [
        HoldCause.NO_ROOM,
        HoldCause.NO_GAIN,
    ], tell(trace)


def test_a_job_is_not_told_that_growth_does_not_pay_if_only_another_one_gets_the_node() -> None:
    """While the first of three jobs ends to grow, one node is free, which one of the two others
    would get."""
    one = replace(ELASTIC, nodes=1, elastic=NodeRange(least=1, most=2))
    elastic = [replace(one, name=name) for name in "abc"]
    rigid = [replace(RIGID, nodes=1), replace(RIGID, nodes=4, env={"FAKE_RUN_S": "20000"})]
    free = replace(EIGHT, rate=HourlyRate(0))
    traces = run(*(SimSubmission(task=each) for each in (*rigid, *elastic)), offer=free).traces
    assert any(texts(trace, "resize") for trace in traces)
    half_hour = timedelta(minutes=30)  # later, jobs are nearly done
    for trace in traces:
        soon = [each for each in trace.events if each.at - trace.job.submitted_at < half_hour]
        assert HoldCause.NO_GAIN not in [each.fact for each in soon], tell(trace)


def test_a_job_without_a_checkpoint_says_that_it_keeps_its_size() -> None:
    task = replace(ELASTIC, checkpoint=None, env={**ELASTIC.env, "FAKE_RUN_S": "3000"})
    trace = run(SimSubmission(task=RIGID), SimSubmission(task=task, at_s=60)).traces[1]
    assert sizes(trace) == [2], tell(trace)
    [why] = texts(trace, "size")
    assert why.endswith("without `checkpoint`, it would start again from its beginning"), why
    assert trace.job.hold is not None
    assert trace.job.hold.cause is HoldCause.NO_CHECKPOINT


def test_a_job_at_its_most_says_nothing() -> None:
    [trace] = run(SimSubmission(task=ELASTIC)).traces
    assert sizes(trace) == [8], tell(trace)
    assert texts(trace, "size") == []
    assert trace.job.hold is None
