"""A job that starts early on a shared host never delays a job that waits before it."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.scheduler.unit.test_scheduler_queue import (
    ALONE,
    CPU,
    GROUP,
    HOST,
    farm,
    held,
    job,
    placed,
    plan_jobs,
    waiting_job,
)

from cavvy.domain.allocations import Allocation
from cavvy.domain.values import replace
from cavvy.scheduler.queue import JOBS, JobPlacement, JobScheduler, QueueCapacity, WaitingJob

EIGHT = replace(HOST, cpus=8, devices=())
NAMES = ("a", "b")
DEVICES = ("0", "1")


@dataclass(frozen=True)
class Run:
    """A job, when it is submitted, and how long it runs."""

    waiting: WaitingJob
    length: int
    at: int = 0


def run_all(runs: Sequence[Run], returns: int = 0) -> dict[str, tuple[int, tuple[str, ...]]]:
    """When each job starts, and on which hosts. The host farm/a is ready from the time `returns`.

    All runs are in the queue's order.
    """
    starts: dict[str, tuple[int, tuple[str, ...]]] = {}
    running: list[tuple[int, tuple[Allocation, ...]]] = []
    times = {returns, *(run.at for run in runs)}
    awaited: set[str] = set()
    while times:
        now = min(times)
        times.remove(now)
        running = [(end, mine) for end, mine in running if end > now]
        hosts = tuple(replace(host, devices=DEVICES) for host in farm(*NAMES, a=now >= returns))
        scheduler = JobScheduler(
            QueueCapacity(
                hosts=hosts,
                allocations=[each for _, mine in running for each in mine],
                awaited=awaited,
            )
        )
        awaited = scheduler.blocked
        for run in runs:
            name = run.waiting.job.id
            if run.at > now or name in starts:
                continue
            decision = scheduler.decide(run.waiting)
            if isinstance(decision, JobPlacement):
                starts[name] = (now, tuple(each.host for each in decision.allocations))
                running.append((now + run.length, decision.allocations))
                times.add(now + run.length)
    return starts


@st.composite
def make_run(draw: st.DrawFn, cpus: st.SearchStrategy[float]) -> Run:
    nodes = draw(st.sampled_from([1, 1, 1, 2]))
    gpus = draw(st.sampled_from([0, 0, 0, 1, 2]))
    offer = replace(GROUP, accelerator_count=gpus, instance_type="H100-80GB" if gpus else "cpu")
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    offers = [offer] if nodes > 1 else [replace(offer, zone=name) for name in names]
    memory = draw(st.sampled_from([None, None, None, 1000, 4096, 5000]))
    wanted = job("", nodes=nodes, cpus=draw(cpus), memory=memory)
    length, at = draw(st.integers(1, 9)), draw(st.sampled_from([0, 0, 0, 1, 3]))
    return Run(waiting_job(wanted, *offers), length, at)


def name_all(runs: Sequence[Run]) -> list[Run]:
    """The runs with the names of their places in the queue."""
    return [
        replace(
            run, waiting=waiting_job(replace(run.waiting.job, id=f"{place}"), *run.waiting.offers)
        )
        for place, run in enumerate(runs)
    ]


@given(
    st.lists(make_run(st.sampled_from([1.0, 2.0, 3.0, 4.0])), min_size=4, max_size=9),
    st.lists(make_run(st.sampled_from([0.5, 1.0, 2.0])), min_size=1, max_size=3),
    st.sampled_from([0, 0, 2, 4]),
)
def test_jobs_start_as_without_the_jobs_behind_them(
    earlier: list[Run], later: list[Run], returns: int
) -> None:
    """Also if running and waiting jobs end in any order, and if a host returns."""
    long = [replace(run, length=9 * run.length, at=3) for run in later]
    runs = name_all([*sorted(earlier, key=lambda run: run.at), *long])
    alone = run_all(runs[: len(earlier)], returns)
    beside = run_all(runs, returns)
    assert {name: beside.get(name) for name in alone} == alone


def test_no_job_starts_that_a_job_could_wait_for_once_an_earlier_one_has_ended() -> None:
    """The second job can start only once the first one has ended, and then needs the whole host."""
    capacity = QueueCapacity(hosts=(EIGHT,), allocations=[held("running", 6)])
    waits = [waiting_job(job("1", cpus=4), CPU), waiting_job(job("2", cpus=8), CPU)]
    assert placed(plan_jobs([*waits, waiting_job(job("3", cpus=2), CPU)], capacity)) == []


def test_no_job_takes_what_a_group_may_use_once_another_host_returns() -> None:
    busy = [held("running", 4)]
    capacity = QueueCapacity(
        hosts=farm("a", "b", "c", "d", a=False),
        allocations=[replace(each, host=f"farm/{name}") for each in busy for name in ("c", "d")],
    )
    waits = waiting_job(job("1", nodes=2, cpus=4), GROUP)
    small = waiting_job(job("2"), replace(ALONE, zone="b"))
    assert placed(plan_jobs([waits, small], capacity)) == []


def test_gangs_on_other_hosts_do_not_count() -> None:
    hosts = (EIGHT, replace(EIGHT, name="ssh/other", cpus=64))
    others = [replace(held(f"other-{place}", 1), host="ssh/other") for place in range(60)]
    capacity = QueueCapacity(hosts=hosts, allocations=[held("running", 6), *others])
    jobs = [waiting_job(job("1", cpus=4), CPU), waiting_job(job("2"), CPU)]
    assert placed(plan_jobs(jobs, capacity)) == ["2"]


@pytest.mark.parametrize(
    ("waits", "gangs", "starts"), [(8, 1, True), (9, 1, False), (1, 47, True), (1, 48, False)]
)
def test_a_job_waits_if_too_many_gangs_and_jobs_would_have_to_be_compared(
    waits: int, gangs: int, starts: bool
) -> None:
    host = replace(EIGHT, cpus=64)
    running = [held(f"running-{place}", 0 if place else 60) for place in range(gangs)]
    jobs = [waiting_job(job(f"{place}", cpus=20), CPU) for place in range(waits)]
    small = waiting_job(job("small", cpus=1), CPU)
    decisions = plan_jobs([*jobs, small], QueueCapacity(hosts=(host,), allocations=running))
    assert placed(decisions) == (["small"] if starts else [])


@pytest.mark.parametrize(
    ("cpus", "busy", "starts"),
    [(131.072, 100.001, True), (131.073, 100.001, False), (131.072, 100.0005, False)],
)
def test_a_job_waits_if_the_amounts_have_too_small_a_unit(
    cpus: float, busy: float, starts: bool
) -> None:
    """At most 131,072 units of a thousandth of a CPU, or of more, are compared."""
    capacity = QueueCapacity(hosts=(replace(EIGHT, cpus=cpus),), allocations=[held("busy", busy)])
    jobs = [waiting_job(job("1", cpus=60), CPU), waiting_job(job("2", cpus=1), CPU)]
    assert placed(plan_jobs(jobs, capacity)) == (["2"] if starts else [])


def test_a_job_with_many_offers_uses_one_check() -> None:
    names = tuple(f"{place:02}" for place in range(20))
    busy = [held("running", 6), *(replace(held("running", 1), host=f"farm/{n}") for n in names)]
    capacity = QueueCapacity(hosts=(EIGHT, *farm(*names)), allocations=busy)
    offers = [replace(ALONE, zone=name) for name in names]
    jobs = [
        waiting_job(job("1", cpus=4), *offers),
        waiting_job(job("2", cpus=3), *offers),  # fits on each host, and would delay the first job
        waiting_job(job("3", cpus=4), CPU),
        waiting_job(job("4"), CPU),
    ]
    assert placed(plan_jobs(jobs, capacity)) == ["4"]


def test_the_question_whether_a_job_can_start_changes_nothing() -> None:
    scheduler = JobScheduler(QueueCapacity(hosts=(EIGHT,), allocations=[held("running", 6)]))
    scheduler.decide(waiting_job(job("1", cpus=4), CPU))
    small = waiting_job(job("2"), CPU)
    assert all(scheduler.can_start(small) for _ in range(JOBS + 1))
    assert placed([scheduler.decide(small)]) == ["2"]


def test_a_small_job_leaves_the_disk_to_a_job_that_waits_for_it() -> None:
    capacity = QueueCapacity(
        hosts=(replace(EIGHT, disk_gib=100),), allocations=[replace(held("r", 1), disk_gib=60)]
    )

    def need(name: str, disk_gib: int) -> WaitingJob:
        record = job(name, cpus=1)
        resources = replace(record.task.resources, disk_gib=disk_gib)
        return waiting_job(replace(record, task=replace(record.task, resources=resources)), CPU)

    assert placed(plan_jobs([need("1", 80), need("2", 30)], capacity)) == []
    assert placed(plan_jobs([need("1", 80), need("2", 20)], capacity)) == ["2"]
