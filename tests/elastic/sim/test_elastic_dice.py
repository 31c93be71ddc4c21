"""Elastic jobs with other jobs, losses, limits and kills of the server, by chance."""

from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.records import make_offer
from tests.sim.scenario_checks import check_all, tell

from cavvy.domain.elastic import NodeRange
from cavvy.domain.policies import BoundPolicy, ProjectPolicy
from cavvy.domain.tasks import CheckpointPolicy, TaskSpec
from cavvy.providers.fake.script import CloudScript, FaultScript
from cavvy.sim.harness import play
from cavvy.sim.scenario import (
    CrashMoment,
    ScenarioResult,
    ServerCrash,
    SimScenario,
    SimSubmission,
)

PRICE = 1_000_000  # micro-dollars an hour of each node


@st.composite
def submissions(draw: st.DrawFn) -> SimSubmission:
    least = draw(st.integers(1, 3))
    most = draw(st.integers(least, 8))
    elastic = most > least
    env = {
        "FAKE_RUN_S": str(draw(st.sampled_from([120, 1500, 4000]))),
        "FAKE_POWER": draw(st.sampled_from(["0.9", "0.3", "-0.1"])),
        "FAKE_UNTAKEN": str(draw(st.sampled_from([0, 8])) if least < 8 else 0),
    }
    task = TaskSpec(
        name=f"j{draw(st.integers(0, 10**6))}",
        run="x",
        nodes=least,
        elastic=NodeRange(least=least, most=most) if elastic else None,
        env=env if elastic else {"FAKE_RUN_S": env["FAKE_RUN_S"]},
        checkpoint=CheckpointPolicy(path="c", every=timedelta(minutes=20)) if elastic else None,
    )
    return SimSubmission(task=task, at_s=draw(st.sampled_from([0, 300, 1500])))


@st.composite
def scenarios(draw: st.DrawFn) -> SimScenario:
    limit = draw(st.sampled_from([None, 6]))
    policy = ProjectPolicy(max_micros_per_hour=limit and limit * PRICE)
    lost = draw(st.sampled_from([None, 0]))
    launches = (FaultScript(lost_rank=lost, lost_after_s=700),) if lost is not None else ()
    crash = draw(st.sampled_from([None, 20, 60, 150]))
    when = draw(st.sampled_from(CrashMoment))
    offer = make_offer("fake/r/cheap", PRICE, vcpus=8, memory_mib=32768, capacity=8)
    return SimScenario(
        submissions=tuple(draw(st.lists(submissions(), min_size=2, max_size=3))),
        script=CloudScript(offers=(offer,), launches=launches),
        policies=(BoundPolicy(project="default", policy=policy),) if limit else (),
        crashes=(ServerCrash(call=crash, when=when),) if crash else (),
    )


def check_sizes(ending: ScenarioResult) -> None:
    for trace in ending.traces:
        sizes = trace.job.task.elastic or NodeRange(
            least=trace.job.task.nodes, most=trace.job.task.nodes
        )
        assert all(each.nodes in sizes for each in trace.attempts), tell(trace)


def check_limit(ending: ScenarioResult, most: int) -> None:
    """Whenever a gang starts, all gangs of the project together are within its limit."""
    gangs = [each for trace in ending.traces for each in trace.attempts]
    for begun in {each.created_at for each in gangs}:
        there = [
            each.nodes for each in gangs if each.created_at <= begun < (each.ended_at or ending.at)
        ]
        assert sum(there) * PRICE <= most, "\n".join(map(tell, ending.traces))


@settings(max_examples=4)
@given(scenarios())
def test_no_limit_is_exceeded_no_gang_is_too_small_and_nothing_is_bought_twice(
    scenario: SimScenario,
) -> None:
    ending = play(scenario)
    check_all(ending)
    check_sizes(ending)
    for bound in scenario.policies:
        assert bound.policy.max_micros_per_hour is not None
        check_limit(ending, bound.policy.max_micros_per_hour)
