"""Hosts that are drained or reserved: their work goes on elsewhere, and a server that is killed at any point
loses and doubles none."""

from collections.abc import Callable
from datetime import timedelta
from functools import cache

import pytest
from tests.sim.scenario_checks import check_all
from tests.sim.sim.test_sim_scenarios import FREE, HERE, task

from cavvy.domain.accounts import Project
from cavvy.domain.jobs import JobPhase
from cavvy.domain.policies import BoundPolicy, ProjectPolicy
from cavvy.domain.tasks import (
    AcceleratorNeed,
    CheckpointPolicy,
    JobGroup,
    JobLimits,
    ResourceSpec,
    TopologyNeed,
)
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.fake.script import CloudScript
from cavvy.sim import scenario as sim
from cavvy.sim.harness import START, play

SAVES = CheckpointPolicy(path="ckpt", every=timedelta(seconds=60))
HOSTS = (replace(HERE, name="fake/a", cpus=4), replace(HERE, name="fake/b", cpus=4))
OFFERS = (
    replace(FREE, region="a", vcpus=4),
    replace(FREE, region="b", vcpus=4, rate=HourlyRate(3_600_000)),
)
DRAINED_S, WITHIN_S = 600, 1800
JOBS = (
    task(3600, name="saver", checkpoint=SAVES),
    task(1200, name="short"),
    task(5000, name="long"),
)


def make_drain(*crashes: sim.ServerCrash, uncordon_s: float | None = None) -> sim.SimScenario:
    """Drain the cheaper host, on which three jobs run, and submit a fourth job meanwhile."""
    acts = [
        sim.UserIntervention(
            action=sim.UserAction.DRAIN, node="a", at_s=DRAINED_S, notice_s=WITHIN_S
        )
    ]
    if uncordon_s is not None:
        acts.append(sim.UserIntervention(action=sim.UserAction.UNCORDON, node="a", at_s=uncordon_s))
    late = sim.SimSubmission(task=task(60, name="late"), at_s=DRAINED_S + 60)
    return sim.SimScenario(
        submissions=(*(sim.SimSubmission(task=each) for each in JOBS), late),
        script=CloudScript(offers=OFFERS, hosts=HOSTS),
        interventions=tuple(acts),
        crashes=crashes,
        longest=timedelta(hours=8),
    )


def drain(*crashes: sim.ServerCrash, uncordon_s: float | None = None) -> sim.ScenarioResult:
    ending = play(make_drain(*crashes, uncordon_s=uncordon_s))
    check_all(ending)
    assert [trace.job.phase for trace in ending.traces] == [JobPhase.DONE] * 4
    return ending


@cache
def count_calls(scenario: Callable[[], sim.SimScenario], until_s: float) -> int:
    """How many calls the server makes until this time, if it is not killed."""
    return play(replace(scenario(), longest=timedelta(seconds=until_s))).calls


def places(trace: sim.JobTrace) -> list[str]:
    return [attempt.offer.region for attempt in trace.attempts]


def test_work_of_a_drained_host_leaves_it_in_time() -> None:
    ending = drain()
    saver, short, long, late = ending.traces
    assert places(saver) == ["a", "b"]
    first, _ = saver.attempts
    assert first.ended_at is not None
    assert first.ended_at - START < timedelta(seconds=DRAINED_S + 60), "it loses nothing"
    assert saver.job.ended_at is not None
    assert saver.job.ended_at - START < timedelta(seconds=3600 + 300), "and goes on elsewhere"
    assert places(short) == ["a"], "it ends by itself"
    assert places(long) == ["a", "b"]
    left = long.attempts[0].ended_at
    assert left is not None
    assert abs(left - START - timedelta(seconds=DRAINED_S + WITHIN_S)) < timedelta(seconds=30)
    (told,) = (event.text for event in long.events if event.kind == "drained")
    assert told.startswith("leaves its nodes within 30s, because node fake/a is drained by ")
    assert "of its work is lost, because it saves no checkpoints" in told
    assert places(late) == ["b"]
    assert {trace.job.retries.get("move", 0) for trace in (saver, long)} == {1}


def test_an_uncordoned_host_keeps_the_work_that_has_not_left() -> None:
    saver, short, long, late = drain(uncordon_s=DRAINED_S + 600).traces
    assert places(saver) == ["a", "b"]
    assert places(short) == places(long) == ["a"]
    assert places(late) == ["b"]


@pytest.mark.parametrize("when", sim.CrashMoment)
# among these calls are the writes that let work leave
@pytest.mark.parametrize("after", [-1, 0, 3, 4, 5])
@pytest.mark.parametrize("near_s", [DRAINED_S, DRAINED_S + WITHIN_S - 60])
def test_a_server_that_is_killed_during_a_drain_loses_and_doubles_no_work(
    near_s: int, after: int, when: sim.CrashMoment
) -> None:
    call = count_calls(make_drain, near_s) + after
    ending = drain(sim.ServerCrash(call=call, when=when, down_s=45))
    for trace in ending.traces:
        spans = [(each.running_at, each.finished_at) for each in trace.attempts]
        assert all(start and end for start, end in spans), "each attempt has worked"
        assert len(trace.attempts) <= 2
    gone = max(
        each.ended_at
        for trace in ending.traces
        for each in trace.attempts
        if each.offer.region == "a" and each.ended_at is not None
    )
    assert gone - START < timedelta(seconds=DRAINED_S + WITHIN_S + 120), "the host is empty"


def test_a_job_that_can_use_fewer_hosts_keeps_no_other_job_from_its_host() -> None:
    """The job needs a rack, which only the dearer host has, and waits for the limit in dollars."""
    racked = replace(HOSTS[1], labels=(("rack", "1"),))
    rack = TopologyNeed(same="rack")
    first, second = (task(3600, name=name, topology=rack) for name in ("first", "second"))
    policy = ProjectPolicy(max_micros_per_hour=5_000_000)
    ending = play(
        sim.SimScenario(
            submissions=tuple(
                sim.SimSubmission(task=each) for each in (first, second, task(60, name="other"))
            ),
            script=CloudScript(offers=OFFERS, hosts=(HOSTS[0], racked)),
            policies=(BoundPolicy("", policy),),
            longest=timedelta(hours=8),
        )
    )
    check_all(ending)
    assert [places(trace) for trace in ending.traces] == [["b"], ["b"], ["a"]]
    other = ending.traces[2].attempts[0]
    assert other.created_at == START


def make_reservation(*crashes: sim.ServerCrash) -> sim.SimScenario:
    """Reserve the cheaper host for another project from the second half hour on."""
    at = sim.UserIntervention(
        action=sim.UserAction.RESERVE, node="a", project="lab", at_s=DRAINED_S, notice_s=1200
    )
    short = JobLimits(duration=timedelta(minutes=10))
    late = (
        sim.SimSubmission(task=task(60, name="kept-out"), at_s=DRAINED_S + 60),
        sim.SimSubmission(task=task(60, name="limited", limits=short), at_s=DRAINED_S + 60),
        sim.SimSubmission(task=task(60, name="owner", project="lab"), at_s=2400),
        sim.SimSubmission(task=task(60, name="after"), at_s=DRAINED_S + 1200 + 3600 + 60),
    )
    return sim.SimScenario(
        submissions=(*(sim.SimSubmission(task=each) for each in JOBS[::2]), *late),
        script=CloudScript(offers=OFFERS, hosts=HOSTS),
        projects=(Project(name="lab"),),
        interventions=(at,),
        crashes=crashes,
        longest=timedelta(hours=8),
    )


def reserve(*crashes: sim.ServerCrash) -> sim.ScenarioResult:
    ending = play(make_reservation(*crashes))
    check_all(ending)
    assert {trace.job.phase for trace in ending.traces} == {JobPhase.DONE}
    return ending


def test_only_the_project_of_a_reservation_runs_there() -> None:
    saver, long, kept_out, limited, owner, after = reserve().traces
    begin = timedelta(seconds=DRAINED_S + 1200)
    for trace in (saver, long):
        assert places(trace) == ["a", "b"]
        left = trace.attempts[0].ended_at
        assert left is not None
        assert begin - timedelta(minutes=1) < left - START <= begin + timedelta(seconds=10)
        (told,) = (event.text for event in trace.events if event.kind == "drained")
        assert "reserved for another project from" in told
        assert "lab" not in told
    assert places(kept_out) == ["b"]
    assert places(limited) == places(owner) == places(after) == ["a"]


def test_a_group_is_kept_out_of_a_reserved_host() -> None:
    at = sim.UserIntervention(
        action=sim.UserAction.RESERVE, node="a", project="lab", at_s=60, notice_s=1200
    )
    first, second = (task(1500, name=name, group=JobGroup(name="g")) for name in ("x", "y"))
    scenario = sim.SimScenario(
        submissions=(sim.SimSubmission(task=first, others=(second,), at_s=120),),
        script=CloudScript(offers=OFFERS, hosts=HOSTS),
        projects=(Project(name="lab"),),
        interventions=(at,),
        longest=timedelta(hours=2),
    )
    ending = play(scenario)
    check_all(ending)
    assert [places(trace) for trace in ending.traces] == [["b"], ["b"]]


@pytest.mark.parametrize("when", sim.CrashMoment)
@pytest.mark.parametrize("after", [2, 3, 4, 6])
def test_a_server_that_is_killed_keeps_a_reservation(after: int, when: sim.CrashMoment) -> None:
    call = count_calls(make_reservation, DRAINED_S + 1140) + after
    ending = reserve(sim.ServerCrash(call=call, when=when, down_s=45))
    begin, end = (START + timedelta(seconds=DRAINED_S + 1200 + each) for each in (120, 3600))
    for trace in ending.traces:
        for each in trace.attempts if trace.job.project != "lab" else ():
            assert (
                each.offer.region == "b"
                or each.created_at >= end
                or (each.ended_at is not None and each.ended_at < begin)
            )


@pytest.mark.parametrize("checkpoint", [SAVES, None])
def test_work_that_saves_leaves_a_faulty_gpu(checkpoint: CheckpointPolicy | None) -> None:
    gpus = replace(HERE, name="fake/a", cpus=4, devices=("g0", "g1", "g2"))
    offer = replace(
        OFFERS[0], instance_type="t4", accelerator="T4", accelerator_count=1, owned=True
    )
    one = ResourceSpec(accelerators=(AcceleratorNeed(name="T4", count_min=1),))
    scenario = sim.SimScenario(
        submissions=(
            sim.SimSubmission(task=task(3600, name="first", checkpoint=checkpoint, resources=one)),
            sim.SimSubmission(task=task(3600, name="other", resources=one)),
            sim.SimSubmission(task=task(60, name="late", resources=one), at_s=1000),
        ),
        script=CloudScript(offers=(offer,), hosts=(gpus,)),
        interventions=(sim.UserIntervention(action=sim.UserAction.CLOSE_GPU, node="a", at_s=600),),
        longest=timedelta(hours=8),
    )
    ending = play(scenario)
    check_all(ending)
    first, other, late = ending.traces
    assert {trace.job.phase for trace in ending.traces} == {JobPhase.DONE}
    assert [len(each.attempts) for each in (first, other, late)] == [2 if checkpoint else 1, 1, 1]
    told = [event.text for event in first.events if event.kind == "drained"]
    assert len(told) == bool(checkpoint), "other work would lose what it has done"
    assert all("GPU g0 of fake/a takes no work: cordoned by an operator" in one for one in told)
