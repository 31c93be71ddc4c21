"""Who gets a machine, what a task takes from it, and what it cannot run."""

import asyncio
from datetime import timedelta
from functools import partial
from typing import cast

import pytest
from tests.contract.store_suite import NOW, make_attempt, make_job, make_offer

from cavvy.control.decide.warm_pool import (
    MachineIsBusy,
    MachineIsFree,
    MachineIsReady,
    MachineIsUnfit,
    complete_task,
    decide_turn_on_machine,
    describe_hardware,
    extend_machine,
    find_gang,
    is_leaving,
    keeps_until,
    make_start,
    object_to_task,
    record_holder,
    state_of,
)
from cavvy.control.warm_pool import MachinePool, WarmPool
from cavvy.domain import jobs
from cavvy.domain.machines import USUAL_KEEP, NamedMachine
from cavvy.domain.policies import BoundPolicy, ProjectPolicy, name_key
from cavvy.domain.tasks import (
    AcceleratorNeed,
    JobLimits,
    ResourceSpec,
    TaskSpec,
    Volume,
    VolumeKind,
)
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.store.open import MemoryStore

GPU = ResourceSpec(accelerators=(AcceleratorNeed(name="A10"),))
REQUEST = TaskSpec(
    name="first", run="x", machine="dev", resources=GPU, keep=timedelta(hours=1), image="cuda:12"
)
MACHINE = NamedMachine(project="p", name="dev", task=REQUEST, job_id="h")
HOLDER = make_job("h", name="holder", task=REQUEST, phase=jobs.JobPhase.RUNNING, attempt=1)
OFFER = replace(make_offer(), accelerator="A10", accelerator_count=1, vcpus=8, memory_mib=32768)
GANG = replace(make_attempt(HOLDER), offer=OFFER, phase=jobs.AttemptPhase.RUNNING)
KEPT = replace(GANG, phase=jobs.AttemptPhase.KEPT, kept_until=NOW + timedelta(minutes=5))
JOB = make_job("j", task=replace(REQUEST, name="next"), consented=True)


def test_a_job_gets_a_free_machine_takes_an_idle_one_and_waits_for_a_busy_one() -> None:
    assert isinstance(decide_turn_on_machine(JOB, None, None, None, NOW), MachineIsFree)
    assert isinstance(decide_turn_on_machine(JOB, MACHINE, HOLDER, None, NOW), MachineIsFree)
    assert decide_turn_on_machine(JOB, MACHINE, HOLDER, KEPT, NOW) == MachineIsReady(gang=KEPT)
    busy = decide_turn_on_machine(JOB, MACHINE, HOLDER, GANG, NOW)
    assert busy == MachineIsBusy(reason="machine dev runs job holder")
    late = NOW + timedelta(minutes=6)
    going = decide_turn_on_machine(JOB, MACHINE, HOLDER, KEPT, late)
    assert going == MachineIsBusy(reason="machine dev is being released")


def test_a_job_uses_a_paid_machine_only_if_its_user_has_agreed() -> None:
    """The machine may have been started after the job was submitted, when nothing had a price."""
    machine, job = replace(MACHINE, user="ann", consented=True), replace(JOB, consented=False)

    def is_given(**changes: object) -> bool:
        asks = replace(job, **{"user": "ann", **changes})  # type: ignore[arg-type]
        of = partial(decide_turn_on_machine, asks, machine, HOLDER)
        answers = [of(each, NOW) for each in (KEPT, GANG)]
        if isinstance(answers[0], MachineIsUnfit):
            assert answers[0] == answers[1]  # it does not wait for a machine that it may not use
            assert "to which the user of train has not agreed" in answers[0].reason
        return isinstance(answers[0], MachineIsReady)

    assert is_given()
    assert is_given(user="eve", consented=True)
    assert not is_given(user="eve")
    assert not is_given(ceiling=Money(0))  # of a coding agent, without a question to the user
    assert is_given(ceiling=Money(1))
    free = replace(KEPT, offer=replace(OFFER, rate=HourlyRate(0)))
    asks = replace(job, user="eve", ceiling=Money(0))
    assert decide_turn_on_machine(asks, machine, HOLDER, free, NOW) == MachineIsReady(gang=free)


def test_a_machine_runs_no_image_that_a_later_policy_forbids() -> None:
    key = "-----BEGIN PUBLIC KEY-----\nMCow\n-----END PUBLIC KEY-----\n"
    policies = [BoundPolicy("p", ProjectPolicy(signed_by=(key,)))]
    answer = decide_turn_on_machine(JOB, MACHINE, HOLDER, KEPT, NOW, policies)
    assert isinstance(answer, MachineIsUnfit)
    assert "signed with the key" in answer.reason
    task = replace(REQUEST, image=f"cuda@sha256:{'0' * 64}", image_signers=(name_key(key),))
    job, machine = replace(JOB, task=task), replace(MACHINE, task=task)
    answer = decide_turn_on_machine(job, machine, HOLDER, KEPT, NOW, policies)
    assert answer == MachineIsReady(gang=KEPT)


def test_a_machine_of_a_unix_user_runs_no_job_of_another_user() -> None:
    class Machines(MachinePool):
        async def read(self, project: str, name: str) -> NamedMachine:
            return MACHINE

        async def gang_of(
            self, machine: NamedMachine | None
        ) -> tuple[jobs.JobRecord, jobs.Attempt]:
            offer = replace(OFFER, by_user=True)
            return replace(HOLDER, user="ann"), replace(KEPT, offer=offer)

    def ask(user: str) -> object:
        machines = Machines(MemoryStore(), cast("WarmPool", None))
        job = replace(JOB, user=user)
        return asyncio.run(machines.give_turn(job, NOW, (), lambda offer: "waits for a limit"))

    assert ask("ann") == MachineIsBusy(reason="waits for a limit")
    answer = ask("eve")
    assert isinstance(answer, MachineIsUnfit)
    assert answer.reason == "machine dev runs as the Unix user of ann, and this job is of eve"


def test_a_job_that_waits_behind_a_session_reads_what_to_do() -> None:
    holder = replace(HOLDER, task=replace(REQUEST, session=True))
    answer = decide_turn_on_machine(JOB, MACHINE, holder, GANG, NOW)
    assert isinstance(answer, MachineIsBusy)
    assert "`cavvy exec holder -- COMMAND`" in answer.reason


def test_the_gang_is_the_kept_or_the_current_one_of_the_newest_job() -> None:
    ended = replace(GANG, phase=jobs.AttemptPhase.ENDED)
    standby = replace(GANG, number=2)
    assert find_gang([GANG], None) is None
    assert find_gang([ended], HOLDER) is None
    assert find_gang([ended, standby, GANG], HOLDER) == GANG
    assert find_gang([GANG, replace(KEPT, number=2)], HOLDER) == replace(KEPT, number=2)


def test_a_task_takes_what_it_does_not_state_from_the_machine() -> None:
    bare = TaskSpec(name="next", run="y", machine="dev")
    assert complete_task(bare, None).keep == USUAL_KEEP
    found = complete_task(bare, MACHINE)
    assert (found.resources, found.image, found.keep) == (GPU, "cuda:12", timedelta(hours=1))
    own = complete_task(replace(bare, keep=timedelta(minutes=1), image="other"), MACHINE)
    assert (own.keep, own.image) == (timedelta(minutes=1), "other")


def test_the_login_of_the_machines_image_is_for_that_image_alone() -> None:
    machine = replace(MACHINE, task=replace(REQUEST, image_login="CORP_LOGIN"))
    bare = TaskSpec(name="next", run="y", machine="dev")
    assert complete_task(bare, machine).image_login == "CORP_LOGIN"
    assert complete_task(replace(bare, image="other"), machine).image_login is None


def test_a_longer_keep_time_ends_with_the_budget() -> None:
    limits = JobLimits(budget=Money(10_000_000))
    holder = replace(HOLDER, task=replace(REQUEST, limits=limits))
    gang = replace(KEPT, offer=replace(OFFER, rate=HourlyRate(5_000_000)))
    day = timedelta(hours=24)
    changes = extend_machine(holder, gang, day, Money(8_000_000), NOW)
    [kept], [event] = changes.attempts, changes.events
    assert event.text.startswith(f"the machine is kept until {kept.kept_until:%Y-%m-%d %H:%M:%S}")
    assert event.text.endswith("the job's budget does not suffice for the whole 1d00h")
    assert kept.kept_until is not None
    assert timedelta(minutes=20) < kept.kept_until - NOW < timedelta(minutes=25)
    [free] = extend_machine(HOLDER, gang, day, Money(8_000_000), NOW).attempts
    assert free.kept_until == NOW + day


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"nodes": 2}, "machine dev has 1 node, but the task asks for 2"),
        ({"image": "other"}, "machine dev has a value of `image` that differs from the task's"),
        (
            {"volumes": (Volume(kind=VolumeKind.HOST, source="/a", path="/b"),)},
            "machine dev has a value of `volumes` that differs from the task's",
        ),
        (
            {"resources": ResourceSpec(cpus_min=64)},
            "machine dev has 8 CPUs, you asked for at least 64",
        ),
        (
            {"resources": ResourceSpec(max_rate=HourlyRate(1_000_000))},
            "machine dev costs $3.60/h, your limit is $1.00/h",
        ),
    ],
)
def test_a_machine_objects_with_what_it_has(changes: dict[str, object], reason: str) -> None:
    task = replace(REQUEST, **changes)  # type: ignore[arg-type]
    assert object_to_task(task, MACHINE, GANG) == reason
    answer = decide_turn_on_machine(replace(JOB, task=task), MACHINE, HOLDER, KEPT, NOW)
    assert isinstance(answer, MachineIsUnfit) is bool(reason)


def test_a_machine_on_a_shared_host_has_only_what_it_asked_for() -> None:
    shared = replace(GANG, offer=replace(OFFER, shared=True))
    task = replace(REQUEST, resources=ResourceSpec(cpus_min=4))
    assert object_to_task(task, MACHINE, shared) == (
        "machine dev has 1 CPU, you asked for at least 4"
    )
    assert describe_hardware(MACHINE, shared) == "1 x A10, 1 CPU"
    assert describe_hardware(MACHINE, GANG) == "1 x A10, 8 CPUs"
    alone = replace(MACHINE, task=replace(REQUEST, resources=ResourceSpec(cpus_min=1)))
    assert describe_hardware(alone, None) == "1 CPU"


def test_a_purchase_changes_the_request_and_a_takeover_does_not() -> None:
    other = replace(JOB, task=replace(JOB.task, resources=ResourceSpec()), user="ada")
    taken = record_holder(MACHINE, other, bought_at=None)
    assert (taken.job_id, taken.task, taken.user) == ("j", REQUEST, "ada")
    bought = record_holder(MACHINE, other, bought_at=NOW)
    assert (bought.task.resources, bought.bought_at) == (ResourceSpec(), NOW)
    assert bought.task.keep == REQUEST.keep


def test_the_task_that_starts_a_machine_has_its_setup_and_no_work() -> None:
    kept = replace(REQUEST, setup="make", secrets=("A",), tags={"team": "vision"})
    request = replace(
        kept, priority=5, encrypt=True, session=True, limits=JobLimits(budget=Money(1)), name="x"
    )
    found = make_start(replace(MACHINE, task=request))
    assert found == replace(kept, name="dev-start", run="true", project="p")


@pytest.mark.parametrize("leaving", [False, True])
def test_states_are_those_that_users_see(leaving: bool) -> None:
    starting = replace(HOLDER, phase=jobs.JobPhase.STARTING)
    assert state_of(None, HOLDER, leaving=leaving) == ("stopping" if leaving else "stopped")
    assert state_of(KEPT, HOLDER, leaving=leaving) == "idle"
    assert state_of(GANG, HOLDER, leaving=leaving) == "busy"
    assert state_of(GANG, starting, leaving=leaving) == "starting"


def test_a_machine_is_not_stopped_while_its_nodes_are_released() -> None:
    ending, ended = (
        replace(GANG, phase=phase) for phase in (jobs.AttemptPhase.ENDING, jobs.AttemptPhase.ENDED)
    )
    assert find_gang([ended, ending], HOLDER) is None
    assert is_leaving([ended, ending])
    assert not is_leaving([ended])


@pytest.mark.parametrize(
    ("outcome", "cause", "kept"),
    [
        (jobs.AttemptOutcome.SUCCEEDED, None, True),
        (jobs.AttemptOutcome.EXIT, None, True),
        (jobs.AttemptOutcome.SETUP, None, True),
        (jobs.AttemptOutcome.STOPPED, jobs.StopCause.USER, True),
        (jobs.AttemptOutcome.LIMIT, jobs.StopCause.DURATION, True),
        (jobs.AttemptOutcome.LIMIT, jobs.StopCause.BUDGET, False),
        (jobs.AttemptOutcome.LIMIT, None, False),
        (jobs.AttemptOutcome.PREEMPTED, None, False),
        (jobs.AttemptOutcome.NODE, None, False),
    ],
)
def test_a_machine_outlives_every_end_that_leaves_its_nodes_intact(
    outcome: jobs.AttemptOutcome, cause: jobs.StopCause | None, kept: bool
) -> None:
    job = replace(HOLDER, stop_cause=cause, stop_reason="x" if cause else None)
    told = jobs.AttemptOutcome.STOPPED if outcome is jobs.AttemptOutcome.LIMIT else outcome
    node = jobs.Node(
        attempt_id=GANG.id, project="p", rank=0, phase=jobs.NodePhase.EXITED, exit_outcome=told
    )
    until = keeps_until(job, GANG, [node], (outcome, 1), None, NOW)
    assert (until is not None) is kept
