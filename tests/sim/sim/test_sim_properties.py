"""Whatever the cloud, the network, users and the server's own deaths do: nothing hangs, leaks or
is billed twice.
"""

from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.records import make_offer
from tests.sim.scenario_checks import check_all

from cavvy.domain.allocations import Host
from cavvy.domain.jobs import JobPhase
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.policies import BoundPolicy, ProjectPolicy
from cavvy.domain.shares import MIN_RUN
from cavvy.domain.tasks import (
    AcceleratorNeed,
    CheckpointPolicy,
    IndexRange,
    JobLimits,
    ResourceSpec,
    RetryPolicy,
    SpotPolicy,
    TaskSpec,
)
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.providers.fake.script import (
    CallOutcome,
    CloudScript,
    FaultScript,
    PriceChange,
    RemovalScript,
    TimeSpan,
)
from cavvy.sim.harness import play
from cavvy.sim.scenario import (
    CrashMoment,
    ServerCrash,
    SimScenario,
    SimSubmission,
    UserAction,
    UserIntervention,
)


def offer(
    name: str, rate: int, *, spot: bool = False, minimum_s: int = 0, capacity: int | None = None
) -> Offer:
    return Offer(
        provider="fake",
        region="r",
        instance_type=name,
        vcpus=8,
        memory_mib=32768,
        purchase=Purchase.SPOT if spot else Purchase.ON_DEMAND,
        rate=HourlyRate(rate),
        minimum_charge=timedelta(seconds=minimum_s),
        capacity=capacity,
    )


OFFERS = (
    offer("a", 1_190_001, spot=True, minimum_s=600),
    offer("b", 2_490_000, capacity=3),
    offer("c", 9_999_999, minimum_s=60),
)
HOST = Host(name="fake/here", cpus=8, memory_mib=4096, devices=("g0", "g1"))
SHARED = tuple(
    make_offer(
        "fake/here/gpu",
        700_000 * max(1, count),
        accelerator="H100" if count else None,
        accelerator_count=count,
        accelerator_memory_mib=81920 if count else 0,
        vcpus=8,
        memory_mib=4096,
        shared=True,
    )
    for count in range(3)
)
seconds = st.floats(0, 5000).map(lambda value: round(value, 3))
replies = st.sampled_from(
    [
        CallOutcome.OK,
        CallOutcome.OK,
        CallOutcome.LOST,
        CallOutcome.TRY_AGAIN,
        CallOutcome.NO_CAPACITY,
        CallOutcome.REFUSED,
    ]
)
fault_scripts = st.builds(
    FaultScript,
    reply=replies,
    latency_s=st.sampled_from([0.1, 1.0, 30.0]),
    hidden_s=st.sampled_from([0.0, 0.0, 20.0, 100.0]),
    queue_s=st.sampled_from([0.0, 0.0, 400.0]),
    boot_s=st.sampled_from([1.0, 30.0, 300.0]),
    boots=st.sampled_from([True, True, True, False]),
    preempted_after_s=st.none() | seconds,
    notice_s=st.sampled_from([0.0, 30.0, 120.0]),
    lost_rank=st.sampled_from([None, None, None, 0, 1]),
    lost_after_s=seconds,
    mute_after_s=st.none() | st.none() | seconds,
    dead_after_s=st.none() | st.none() | seconds,
    garbled=st.booleans(),
    twins=st.booleans(),
)
removals = st.builds(
    RemovalScript,
    reply=st.sampled_from([CallOutcome.OK, CallOutcome.LOST, CallOutcome.TRY_AGAIN]),
    latency_s=st.sampled_from([0.1, 10.0]),
    takes_s=st.sampled_from([0.0, 5.0, 90.0]),
)
prices = st.builds(
    PriceChange,
    offer=st.sampled_from([offer.key for offer in (*OFFERS, *SHARED)]),
    at_s=seconds,
    rate=st.integers(1, 20_000_000).map(HourlyRate),
)
limits = st.builds(
    JobLimits,
    duration=st.none() | st.integers(60, 4000).map(lambda s: timedelta(seconds=s)),
    deadline_after=st.none()
    | st.none()
    | st.integers(600, 9000).map(lambda s: timedelta(seconds=s)),
    budget=st.none() | st.none() | st.integers(10_000, 9_000_000).map(Money),
    unattended=st.just(timedelta(minutes=20)),
)


@st.composite
def submissions(draw: st.DrawFn) -> SimSubmission:
    env = {
        "FAKE_RUN_S": str(draw(st.sampled_from([0, 5, 600, 3000]))),
        "FAKE_EXIT_CODE": str(draw(st.sampled_from([0, 0, 0, 3]))),
        "FAKE_EXIT_RANK": str(draw(st.integers(0, 2))),
        "FAKE_EXIT_AFTER_S": "40",
        "FAKE_SETUP_S": str(draw(st.sampled_from([0, 0, 100]))),
        "FAKE_STUBBORN": draw(st.sampled_from(["0", "0", "1"])),
    }
    gpus = draw(st.sampled_from([0, 0, 0, 1, 2]))
    resources = ResourceSpec(
        spot=SpotPolicy.AUTO if gpus else draw(st.sampled_from(SpotPolicy)),
        accelerators=(AcceleratorNeed(name="H100", count_min=gpus),) if gpus else (),
        memory_min_mib=draw(st.sampled_from([None, 1024, 3000])),
    )
    task = TaskSpec(
        name=draw(st.sampled_from(["digits", "llama"])),
        run="true",
        priority=draw(st.integers(-1, 1)),
        nodes=draw(st.sampled_from([1, 1, 2, 3])),
        env=env,
        resources=resources,
        limits=draw(limits),
        checkpoint=draw(
            st.none() | st.just(CheckpointPolicy(path="c", every=timedelta(minutes=2)))
        ),
        retry=RetryPolicy(
            exit=draw(st.sampled_from([0, 2])),
            delay=draw(st.sampled_from([timedelta(0), timedelta(minutes=3)])),
        ),
    )
    return SimSubmission(task=task, at_s=draw(seconds))


def keep_promise(script: CloudScript) -> CloudScript:
    """A provider promises to list a gang again within its `visibility_delay`, which is two minutes
    here. A gang that is hidden after its launch and then in a blackout, or in one blackout after the
    other, would be missing for longer.
    """
    blackouts: list[TimeSpan] = []
    for each in sorted(script.blackouts, key=lambda span: span.at_s):
        if not blackouts or each.at_s > blackouts[-1].at_s + blackouts[-1].for_s + 60:
            blackouts.append(each)
    longest = max((each.for_s for each in blackouts), default=0.0)
    launches = [
        replace(each, hidden_s=min(each.hidden_s, 115 - longest)) for each in script.launches
    ]
    return replace(script, blackouts=tuple(blackouts), launches=tuple(launches))


@st.composite
def scenarios(draw: st.DrawFn) -> SimScenario:
    jobs = tuple(draw(st.lists(submissions(), min_size=2, max_size=5)))
    script = CloudScript(
        offers=draw(st.sampled_from([OFFERS, SHARED, (*OFFERS, *SHARED), (*OFFERS, *SHARED)])),
        hosts=(HOST,),
        launches=tuple(draw(st.lists(fault_scripts, min_size=6, max_size=14))),
        removals=tuple(draw(st.lists(removals, max_size=8))),
        prices=tuple(draw(st.lists(prices, min_size=1, max_size=4))),
        storms=tuple(
            draw(
                st.lists(
                    st.builds(TimeSpan, at_s=seconds, for_s=st.sampled_from([30.0, 600.0])),
                    max_size=3,
                )
            )
        ),
        blackouts=tuple(
            draw(
                st.lists(
                    st.builds(TimeSpan, at_s=seconds, for_s=st.sampled_from([30.0, 110.0])),
                    max_size=3,
                )
            )
        ),
    )
    wishes = st.builds(
        UserIntervention,
        action=st.sampled_from(UserAction),
        job=st.integers(0, len(jobs) - 1),
        at_s=seconds,
        notice_s=st.sampled_from([0.0, 5.0, 60.0]),
    )
    crashes = st.builds(
        ServerCrash,
        call=st.integers(1, 300),
        when=st.sampled_from(CrashMoment),
        down_s=st.sampled_from([0.0, 5.0, 400.0, 3000.0]),
    )
    return SimScenario(
        submissions=jobs,
        script=keep_promise(script),
        interventions=tuple(draw(st.lists(wishes, max_size=4))),
        crashes=tuple(draw(st.lists(crashes, max_size=5, unique_by=lambda crash: crash.call))),
        store_s=draw(st.sampled_from([0.0, 0.01, 0.3])),
        stale=frozenset(draw(st.lists(st.integers(1, 300), max_size=8))),
    )


@pytest.mark.timeout(900)  # of 200 scenarios, which take a minute on an idle machine
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(scenarios())
def test_every_job_ends_and_every_second_is_paid_once(scenario: SimScenario) -> None:
    check_all(play(scenario))


@settings(max_examples=12, deadline=None)
@given(st.integers(2, 40))
def test_a_store_that_is_full_from_any_write_on_keeps_no_node(first: int) -> None:
    task = TaskSpec(name="t", run="x", env={"FAKE_RUN_S": "20000"})
    stop = UserIntervention(action=UserAction.STOP, job=0, at_s=3600)
    ending = play(
        SimScenario(
            submissions=(SimSubmission(task=task),),
            script=CloudScript(offers=OFFERS),
            interventions=(stop,),
            broken=frozenset(range(first, 5000)),
            longest=timedelta(hours=2),
        )
    )
    lives = ending.cloud.lives()
    assert len(lives) <= 1  # nothing is bought whose intent was not written
    assert [life.engine_id for life in lives if life.ended_at is None] == []


KINDS = tuple(
    replace(
        offer(name, rate, capacity=capacity),
        accelerator=name,
        accelerator_count=2,
        accelerator_memory_mib=81920,
    )
    for name, rate, capacity in (("H100", 3_000_000, 3), ("A100", 1_000_000, None))
)


@st.composite
def contested(draw: st.DrawFn) -> SimScenario:
    """Projects with quotas and limits want what others have borrowed."""

    def submit(number: int) -> SimSubmission:
        names = draw(st.sampled_from([("H100",), ("H100",), ("A100",), ("A100", "H100")]))
        needs = tuple(AcceleratorNeed(name=name, count_min=2) for name in names)
        task = TaskSpec(
            name=f"j{number}",
            run="true",
            project=draw(st.sampled_from("ab")),
            nodes=draw(st.sampled_from([1, 1, 2])),
            env={"FAKE_RUN_S": str(draw(st.sampled_from([300, 2400])))},
            resources=ResourceSpec(accelerators=needs),
            checkpoint=CheckpointPolicy(path="c", every=timedelta(minutes=2)),
        )
        return SimSubmission(task=task, at_s=draw(st.sampled_from([0, 0, 300, 2000])))

    amounts = st.sampled_from([4.0, 6.0])
    rules = st.builds(
        ProjectPolicy,
        max_accelerators=st.dictionaries(st.sampled_from(["H100", "A100"]), amounts),
        user_micros_per_hour=st.sampled_from([None, 6_000_000, 8_000_000]),
        user_jobs=st.sampled_from([None, 2]),
    )
    quotas = {name: {"H100": 2.0 * draw(st.integers(0, 2))} for name in "ab"}
    policies = [BoundPolicy("", draw(rules))]
    policies += [
        BoundPolicy(name, replace(draw(rules), quota_accelerators=quotas[name])) for name in "ab"
    ]
    crashes = st.builds(
        ServerCrash, call=st.integers(1, 60), when=st.sampled_from(CrashMoment), down_s=st.just(5.0)
    )
    return SimScenario(
        submissions=tuple(submit(number) for number in range(draw(st.integers(3, 5)))),
        script=CloudScript(offers=KINDS),
        policies=tuple(policies),
        crashes=tuple(draw(st.lists(crashes, max_size=2, unique_by=lambda crash: crash.call))),
    )


@settings(max_examples=5, deadline=None)
@given(contested())
def test_no_quota_is_exceeded_and_all_jobs_have_their_turn(scenario: SimScenario) -> None:
    """Limits count what is borrowed. Whole gangs start, a borrower works for the minimum time, and
    gives back to a project within its quota only."""
    ending = play(scenario)
    check_all(ending)
    assert all(trace.job.phase is JobPhase.DONE for trace in ending.traces)
    held = [
        (each.created_at, each.ended_at or ending.at, trace.job.project, each)
        for trace in ending.traces
        for each in trace.attempts
    ]
    for at, *_ in held:
        now = [(project, each) for begin, end, project, each in held if begin <= at < end]
        for bound in scenario.policies:
            mine = [each for project, each in now if bound.project in ("", project)]
            for name, most in bound.policy.max_accelerators.items():
                assert sum(2 * a.nodes for a in mine if a.offer.accelerator == name) <= most
            micros = [each.nodes * each.offer.rate.micros_per_hour for each in mine]
            assert sum(micros) <= (bound.policy.user_micros_per_hour or sum(micros))
            work = [a for a in mine if a.finished_at is None or at < a.finished_at]
            assert len(work) <= (bound.policy.user_jobs or len(work))
    for *_, reclaimed in held:
        if reclaimed.reclaimed_for:
            assert reclaimed.running_at is not None
            assert reclaimed.finished_at is not None
            assert reclaimed.finished_at - reclaimed.running_at >= MIN_RUN


@pytest.mark.parametrize("when", CrashMoment)
@pytest.mark.parametrize("first", [1, 4, 7])
def test_kills_during_an_array_and_a_return_of_quota_lose_and_double_no_job(
    when: CrashMoment, first: int
) -> None:
    """The server is killed about 130 times in each case, from the first start to the last end."""
    need = ResourceSpec(accelerators=(AcceleratorNeed(name="H100", count_min=2),))
    saves = CheckpointPolicy(path="c", every=timedelta(minutes=2))
    work = TaskSpec(name="j", run="true", resources=need, checkpoint=saves)
    borrower = replace(
        work, project="b", env={"FAKE_RUN_S": "2400"}, array=(IndexRange(0, 4),), parallel=3
    )
    owner = replace(work, project="a", nodes=2, env={"FAKE_RUN_S": "600"})
    crashes = tuple(ServerCrash(call=each, when=when, down_s=2) for each in range(first, 1200, 9))
    ending = play(
        SimScenario(
            submissions=(SimSubmission(task=borrower), SimSubmission(task=owner, at_s=300)),
            script=CloudScript(offers=KINDS[:1]),
            policies=(BoundPolicy("a", ProjectPolicy(quota_accelerators={"H100": 4.0})),),
            crashes=crashes,
        )
    )
    check_all(ending)
    assert [trace.job.phase for trace in ending.traces] == [JobPhase.DONE] * 6
    attempts = [each for trace in ending.traces for each in trace.attempts]
    assert sum(bool(each.reclaimed_for) for each in attempts) == 2
