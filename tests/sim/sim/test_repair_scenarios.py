"""A gang that loses a node keeps the others: what users see, and the server's death at every step."""

from datetime import timedelta

import pytest
from tests.records import make_offer
from tests.sim.scenario_checks import check_all, tell

from cavvy.domain.jobs import AttemptOutcome, JobPhase
from cavvy.domain.tasks import (
    CheckpointPolicy,
    LossPolicy,
    RetryPolicy,
    TaskSpec,
)
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.fake.script import CallOutcome, CloudScript, FaultScript
from cavvy.sim.harness import play
from cavvy.sim.scenario import (
    CrashMoment,
    JobTrace,
    ScenarioResult,
    ServerCrash,
    SimScenario,
    SimSubmission,
)

MINUTE = timedelta(minutes=1)
CHEAP = make_offer("fake/r/cheap", 1_000_000, vcpus=8, memory_mib=32768, minimum_charge=MINUTE)
DEAR = replace(CHEAP, instance_type="dear", rate=HourlyRate(5_000_000))
LOST, PREEMPTED, DONE = AttemptOutcome.NODE, AttemptOutcome.PREEMPTED, AttemptOutcome.SUCCEEDED
EIGHT = TaskSpec(
    name="train",
    run="train",
    nodes=8,
    env={"FAKE_RUN_S": "1800"},
    checkpoint=CheckpointPolicy(path="c", every=5 * MINUTE),
)
LOSS = FaultScript(lost_rank=3, lost_after_s=900)


def run(
    task: TaskSpec = EIGHT, *launches: FaultScript, **more: object
) -> tuple[JobTrace, ScenarioResult]:
    script = CloudScript(offers=(CHEAP, DEAR), launches=launches)
    scenario = SimScenario(submissions=(SimSubmission(task=task),), script=script, **more)  # type: ignore[arg-type]
    ending = play(scenario)
    check_all(ending)
    [trace] = ending.traces
    return trace, ending


def outcomes(trace: JobTrace) -> list[AttemptOutcome | None]:
    return [attempt.outcome for attempt in trace.attempts]


def bought(ending: ScenarioResult) -> int:
    """The machines that were started."""
    return len(ending.cloud.lives())


def test_the_loss_of_one_node_of_eight_costs_one_launch() -> None:
    trace, ending = run(EIGHT, LOSS)
    assert outcomes(trace) == [LOST, DONE], tell(trace)
    assert bought(ending) == 8 + 1
    first, second = trace.attempts
    assert first.bought_as == second.gang
    assert second.repairs == (3,)
    assert [event.kind for event in trace.events].count("repair") == 1
    [told] = [event.text for event in trace.events if event.kind == "repair"]
    assert "the node of rank 3 is replaced, and 7 of 8 nodes are kept" in told


def test_a_task_may_ask_for_a_new_gang_instead() -> None:
    trace, ending = run(replace(EIGHT, on_loss=LossPolicy.RESTART), LOSS)
    assert outcomes(trace) == [LOST, DONE]
    assert bought(ending) == 16


def test_users_are_told_why_the_other_nodes_are_not_kept() -> None:
    why = "its nodes are one allocation"
    script = CloudScript(offers=(CHEAP, DEAR), launches=(LOSS,), no_repair=why)
    ending = play(SimScenario(submissions=(SimSubmission(task=EIGHT),), script=script))
    check_all(ending)
    [trace] = ending.traces
    assert (outcomes(trace), bought(ending)) == ([LOST, DONE], 16), tell(trace)
    [told] = [each.text for each in trace.events if each.kind == "no-repair"]
    assert told == (
        f"fake replaces no single nodes: {why}; all 8 nodes are released and requested again"
    )


def test_ranks_that_fail_since_their_peer_is_gone_do_not_fail_the_job() -> None:
    """The provider reports the end of the node after the other ranks have reported theirs."""
    env = {**EIGHT.env, "FAKE_EXIT_CODE": "1", "FAKE_EXIT_RANK": "0", "FAKE_EXIT_AFTER_S": "901"}
    trace, ending = run(
        replace(EIGHT, env=env, retry=RetryPolicy(exit=0)), replace(LOSS, lost_after_s=900 + 30)
    )
    assert outcomes(trace)[0] is LOST, tell(trace)
    assert bought(ending) == 9


def test_the_others_wait_for_capacity_and_then_the_job_moves() -> None:
    none = FaultScript(reply=CallOutcome.NO_CAPACITY)
    trace, ending = run(EIGHT, LOSS, none, none)
    assert outcomes(trace) == [LOST, DONE], tell(trace)
    assert bought(ending) == 9
    trace, ending = run(EIGHT, LOSS, *[none] * 48)
    assert outcomes(trace)[:2] == [LOST, AttemptOutcome.CAPACITY], tell(trace)
    second = trace.attempts[1]
    assert second.repair_until is not None
    assert second.finished_at is not None
    assert MINUTE <= second.repair_until - second.created_at <= 2 * MINUTE  # it started at once
    late = second.finished_at - second.repair_until
    assert timedelta(0) <= late <= timedelta(seconds=10), tell(trace)
    assert "sold out" in second.reason


def test_a_lost_reply_replaces_no_node_twice() -> None:
    trace, ending = run(EIGHT, LOSS, FaultScript(reply=CallOutcome.LOST))
    assert outcomes(trace) == [LOST, DONE], tell(trace)
    assert bought(ending) == 9


def test_losses_one_after_the_other_are_repaired_one_by_one() -> None:
    again = FaultScript(lost_rank=3, lost_after_s=400)
    trace, ending = run(EIGHT, LOSS, again, again)
    assert outcomes(trace) == [LOST, LOST, LOST, DONE], tell(trace)
    assert bought(ending) == 8 + 3


def test_losses_without_a_checkpoint_are_counted() -> None:
    soon = FaultScript(lost_rank=0, lost_after_s=60)
    task = replace(EIGHT, checkpoint=None, retry=RetryPolicy(node=2))
    trace, _ = run(task, *[soon] * 9)
    assert trace.job.phase is JobPhase.FAILED
    assert outcomes(trace) == [LOST] * 3, tell(trace)


def test_the_provider_reports_no_price_of_the_lost_node_twice() -> None:
    """The minimum charge of the lost node is billed once, and those of the others at their end."""
    task = replace(EIGHT, env={"FAKE_RUN_S": "20"}, checkpoint=None)
    trace, _ = run(task, FaultScript(lost_rank=1, lost_after_s=35, boot_s=30))
    assert outcomes(trace) == [LOST, DONE], tell(trace)


@pytest.mark.parametrize("when", CrashMoment)
def test_the_server_dies_at_each_step_of_a_repair(when: CrashMoment) -> None:
    """No node is bought twice, and none is left: `check_all` compares with the cloud's books."""
    task = replace(EIGHT, nodes=2, env={"FAKE_RUN_S": "120"}, checkpoint=None)
    loss = FaultScript(lost_rank=1, lost_after_s=90)
    _, plain = run(task, loss)
    for call in range(plain.calls // 3, plain.calls * 4 // 5):
        crash = ServerCrash(call=call, when=when, down_s=20)
        trace, ending = run(task, loss, crashes=(crash,))
        assert trace.job.phase is JobPhase.DONE, tell(trace)
        assert bought(ending) == 3, (call, tell(trace))
