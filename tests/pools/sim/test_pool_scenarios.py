"""Elastic pools: nodes come with the work and go without it, each is paid once, and a server that is
killed loses and doubles none."""

from datetime import timedelta
from typing import Any

import pytest
from tests.sim.sim.test_sim_scenarios import CHEAP, DEAR, SPOT, run_scenario, task

from cavvy.domain.events import ChargeKind
from cavvy.domain.jobs import JobPhase
from cavvy.domain.node_pools import CLUSTER_NODE_TAG, NodePool, OrderedNode
from cavvy.domain.tasks import JobLimits, ResourceSpec, StartWindow, TaskSpec, WindowSpan
from cavvy.domain.values import replace
from cavvy.providers.fake.script import CloudScript
from cavvy.sim.harness import START, play
from cavvy.sim.scenario import (
    CrashMoment,
    ScenarioResult,
    ServerCrash,
    SimScenario,
    SimSubmission,
    UserAction,
    UserIntervention,
)

IDLE = timedelta(minutes=20)
POOL = NodePool(
    project="default",
    name="gpus",
    resources=ResourceSpec(cpus_min=1),
    max_nodes=4,
    idle=IDLE,
    consented=True,
)
RESERVED = replace(DEAR, instance_type="reserved", reserved=True, capacity=1)


def in_pool(run_s: float = 600, **changes: object) -> TaskSpec:
    return task(run_s, pool="gpus", **changes)


def play_jobs(
    count: int, pool: NodePool = POOL, run_s: float = 600, **more: object
) -> ScenarioResult:
    jobs = tuple(SimSubmission(task=in_pool(run_s, name=f"job-{at}")) for at in range(count))
    return run_scenario(submissions=jobs, pools=(pool,), **more)


def count_most(ending: ScenarioResult) -> int:
    """Return the highest number of machines that existed at the same time."""
    spans = [
        (machine.started_at, machine.ended_at or ending.at)
        for gang in ending.cloud.gang_list
        for machine in gang.machines
        if machine.started_at is not None
    ]
    return max(sum(start <= at < end for start, end in spans) for at, _ in spans)


def test_six_jobs_make_four_nodes_which_go_when_they_are_idle() -> None:
    ending = play_jobs(6)
    assert ending.finished, "no node is left"
    assert [trace.job.phase for trace in ending.traces] == [JobPhase.DONE] * 6
    assert len(ending.cloud.gang_list) == count_most(ending) == 4
    assert sum(trace.attempts[0].adopted_at is not None for trace in ending.traces) == 2
    last = max(trace.job.ended_at for trace in ending.traces if trace.job.ended_at)
    gone = max(gang.machines[0].ended_at or ending.at for gang in ending.cloud.gang_list)
    assert IDLE <= gone - last < IDLE + timedelta(minutes=1)
    kept = [each for trace in ending.traces for each in trace.charges]
    assert {each.project for each in kept} == {"default"}
    assert sum(
        (each.until - each.since for each in kept if each.kind is ChargeKind.KEPT), timedelta(0)
    ) > 4 * timedelta(minutes=15)


def test_a_job_that_waits_says_that_the_pool_is_full() -> None:
    ending = play_jobs(2, replace(POOL, max_nodes=1))
    assert len(ending.cloud.gang_list) == 1
    assert ending.traces[1].attempts[0].adopted_at is not None


def test_reserved_nodes_come_first_then_spot_then_on_demand() -> None:
    ending = play_jobs(4, replace(POOL, spot_share=0.5), offers=(DEAR, CHEAP, SPOT, RESERVED))
    bought = [trace.attempts[0].offer.instance_type for trace in ending.traces]
    # Of the three nodes that are not reserved, one and a half may be spot: the first rented node
    # is on demand, because one spot node of one would be more than half.
    assert bought == ["reserved", "cheap", "spot", "cheap"]


def test_a_job_with_another_shape_gets_the_place_of_an_idle_node() -> None:
    jobs = (
        SimSubmission(task=in_pool(name="one")),
        SimSubmission(task=in_pool(name="two", nodes=2), at_s=900),
    )
    ending = run_scenario(submissions=jobs, pools=(replace(POOL, max_nodes=2),))
    assert [trace.job.phase for trace in ending.traces] == [JobPhase.DONE] * 2
    assert count_most(ending) == 2
    assert any("make room for job two" in each.text for each in ending.traces[0].events)


def test_a_pool_that_is_closed_keeps_jobs_waiting_and_no_idle_node() -> None:
    opens = START + timedelta(minutes=20)
    minute = opens.hour * 60 + opens.minute
    span = WindowSpan(days=tuple(range(7)), start_minute=minute, end_minute=minute + 30)
    pool = replace(POOL, hours=StartWindow(spans=(span,), text="later"))
    ending = play_jobs(1, pool)
    (trace,) = ending.traces
    assert trace.job.phase is JobPhase.DONE
    assert trace.attempts[0].created_at >= opens
    (machine,) = ending.cloud.gang_list[0].machines
    assert machine.ended_at is not None
    assert machine.ended_at - opens < timedelta(minutes=35), "not kept after the pool has closed"


def play_minimum(pool: NodePool, longest: timedelta, *crashes: ServerCrash) -> ScenarioResult:
    """Run three jobs in a pool with a minimum, whose last nodes are never removed."""
    jobs = [SimSubmission(task=in_pool(60, name=f"job-{at}"), at_s=at * 20) for at in range(3)]
    ending = play(
        SimScenario(
            submissions=tuple(jobs),
            script=CloudScript(offers=(CHEAP,), hosts=()),
            pools=(pool,),
            crashes=crashes,
            longest=longest,
        )
    )
    assert [trace.job.phase for trace in ending.traces] == [JobPhase.DONE] * 3
    assert count_most(ending) <= pool.max_nodes
    running = [gang for gang in ending.cloud.gang_list if gang.machines[0].ended_at is None]
    assert len(running) == pool.min_nodes
    return ending


def test_a_pool_keeps_its_minimum() -> None:
    play_minimum(replace(POOL, min_nodes=2), timedelta(hours=2))


def test_a_job_takes_a_node_of_the_minimum_over() -> None:
    need = ResourceSpec(cpus_min=1, disk_gib=200)
    job = in_pool(60, tags={"team": "a"}, resources=ResourceSpec(cpus_min=2))
    idle = JobLimits(idle=timedelta(minutes=30))
    stopped = in_pool(600, name="next", session=True, limits=idle)  # as of `cavvy dev --pool`
    jobs = (SimSubmission(task=job, at_s=300), SimSubmission(task=stopped, at_s=400))
    stop = UserIntervention(action=UserAction.STOP, job=1, at_s=450)
    ending = play(
        SimScenario(
            submissions=jobs,
            script=CloudScript(offers=(CHEAP,), hosts=()),
            pools=(replace(POOL, min_nodes=1, resources=need),),
            interventions=(stop,),
            longest=timedelta(hours=1),
        )
    )
    assert [trace.job.phase for trace in ending.traces] == [JobPhase.DONE, JobPhase.STOPPED]
    assert all(trace.attempts[0].adopted_at for trace in ending.traces)
    assert len(ending.cloud.gang_list) == 1, "and the node survives the stop of a job"


@pytest.mark.parametrize("when", CrashMoment)
@pytest.mark.parametrize("call", range(1, 60, 7))
def test_a_server_that_is_killed_loses_and_doubles_no_node(call: int, when: CrashMoment) -> None:
    pool = replace(POOL, min_nodes=1, max_nodes=2, idle=timedelta(minutes=2))
    crash = ServerCrash(call=call, when=when, down_s=45)
    play_minimum(pool, timedelta(minutes=40), crash)


ORDERED = tuple(OrderedNode(name=f"gpus-{at}", job_id=f"{at:016}") for at in range(2))
CLUSTER = replace(POOL, join="exec slurmd", members=ORDERED)


def play_cluster(pool: NodePool, *crashes: ServerCrash, **more: Any) -> ScenarioResult:
    script = CloudScript(offers=(CHEAP,), hosts=())
    scenario = SimScenario(
        script=script, pools=(pool,), crashes=crashes, longest=timedelta(minutes=30), **more
    )
    return play(scenario)


@pytest.mark.parametrize("when", CrashMoment)
@pytest.mark.parametrize("call", range(1, 40, 7))
def test_a_server_that_is_killed_completes_the_orders_of_another_cluster(
    call: int, when: CrashMoment
) -> None:
    """The pool is stored with two nodes whose jobs do not exist yet. After `join` has ended, a node
    is not started again."""
    ending = play_cluster(CLUSTER, ServerCrash(call=call, when=when, down_s=45), submissions=())
    started = sorted(gang.spec.name.split("-")[2] for gang in ending.cloud.gang_list)
    assert started == [each.job_id for each in ORDERED]


def test_a_node_that_its_cluster_has_released_is_stopped() -> None:
    """The server was killed between the release and the stop of the job."""
    job = in_pool(100_000, name="gpus-7", tags={CLUSTER_NODE_TAG: "gpus-7"})
    ending = play_cluster(replace(CLUSTER, members=()), submissions=(SimSubmission(task=job),))
    [trace] = ending.traces
    assert (trace.job.phase, trace.job.reason) == (
        JobPhase.STOPPED,
        "the cluster released the node",
    )
    assert all(gang.machines[0].ended_at for gang in ending.cloud.gang_list)
