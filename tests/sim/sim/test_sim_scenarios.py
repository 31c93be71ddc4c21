"""Scenarios with a point: what a user sees when this or that happens, and the server's death at
every single step.
"""

from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise

import pytest
from tests.records import make_offer
from tests.sim.scenario_checks import check_all, tell

from cavvy.domain.allocations import Host
from cavvy.domain.jobs import AttemptOutcome, JobPhase
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.policies import BoundPolicy, ProjectPolicy
from cavvy.domain.shares import WITHOUT_GPU
from cavvy.domain.tasks import (
    AcceleratorNeed,
    CheckpointPolicy,
    IndexRange,
    JobLimits,
    JobSchedule,
    LossPolicy,
    ResourceSpec,
    RetryPolicy,
    SpotPolicy,
    TaskSpec,
    Workload,
)
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.frame.faults import forget_faults, list_faults
from cavvy.providers.fake.script import (
    CallOutcome,
    CloudScript,
    FaultScript,
    PriceChange,
    RemovalScript,
    TimeSpan,
)
from cavvy.sim.harness import START, play
from cavvy.sim.scenario import (
    CrashMoment,
    JobTrace,
    ScenarioResult,
    ServerCrash,
    SimScenario,
    SimSubmission,
    UserAction,
    UserIntervention,
)

CHEAP = make_offer(
    "fake/r/cheap", 1_000_000, vcpus=8, memory_mib=32768, minimum_charge=timedelta(seconds=60)
)
SPOT = replace(CHEAP, instance_type="spot", purchase=Purchase.SPOT, rate=HourlyRate(300_000))
DEAR = replace(CHEAP, instance_type="dear", rate=HourlyRate(5_000_000))
FREE = replace(
    CHEAP,
    region="here",
    instance_type="cpu",
    vcpus=2,
    memory_mib=4096,
    rate=HourlyRate(0),
    shared=True,
)
HERE = Host(name="fake/here", cpus=2, memory_mib=4096)


def task(run_s: float = 600, **changes: object) -> TaskSpec:
    env = {"FAKE_RUN_S": str(run_s)}
    env.update(changes.pop("env", {}))  # type: ignore[call-overload]
    return replace(TaskSpec(name="digits", run="train", env=env), **changes)  # type: ignore[arg-type]


def run_scenario(
    *tasks: TaskSpec, offers: tuple[Offer, ...] = (CHEAP, DEAR), **more: object
) -> ScenarioResult:
    launches = more.pop("launches", ())
    removals = more.pop("removals", ())
    storms = more.pop("storms", ())
    prices = more.pop("prices", ())
    submissions = more.pop("submissions", tuple(SimSubmission(task=item) for item in tasks))
    events = {"launches": launches, "removals": removals, "storms": storms, "prices": prices}
    script = CloudScript(offers=offers, hosts=(HERE,), **events)  # type: ignore[arg-type]
    scenario = SimScenario(submissions=submissions, script=script, **more)  # type: ignore[arg-type]
    ending = play(scenario)
    check_all(ending)
    return ending


def only(ending: ScenarioResult) -> JobTrace:
    [trace] = ending.traces
    return trace


def outcomes(trace: JobTrace) -> list[AttemptOutcome | None]:
    return [attempt.outcome for attempt in trace.attempts]


def pool(trace: JobTrace) -> list[str]:
    return [attempt.offer.instance_type for attempt in trace.attempts]


def test_a_job_is_done_the_moment_its_exit_is_reported() -> None:
    trace = only(run_scenario(task(), removals=(RemovalScript(takes_s=300),)))
    [attempt] = trace.attempts
    assert trace.job.phase is JobPhase.DONE
    assert trace.job.ended_at == attempt.finished_at == trace.nodes[0][0].exited_at
    assert attempt.ended_at is not None
    assert trace.job.ended_at is not None
    assert attempt.ended_at - trace.job.ended_at >= timedelta(seconds=300)


def test_no_capacity_is_found_at_the_next_best_place_at_once() -> None:
    trace = only(run_scenario(task(), launches=(FaultScript(reply=CallOutcome.NO_CAPACITY),)))
    assert outcomes(trace) == [AttemptOutcome.CAPACITY, AttemptOutcome.SUCCEEDED]
    assert pool(trace) == ["cheap", "dear"]
    assert trace.attempts[1].created_at - trace.attempts[0].created_at < timedelta(seconds=2)


def test_what_a_place_never_started_is_not_waited_for_when_the_job_is_stopped_meanwhile() -> None:
    """The stop is written while the launch is on its way, so the place's no meets a row that has
    changed.
    """
    stop = UserIntervention(action=UserAction.STOP, job=0, at_s=10)
    ending = run_scenario(
        task(),
        launches=(FaultScript(reply=CallOutcome.NO_CAPACITY, latency_s=30),),
        interventions=(stop,),
    )
    assert only(ending).job.phase is JobPhase.STOPPED
    assert ending.at - START < timedelta(minutes=2), (
        "and not the two minutes in which a gang may be hidden"
    )


def test_a_place_that_took_a_node_back_is_asked_anew_before_the_next_try() -> None:
    """Its offers were read two seconds before, for another job, and are kept for five."""
    dearer = PriceChange(offer=SPOT.key, at_s=899, rate=HourlyRate(3_000_000))
    wishes = (
        SimSubmission(task=task(3600, resources=ResourceSpec(spot=SpotPolicy.AUTO))),
        SimSubmission(task=task(), at_s=898),
    )
    ending = run_scenario(
        submissions=wishes,
        launches=(FaultScript(preempted_after_s=900),),
        offers=(SPOT, CHEAP),
        prices=(dearer,),
    )
    trace = ending.traces[0]
    taken = next(event.at for event in trace.events if event.kind == "preempted")
    assert taken - START < timedelta(seconds=902)
    assert pool(trace) == ["spot", "cheap"], tell(trace)


def test_a_lost_reply_buys_nothing_twice() -> None:
    ending = run_scenario(task(), launches=(FaultScript(reply=CallOutcome.LOST, hidden_s=60),))
    assert outcomes(only(ending)) == [AttemptOutcome.SUCCEEDED]
    assert len(ending.cloud.gang_list) == 1


def test_a_preempted_job_goes_on_from_its_checkpoint() -> None:
    spot = task(
        3000, resources=ResourceSpec(spot=SpotPolicy.ONLY), checkpoint=CheckpointPolicy(path="c")
    )
    ending = run_scenario(
        spot, offers=(SPOT,), launches=(FaultScript(preempted_after_s=2000, notice_s=30),)
    )
    trace = only(ending)
    assert outcomes(trace) == [AttemptOutcome.PREEMPTED, AttemptOutcome.SUCCEEDED]
    first, second = ((until or START) - since for _, _, since, until in ending.cloud.storage.work)
    assert timedelta(seconds=3000) <= first + second < timedelta(seconds=3030)
    assert {"notice", "checkpoint"} <= {event.kind for event in trace.events}


@pytest.mark.parametrize("first", range(12, 16))
def test_a_job_that_is_preempted_while_the_disk_is_full_starts_again(first: int) -> None:
    spot = task(3000, resources=ResourceSpec(spot=SpotPolicy.ONLY))
    launches = (FaultScript(preempted_after_s=500),)
    full = frozenset(range(first, first + 30))
    ending = run_scenario(spot, offers=(SPOT,), launches=launches, broken=full)
    assert only(ending).job.phase is JobPhase.DONE


def test_a_preemption_without_notice_loses_only_what_came_after_the_checkpoint() -> None:
    spot = task(
        3000, resources=ResourceSpec(spot=SpotPolicy.ONLY), checkpoint=CheckpointPolicy(path="c")
    )
    ending = run_scenario(spot, offers=(SPOT,), launches=(FaultScript(preempted_after_s=2000),))
    total = sum(
        ((until or START) - since for _, _, since, until in ending.cloud.storage.work), timedelta(0)
    )
    assert outcomes(only(ending)) == [AttemptOutcome.PREEMPTED, AttemptOutcome.SUCCEEDED]
    assert timedelta(seconds=3000) < total <= timedelta(seconds=3600)


def test_a_fire_drill_is_a_preemption_that_the_same_place_may_follow() -> None:
    drill = UserIntervention(action=UserAction.DRILL, job=0, at_s=300, notice_s=5)
    trace = only(
        run_scenario(
            task(checkpoint=CheckpointPolicy(path="c")), offers=(FREE,), interventions=(drill,)
        )
    )
    assert outcomes(trace) == [AttemptOutcome.PREEMPTED, AttemptOutcome.SUCCEEDED]
    assert pool(trace) == ["cpu", "cpu"]
    assert trace.nodes[0][0].order is not None
    assert trace.nodes[0][0].order.kind == "notice"


def test_a_drill_takes_the_node_of_work_that_ignores_it() -> None:
    drill = UserIntervention(action=UserAction.DRILL, job=0, at_s=300, notice_s=5)
    trace = only(run_scenario(task(env={"FAKE_STUBBORN": "1"}), interventions=(drill,)))
    assert outcomes(trace) == [AttemptOutcome.PREEMPTED, AttemptOutcome.SUCCEEDED]
    assert trace.attempts[0].since is not None


def test_a_gang_fails_as_one_with_the_first_failures_exit_code() -> None:
    env = {"FAKE_EXIT_CODE": "7", "FAKE_EXIT_RANK": "1", "FAKE_EXIT_AFTER_S": "100"}
    trace = only(run_scenario(task(nodes=3, env=env)))
    [attempt] = trace.attempts
    assert (trace.job.phase, trace.job.exit_code, attempt.first_failed_rank) == (
        JobPhase.FAILED,
        7,
        1,
    )
    exits = [node.exited_at for node in trace.nodes[0]]
    assert all(at is not None for at in exits)
    known = [at for at in exits if at is not None]
    assert max(known) - min(known) < timedelta(seconds=5)
    assert [node.exit_outcome for node in trace.nodes[0]] == [
        AttemptOutcome.STOPPED,
        AttemptOutcome.EXIT,
        AttemptOutcome.STOPPED,
    ]


def test_stubborn_ranks_are_removed_before_the_next_try_begins() -> None:
    env = {
        "FAKE_EXIT_CODE": "7",
        "FAKE_EXIT_RANK": "1",
        "FAKE_EXIT_AFTER_S": "100",
        "FAKE_STUBBORN": "1",
    }
    trace = only(
        run_scenario(
            task(nodes=2, env=env, retry=RetryPolicy(exit=1)),
            launches=(FaultScript(boot_s=1), FaultScript(boot_s=1)),
        )
    )
    assert outcomes(trace) == [AttemptOutcome.EXIT, AttemptOutcome.EXIT]


@pytest.mark.parametrize(("failures", "told"), [(9, 0), (25, 1)])
def test_a_removal_that_keeps_failing_is_told_once(failures: int, told: int) -> None:
    failed = RemovalScript(reply=CallOutcome.TRY_AGAIN)
    trace = only(run_scenario(task(run_s=60), removals=(failed,) * failures))
    assert outcomes(trace) == [AttemptOutcome.SUCCEEDED]
    texts = [each.text for each in trace.events if each.kind == "unremoved"]
    assert len(texts) == told
    assert all("so the gang may still be billed" in each for each in texts)
    assert all(each.endswith("503: nothing was removed") for each in texts)


@pytest.mark.parametrize(
    ("on_loss", "places"),
    [(LossPolicy.REPAIR, ["cheap", "cheap"]), (LossPolicy.RESTART, ["cheap", "dear"])],
)
def test_a_lost_rank_is_replaced_or_takes_the_gang_to_another_place(
    on_loss: LossPolicy, places: list[str]
) -> None:
    trace = only(
        run_scenario(
            task(nodes=2, on_loss=on_loss), launches=(FaultScript(lost_rank=1, lost_after_s=200),)
        )
    )
    assert outcomes(trace) == [AttemptOutcome.NODE, AttemptOutcome.SUCCEEDED]
    assert pool(trace) == places
    first = trace.nodes[0][0]
    assert (first.exit_outcome, first.exit_code) == (AttemptOutcome.STOPPED, 143), tell(trace)


def test_a_place_that_never_boots_is_left() -> None:
    trace = only(run_scenario(task(), launches=(FaultScript(boots=False),)))
    assert outcomes(trace) == [AttemptOutcome.TIMEOUT, AttemptOutcome.SUCCEEDED]
    assert pool(trace) == ["cheap", "dear"]


def test_a_silent_agent_is_given_up_after_its_lease() -> None:
    limits = JobLimits(unattended=timedelta(minutes=30))
    trace = only(run_scenario(task(limits=limits), launches=(FaultScript(dead_after_s=100),)))
    assert outcomes(trace) == [AttemptOutcome.NODE, AttemptOutcome.SUCCEEDED]
    assert "lease" in trace.attempts[0].reason


def test_a_stop_ends_the_work_within_its_grace() -> None:
    stop = UserIntervention(action=UserAction.STOP, job=0, at_s=300)
    trace = only(run_scenario(task(), interventions=(stop,)))
    assert (trace.job.phase, outcomes(trace)) == (JobPhase.STOPPED, [AttemptOutcome.STOPPED])
    assert trace.job.ended_at is not None
    assert trace.job.ended_at - START < timedelta(seconds=302)


def test_a_stop_is_not_delayed_for_ever_by_work_that_ignores_it() -> None:
    stop = UserIntervention(action=UserAction.STOP, job=0, at_s=300)
    mute = FaultScript(mute_after_s=100)
    trace = only(run_scenario(task(), interventions=(stop,), launches=(mute,)))
    assert trace.job.phase is JobPhase.STOPPED
    assert trace.job.ended_at is not None
    assert trace.job.ended_at - START < timedelta(seconds=320)


def test_a_budget_is_kept_to_the_cent() -> None:
    trace = only(run_scenario(task(90_000, limits=JobLimits(budget=Money(2_000_000)))))
    spent = sum(charge.amount.micros for charge in trace.charges)
    assert trace.job.phase is JobPhase.FAILED
    assert outcomes(trace) == [AttemptOutcome.LIMIT]
    assert 1_980_000 < spent <= 2_000_000
    assert [event.kind for event in trace.events].count("limit") == 1, tell(trace)


def test_a_budget_holds_even_while_the_server_is_gone() -> None:
    """The lease ends where the budget does, so the node ends itself."""
    down = tuple(ServerCrash(call=call, when=CrashMoment.BEFORE, down_s=40_000) for call in (60,))
    trace = only(
        run_scenario(task(90_000, limits=JobLimits(budget=Money(2_000_000))), crashes=down)
    )
    assert sum(charge.amount.micros for charge in trace.charges) <= 2_010_000


@pytest.mark.parametrize("call", [200, 400])
def test_a_budget_is_kept_by_a_new_server_whose_places_do_not_answer(call: int) -> None:
    """No look says what the gang has cost since the last one: it is taken to bill from its
    launch on.
    """
    storm, death = TimeSpan(at_s=300, for_s=20_000), ServerCrash(call=call, when=CrashMoment.BEFORE)
    trace = only(
        run_scenario(
            task(90_000, limits=JobLimits(budget=Money(2_000_000))),
            storms=(storm,),
            crashes=(death,),
        )
    )
    limit = next(event.at for event in trace.events if event.kind == "limit")
    assert timedelta(seconds=7000) < limit - START < timedelta(seconds=7200), tell(trace)


def test_a_duration_counts_all_tries_and_a_deadline_the_waiting_too() -> None:
    duration = only(run_scenario(task(limits=JobLimits(duration=timedelta(seconds=200)))))
    deadline = only(run_scenario(task(limits=JobLimits(deadline_after=timedelta(seconds=200)))))
    assert duration.job.phase is deadline.job.phase is JobPhase.FAILED
    assert duration.job.ended_at is not None
    assert deadline.job.ended_at is not None
    assert duration.job.ended_at - START > timedelta(seconds=230)
    assert deadline.job.ended_at - START < timedelta(seconds=202)


def test_a_start_in_the_future_waits() -> None:
    later = START + timedelta(hours=3)
    trace = only(run_scenario(task(schedule=JobSchedule(at=later))))
    assert trace.attempts[0].created_at >= later
    assert trace.attempts[0].created_at - later < timedelta(seconds=1)


def test_what_fits_nowhere_is_told_what_would_have_to_change() -> None:
    trace = only(run_scenario(task(resources=ResourceSpec(max_rate=HourlyRate(1)))))
    assert trace.job.phase is JobPhase.FAILED
    assert "$" in trace.job.reason
    assert not trace.attempts


def test_paid_places_need_consent() -> None:
    refused = only(run_scenario(submissions=(SimSubmission(task=task(), consented=False),)))
    assert refused.job.phase is JobPhase.FAILED
    assert "neither --yes nor a budget" in refused.job.reason
    free = only(
        run_scenario(
            offers=(FREE, CHEAP), submissions=(SimSubmission(task=task(), consented=False),)
        )
    )
    assert pool(free) == ["cpu"]


def test_more_jobs_than_cpus_wait_in_order() -> None:
    jobs = [task(100 + 7 * n, name=f"job{n}") for n in range(6)]
    urgent = SimSubmission(task=task(100, name="urgent", priority=5), at_s=10)
    ending = run_scenario(
        offers=(FREE,), submissions=(*(SimSubmission(task=job) for job in jobs), urgent)
    )
    assert started(ending) == [
        "job0",
        "job1",
        "urgent",
        "job2",
        "job3",
        "job4",
        "job5",
    ]
    assert any(
        "waits" in trace.job.reason or trace.job.phase is JobPhase.DONE for trace in ending.traces
    )


def test_projects_share_what_is_scarce() -> None:
    """One project has submitted many jobs before the other: from then on, they take turns, except
    that the first has used the machine alone until then."""
    jobs = [SimSubmission(task=task(1000, name=f"a{n}", project="a")) for n in range(6)]
    jobs += [SimSubmission(task=task(1000, name=f"b{n}", project="b"), at_s=500) for n in range(3)]
    ending = run_scenario(offers=(FREE,), submissions=tuple(jobs))
    assert [name[0] for name in started(ending)] == [*"aa", *"ab" * 3, *"a"]


def test_a_limit_keeps_the_jobs_of_a_project_waiting_and_no_others() -> None:
    limit = ProjectPolicy(max_gpus=WITHOUT_GPU)
    jobs = [SimSubmission(task=task(1000, name=f"a{n}", project="a")) for n in range(3)]
    jobs += [SimSubmission(task=task(100, name=f"b{n}", project="b")) for n in range(3)]
    ending = run_scenario(
        offers=(FREE,), submissions=tuple(jobs), policies=(BoundPolicy("a", limit),)
    )
    assert [name[0] for name in started(ending)] == [*"abbbaa"]
    spans = sorted(
        (trace.attempts[0].created_at, trace.attempts[0].ended_at)
        for trace in ending.traces
        if trace.job.project == "a"
    )
    for (_, end), (begin, _) in pairwise(spans):
        assert end is not None
        assert begin >= end


def test_limits_count_accelerators_and_dollars_of_the_offers() -> None:
    """A job takes another accelerator if the limit of one is reached; else it waits, and later jobs
    that need something else do not."""
    sold = [
        replace(DEAR, instance_type=name, accelerator=name, accelerator_count=1, rate=rate)
        for name, rate in (("H100", HourlyRate(3_000_000)), ("A100", HourlyRate(1_000_000)))
    ]
    sold = [replace(each, accelerator_memory_mib=81920) for each in sold]

    def needs(*names: str) -> ResourceSpec:
        return ResourceSpec(accelerators=tuple(AcceleratorNeed(name=each) for each in names))

    policy = ProjectPolicy(max_accelerators={"H100": 2.0}, user_micros_per_hour=8_000_000)
    h100, a100, both = needs("H100"), needs("A100"), needs("A100", "H100")
    jobs = [task(1000, name=f"h{n}", resources=h100) for n in range(4)]
    jobs += [task(1000, name=f"a{n}", resources=a100) for n in range(4)]
    jobs += [task(1000, name="any", resources=both)]
    ending = run_scenario(*jobs, offers=tuple(sold), policies=(BoundPolicy("", policy),))
    assert all(trace.job.phase is JobPhase.DONE for trace in ending.traces)
    spans = [
        (each.created_at, each.ended_at or START, each.offer)
        for trace in ending.traces
        for each in trace.attempts
    ]
    for at, _, _ in spans:
        held = [offer for begin, end, offer in spans if begin <= at < end]
        assert sum(offer.accelerator == "H100" for offer in held) <= 2
        assert sum(offer.rate.micros_per_hour for offer in held) <= 8_000_000
    first = [trace.job.name for trace in ending.traces if trace.attempts[0].created_at == START]
    assert len(first) == 4
    assert {"h0", "h1", "a0", "a1"} == {*first}


def test_a_job_that_may_use_fewer_offers_at_a_limit_keeps_no_other_waiting() -> None:
    """Both accept either GPU, but the budget of the first one permits only own hosts."""
    host = replace(HERE, devices=("g0", "g1"))
    own, cloud = (
        replace(offer, instance_type=name, accelerator=name, accelerator_count=1)
        for offer, name in ((FREE, "T4"), (CHEAP, "A10"))
    )
    either = ResourceSpec(accelerators=(AcceleratorNeed(name="T4"), AcceleratorNeed(name="A10")))
    jobs = (
        task(1000, name="holder", resources=replace(either, accelerators=either.accelerators[:1])),
        task(60, name="poor", resources=either, limits=JobLimits(budget=Money(1))),
        task(60, name="any", resources=either),
    )
    ending = play(
        SimScenario(
            submissions=tuple(SimSubmission(task=each) for each in jobs),
            script=CloudScript(offers=(own, cloud), hosts=(host,)),
            policies=(BoundPolicy("", ProjectPolicy(max_accelerators={"T4": 1})),),
        )
    )
    check_all(ending)
    holder, poor, other = (trace.attempts[0] for trace in ending.traces)
    assert (poor.offer, other.offer) == (own, cloud)
    assert holder.ended_at is not None
    assert poor.created_at >= holder.ended_at
    assert other.created_at == START


def test_jobs_that_wait_for_something_else_do_not_count_toward_limits() -> None:
    """A job that finds no capacity holds nothing, so later jobs of its user may start."""
    gpu = AcceleratorNeed(name="H100", count_min=1)
    sold = replace(
        DEAR, accelerator="H100", accelerator_count=1, accelerator_memory_mib=81920, capacity=0
    )
    first = task(name="big", resources=ResourceSpec(accelerators=(gpu,)))
    stop = UserIntervention(action=UserAction.STOP, job=0, at_s=5000)
    ending = run_scenario(
        first,
        task(name="small"),
        offers=(sold, CHEAP),
        interventions=(stop,),
        policies=(BoundPolicy("", ProjectPolicy(user_jobs=1)),),
    )
    assert ending.traces[0].job.phase is JobPhase.STOPPED
    assert (ending.traces[1].job.ended_at or START) - START < timedelta(seconds=1000)


def test_limits_hold_for_jobs_of_machines() -> None:
    jobs = (task(1000, name="a"), *(task(1000, name=name, machine=name) for name in ("b", "c")))
    limit = BoundPolicy("", ProjectPolicy(user_jobs=1))
    ending = run_scenario(*jobs, offers=(FREE,), policies=(limit,))
    ends = sorted(trace.job.ended_at or START for trace in ending.traces)
    starts = sorted(trace.attempts[0].created_at for trace in ending.traces)
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


def test_a_project_gets_its_quota_back() -> None:
    """Borrowers run for half an hour at least, save a checkpoint, and go on later."""
    quota = ProjectPolicy(quota_gpus=2 * WITHOUT_GPU)
    saves = CheckpointPolicy(path="ckpt", every=timedelta(seconds=60))
    jobs = [
        SimSubmission(task=task(9000, name=f"a{n}", project="a", checkpoint=saves))
        for n in range(2)
    ]
    jobs.append(SimSubmission(task=task(1000, name="b0", project="b"), at_s=100))
    ending = run_scenario(
        offers=(FREE,), submissions=tuple(jobs), policies=(BoundPolicy("b", quota),)
    )
    one, other, lender = ending.traces
    assert all(trace.job.phase is JobPhase.DONE for trace in ending.traces)
    assert sorted(len(trace.attempts) for trace in (one, other)) == [1, 2]
    (moved,) = (trace for trace in (one, other) if len(trace.attempts) == 2)
    first, second = moved.attempts
    assert first.running_at is not None
    assert first.finished_at is not None
    assert first.finished_at - first.running_at >= timedelta(minutes=30)
    (reclaimed,) = (event.text for event in moved.events if event.kind == "reclaimed")
    assert reclaimed == "gives its nodes back, because project b gets its quota back"
    assert lender.attempts[0].created_at < second.created_at


TWO_GPUS = tuple(
    make_offer(
        f"fake/r/{name}",
        1_000_000,
        vcpus=8,
        memory_mib=32768,
        accelerator=name,
        accelerator_count=1,
        accelerator_memory_mib=81920,
    )
    for name in ("H100", "A100")
)


def test_a_quota_of_one_accelerator_comes_back_when_a_limit_of_all_is_reached() -> None:
    """The limit of the installation keeps the lender waiting, not the capacity. Jobs that hold
    another accelerator keep it, and the reason says who has borrowed the quota."""

    def on(name: str, run_s: float, project: str, accelerator: str) -> SimSubmission:
        need = ResourceSpec(accelerators=(AcceleratorNeed(name=accelerator),))
        saves = CheckpointPolicy(path="ckpt", every=timedelta(seconds=60))
        what = task(run_s, name=name, project=project, resources=need, checkpoint=saves)
        return SimSubmission(task=what, at_s=100 if project == "b" else 0)

    jobs = (
        on("a0", 9000, "a", "A100"),
        on("a1", 9000, "a", "H100"),
        on("a2", 9000, "a", "H100"),
        on("b0", 1000, "b", "H100"),
    )
    policies = (
        BoundPolicy("", ProjectPolicy(max_accelerators={"H100": 2.0})),
        BoundPolicy("b", ProjectPolicy(quota_accelerators={"H100": 1.0})),
    )
    ending = run_scenario(offers=TWO_GPUS, submissions=jobs, policies=policies)
    assert all(trace.job.phase is JobPhase.DONE for trace in ending.traces)
    kept, *others, lender = ending.traces
    assert len(kept.attempts) == 1
    (moved,) = (trace for trace in others if len(trace.attempts) == 2)
    first, second = moved.attempts
    assert first.running_at is not None
    assert first.finished_at is not None
    assert first.finished_at - first.running_at >= timedelta(minutes=30)
    assert lender.attempts[0].created_at < second.created_at


def test_a_job_whose_nodes_are_given_back_moves_only_where_limits_allow() -> None:
    """Its next nodes count beside the nodes that it leaves."""
    saves = CheckpointPolicy(path="ckpt", every=timedelta(seconds=60))

    def on(at_s: float, run_s: float, project: str, *names: str) -> SimSubmission:
        needs = ResourceSpec(accelerators=tuple(AcceleratorNeed(name=each) for each in names))
        what = task(run_s, name=project, project=project, resources=needs, checkpoint=saves)
        return SimSubmission(task=what, at_s=at_s)

    ending = run_scenario(
        offers=TWO_GPUS,
        submissions=(
            on(0, 9000, "a", "A100"),
            on(50, 9000, "b", "H100", "A100"),
            on(100, 1000, "c", "H100"),
        ),
        policies=(
            BoundPolicy("", ProjectPolicy(max_accelerators={"A100": 1.0, "H100": 1.0})),
            BoundPolicy("c", ProjectPolicy(quota_accelerators={"H100": 1.0})),
        ),
    )
    assert all(trace.job.phase is JobPhase.DONE for trace in ending.traces)
    held, moved, lender = (trace.attempts for trace in ending.traces)
    assert (len(held), len(moved), len(lender)) == (1, 2, 1)
    assert lender[0].ended_at is not None
    assert lender[0].created_at < lender[0].ended_at <= moved[1].created_at


def test_a_later_job_gets_its_quota_back_while_an_earlier_one_cannot() -> None:
    """No project has borrowed the accelerator that the first waiting job needs."""
    sold = replace(
        CHEAP,
        instance_type="H100",
        accelerator="H100",
        accelerator_count=1,
        accelerator_memory_mib=81920,
        capacity=1,
    )
    need = ResourceSpec(accelerators=(AcceleratorNeed(name="H100"),))
    saves = CheckpointPolicy(path="ckpt", every=timedelta(seconds=60))
    jobs = [task(9000, name=f"a{n}", project="a", checkpoint=saves) for n in range(2)]
    jobs.append(task(9000, name="d", project="d", resources=need, checkpoint=saves))
    waiting = (
        SimSubmission(task=task(100, name="b", project="b", resources=need), at_s=50),
        SimSubmission(task=task(100, name="c", project="c"), at_s=100),
    )
    ending = run_scenario(
        offers=(FREE, sold),
        submissions=(*(SimSubmission(task=each) for each in jobs), *waiting),
        policies=tuple(BoundPolicy(name, ProjectPolicy(quota_gpus=1)) for name in "bcd"),
    )
    traces = {trace.job.name: trace for trace in ending.traces}
    assert all(trace.job.phase is JobPhase.DONE for trace in ending.traces)
    assert [len(traces[name].attempts) for name in "bcd"] == [1, 1, 1]
    assert sorted(len(traces[name].attempts) for name in ("a0", "a1")) == [1, 2]
    starts = {name: traces[name].attempts[0].created_at - START for name in "bc"}
    assert starts["c"] < timedelta(hours=1) < starts["b"]


def test_the_reconcilers_of_capabilities_take_part() -> None:
    forget_faults()
    run_scenario(task(100))
    assert list_faults() == []


def array(run_s: float, count: int, **changes: object) -> SimSubmission:
    return SimSubmission(task=task(run_s, array=(IndexRange(0, count - 1),), **changes))


def most_at_once(traces: Sequence[JobTrace]) -> int:
    """The number of jobs that held nodes at the same time."""
    spans = [(each.created_at, each.ended_at) for trace in traces for each in trace.attempts]
    return max(
        sum(begin <= at and (end is None or at < end) for begin, end in spans) for at, _ in spans
    )


def test_at_most_parallel_jobs_of_an_array_run_and_others_are_not_kept_waiting() -> None:
    other = SimSubmission(task=task(100, name="other"), at_s=1)
    ending = run_scenario(submissions=(array(500, 20, name="a", parallel=3), other))
    members = [trace for trace in ending.traces if trace.job.array_id]
    assert len(members) == 20
    assert most_at_once(members) == 3
    assert {trace.job.phase for trace in ending.traces} == {JobPhase.DONE}
    assert started(ending).index("other") <= 3
    assert [name for name in started(ending) if name != "other"][:4] == ["a.0", "a.1", "a.2", "a.3"]


def test_a_stop_and_a_retry_apply_to_all_jobs_of_an_array() -> None:
    stop = UserIntervention(action=UserAction.STOP, job=0, at_s=600)
    submissions = (array(500, 6, name="a", parallel=2),)
    ending = run_scenario(submissions=submissions, interventions=(stop,))
    phases = [trace.job.phase for trace in ending.traces]
    assert phases == [JobPhase.DONE] * 2 + [JobPhase.STOPPED] * 4
    retry = UserIntervention(action=UserAction.RETRY, job=0, at_s=900)
    ending = run_scenario(submissions=submissions, interventions=(stop, retry))
    assert {trace.job.phase for trace in ending.traces} == {JobPhase.DONE}
    assert most_at_once(ending.traces) == 2


def test_the_server_may_die_during_an_array() -> None:
    """No job is lost, and none runs twice, also while all are stopped and retried."""
    submissions = (array(100, 4, name="a", parallel=2),)
    stop = UserIntervention(action=UserAction.STOP, job=0, at_s=150)
    retry = UserIntervention(action=UserAction.RETRY, job=0, at_s=400)
    calls = run_scenario(submissions=submissions, interventions=(stop, retry)).calls
    for call in range(1, calls + 1, 7):
        when = CrashMoment.BEFORE if call % 2 else CrashMoment.AFTER
        ending = run_scenario(
            submissions=submissions,
            interventions=(stop, retry),
            crashes=(ServerCrash(call=call, when=when, down_s=20),),
        )
        assert [trace.job.member for trace in ending.traces] == [0, 1, 2, 3]
        assert {trace.job.phase for trace in ending.traces} == {JobPhase.DONE}
        assert most_at_once(ending.traces) <= 2


def started(ending: ScenarioResult) -> list[str]:
    """Names of the jobs in the order of their starts."""
    starts = sorted((trace.attempts[0].created_at, trace.job.name) for trace in ending.traces)
    return [name for _, name in starts]


def test_a_job_that_fits_elsewhere_is_not_held_up() -> None:
    gpu = AcceleratorNeed(name="H100", count_min=1)
    sold = replace(
        DEAR, accelerator="H100", accelerator_count=1, accelerator_memory_mib=81920, capacity=0
    )
    first = SimSubmission(task=task(name="big", resources=ResourceSpec(accelerators=(gpu,))))
    stop = UserIntervention(action=UserAction.STOP, job=0, at_s=5000)
    ending = run_scenario(
        offers=(sold, CHEAP),
        submissions=(first, *(SimSubmission(task=task(name=f"s{n}")) for n in range(20))),
        interventions=(stop,),
    )
    assert ending.traces[0].job.phase is JobPhase.STOPPED
    assert all(trace.job.phase is JobPhase.DONE for trace in ending.traces[1:])
    assert all(
        (trace.job.ended_at or START) - START < timedelta(seconds=1000)
        for trace in ending.traces[1:]
    )


def test_an_overloaded_cloud_is_waited_out() -> None:
    trace = only(
        run_scenario(task(), storms=(TimeSpan(at_s=0, for_s=400), TimeSpan(at_s=500, for_s=400)))
    )
    assert trace.job.phase is JobPhase.DONE


def test_a_retry_after_a_failure_is_a_new_try() -> None:
    env = {"FAKE_EXIT_CODE": "1", "FAKE_EXIT_AFTER_S": "10"}
    retry = UserIntervention(action=UserAction.RETRY, job=0, at_s=1000)
    trace = only(run_scenario(task(env=env), interventions=(retry,)))
    assert outcomes(trace) == [AttemptOutcome.EXIT, AttemptOutcome.EXIT]


BUSY = (
    FaultScript(reply=CallOutcome.LOST, hidden_s=50),
    FaultScript(preempted_after_s=100),
    FaultScript(lost_rank=0, lost_after_s=100),
)


def crash_points() -> int:
    """How many calls to the outside the scenario below makes without a crash."""
    ending = play(
        SimScenario(
            submissions=(SimSubmission(task=task(200)),),
            script=CloudScript(offers=(CHEAP, DEAR), launches=BUSY),
        )
    )
    return ending.calls


@pytest.mark.parametrize("when", list(CrashMoment))
def test_the_server_may_die_at_every_single_step(when: CrashMoment) -> None:
    """Before and after every call to the store and the cloud, one after the other; and at all of
    them at once.
    """
    script = CloudScript(offers=(CHEAP, DEAR), launches=BUSY)
    for call in range(1, crash_points() + 1):
        for down_s in (0.0, 1000.0):
            crash = ServerCrash(call=call, when=when, down_s=down_s)
            ending = play(
                SimScenario(
                    submissions=(SimSubmission(task=task(200)),), script=script, crashes=(crash,)
                )
            )
            check_all(ending)
            assert only(ending).job.phase is JobPhase.DONE, tell(only(ending))
    crashes = tuple(ServerCrash(call=call, when=when, down_s=7) for call in range(3, 200, 3))
    check_all(
        play(
            SimScenario(
                submissions=(SimSubmission(task=task(200)),), script=script, crashes=crashes
            )
        )
    )


REQUESTS = (ResourceSpec(instance="dear", disk_gib=10), ResourceSpec(instance="cheap"))


def choice(*wishes: ResourceSpec, ordered: bool) -> ResourceSpec:
    return replace(wishes[0], any_of=wishes, ordered=ordered)


def test_of_several_wishes_the_cheapest_is_taken_unless_they_have_an_order() -> None:
    trace = only(run_scenario(task(resources=choice(*REQUESTS, ordered=False))))
    assert pool(trace) == ["cheap"]
    assert trace.job.task.resources == replace(REQUESTS[1], any_of=REQUESTS)
    assert pool(only(run_scenario(task(resources=choice(*REQUESTS, ordered=True))))) == ["dear"]


def test_of_several_wishes_the_one_that_finishes_at_the_least_cost_is_taken() -> None:
    fast = replace(DEAR, vcpus=16, rate=HourlyRate(1_500_000))
    work = Workload(samples=36000.0, rates={"cpu:8": 10.0, "cpu:16": 20.0})
    wishes = choice(ResourceSpec(instance="cheap"), ResourceSpec(instance="dear"), ordered=False)
    assert pool(only(run_scenario(task(resources=wishes, work=work), offers=(CHEAP, fast)))) == [
        "dear"
    ]


def test_a_wish_that_cannot_be_had_makes_room_for_the_next_one_and_comes_again() -> None:
    none, taken = FaultScript(reply=CallOutcome.NO_CAPACITY), FaultScript(preempted_after_s=300)
    trace = only(
        run_scenario(task(resources=choice(*REQUESTS, ordered=True)), launches=(none, taken))
    )
    assert pool(trace) == ["dear", "cheap", "dear"]
    trace = only(run_scenario(task(resources=choice(*REQUESTS, ordered=True)), offers=(CHEAP,)))
    assert pool(trace) == ["cheap"]


def test_a_job_none_of_whose_wishes_can_ever_be_had_says_so_of_each() -> None:
    trace = only(
        run_scenario(
            task(
                resources=choice(
                    ResourceSpec(instance="a"), ResourceSpec(cpus_min=99), ordered=True
                )
            )
        )
    )
    assert trace.job.phase is JobPhase.FAILED
    assert "; or No offer: " in trace.job.reason


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("place", ["drill", "notice"])
def test_work_that_ends_with_0_on_a_notice_resumes(ranks: int, place: str) -> None:
    env = {"FAKE_SIGNAL_CODE": "0"}
    work = task(600, checkpoint=CheckpointPolicy(path="c"), env=env, nodes=ranks)
    drill = UserIntervention(action=UserAction.DRILL, job=0, at_s=300, notice_s=30)
    fault_script = FaultScript(preempted_after_s=300, notice_s=30)
    trace = only(
        run_scenario(work, interventions=(drill,))
        if place == "drill"
        else run_scenario(work, launches=(fault_script,))
    )
    assert outcomes(trace) == [AttemptOutcome.PREEMPTED, AttemptOutcome.SUCCEEDED]
    assert trace.job.phase is JobPhase.DONE
    assert trace.attempts[0].exit_code == 0


def test_complete_work_does_not_run_again() -> None:
    env = {"FAKE_SIGNAL_CODE": "0", "FAKE_COMPLETE": "1"}
    drill = UserIntervention(action=UserAction.DRILL, job=0, at_s=300, notice_s=30)
    trace = only(run_scenario(task(600, env=env), offers=(FREE,), interventions=(drill,)))
    assert outcomes(trace) == [AttemptOutcome.SUCCEEDED]
    assert (trace.job.phase, trace.job.exit_code) == (JobPhase.DONE, 0)


def test_work_that_ends_with_0_on_a_stop_was_stopped() -> None:
    stop = UserIntervention(action=UserAction.STOP, job=0, at_s=300)
    env = {"FAKE_SIGNAL_CODE": "0"}
    trace = only(run_scenario(task(600, env=env), offers=(FREE,), interventions=(stop,)))
    assert outcomes(trace) == [AttemptOutcome.STOPPED]
    assert trace.job.phase is JobPhase.STOPPED
