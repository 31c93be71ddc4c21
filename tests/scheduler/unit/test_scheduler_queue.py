"""Whose turn it is: order, strictness at each place, and what is held of a shared host."""

from collections.abc import Iterable
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.jobs import JobRecord
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import AcceleratorNeed, ResourceSpec, TaskSpec, TopologyNeed
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.scheduler import queue
from cavvy.scheduler.offer_lines import count_left, pool_of, take
from cavvy.scheduler.packing import AllocationOwner, allocate_on, allocate_one, host_of
from cavvy.scheduler.queue import JobPlacement, JobScheduler, JobWait, QueueCapacity, WaitingJob

T0 = datetime(2030, 1, 1, tzinfo=UTC)
HOST = Host(name="local/me", cpus=4, memory_mib=8192, devices=("a", "b", "c", "d"))
CPU = Offer(
    provider="local", region="me", instance_type="cpu", vcpus=4, rate=HourlyRate(0), shared=True
)
GPU = replace(CPU, instance_type="H100-80GB", accelerator="H100", accelerator_count=1)
CLOUD = Offer(provider="cloud", region="r", instance_type="t", rate=HourlyRate(5), capacity=1)
ANY = AllocationOwner(gang="g", project="p")
A_ALLOCATION = Allocation(host="local/me", gang="other", rank=0, project="p", cpus=1, memory_mib=0)


def job(
    name: str,
    *,
    nodes: int = 1,
    cpus: float | None = None,
    memory: int | None = None,
    priority: int = 0,
) -> JobRecord:
    need = ResourceSpec(cpus_min=cpus, memory_min_mib=memory)
    task = TaskSpec(name=name, run="x", nodes=nodes, resources=need, priority=priority)
    return JobRecord(id=name, project="p", name=name, task=task, submitted_at=T0, since=T0)


def waiting_job(wanting: JobRecord, *offers: Offer) -> WaitingJob:
    return WaitingJob(job=wanting, gang=f"gang-{wanting.id}", offers=offers)


def plan_jobs(
    waiting: Iterable[WaitingJob], capacity: QueueCapacity
) -> list[JobPlacement | JobWait]:
    scheduler = JobScheduler(capacity)
    return [scheduler.decide(waiting_job) for waiting_job in waiting]


def placed(decisions: list[JobPlacement | JobWait]) -> list[str]:
    return [decision.job.id for decision in decisions if isinstance(decision, JobPlacement)]


def test_what_had_no_room_is_not_looked_for_again_until_something_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[str] = []

    def count(offer: Offer, used: Any) -> int | None:
        looks.append(offer.key)
        return count_left(offer, used)

    monkeypatch.setattr(queue, "count_left", count)
    offers = tuple(replace(CLOUD, zone=f"z{number}") for number in range(10))
    scheduler = JobScheduler(QueueCapacity())
    jobs = [WaitingJob(job=job(f"j{n}", nodes=1), gang=f"g{n}", offers=offers) for n in range(500)]
    decisions = [scheduler.decide(each) for each in jobs]
    assert len(placed(decisions)) == 10
    waits = [each.reason for each in decisions if isinstance(each, JobWait)]
    assert set(waits[1:]) == {waits[1]}
    assert len(looks) == sum(range(1, 11)) + 10, "the last 489 need what the 11th has not found"
    other = WaitingJob(job=job("other"), gang="go", offers=(*offers, replace(CLOUD, zone="free")))
    assert isinstance(scheduler.decide(other), JobPlacement)
    first = decisions[0]
    assert isinstance(first, JobPlacement)
    before = len(looks)
    scheduler.give_back([first])
    scheduler.decide(jobs[-1])
    assert len(looks) > before, "there may be room again"


def test_a_task_that_does_not_say_holds_one_cpu() -> None:
    allocation = allocate_one(job("j").task, CPU, HOST, (), ANY, 0)
    assert allocation == Allocation(
        host="local/me", gang="g", rank=0, project="p", cpus=1, memory_mib=0
    )
    small = allocate_one(job("j").task, CPU, replace(HOST, cpus=0.5), (), ANY, 0)
    assert small is not None
    assert small.cpus == 0.5


def test_each_rank_holds_its_own_devices() -> None:
    allocations = allocate_on(
        job("j", nodes=2).task, replace(GPU, accelerator_count=2), HOST, (), ANY
    )
    assert allocations is not None
    assert [allocation.devices for allocation in allocations] == [("a", "b"), ("c", "d")]
    assert (
        allocate_on(job("j", nodes=3).task, replace(GPU, accelerator_count=2), HOST, (), ANY)
        is None
    )


def test_only_devices_of_the_offers_kind_are_taken() -> None:
    mixed = replace(HOST, kinds=("A100-40GB", "H100-80GB", "A100-40GB", "H100-80GB"))
    allocation = allocate_one(job("j").task, replace(GPU, accelerator_count=2), mixed, (), ANY, 0)
    assert allocation is not None
    assert allocation.devices == ("b", "d")
    assert allocate_one(job("j").task, replace(GPU, accelerator_count=3), mixed, (), ANY, 0) is None


def test_memory_and_cpus_are_counted() -> None:
    assert allocate_one(job("j", memory=8193).task, CPU, HOST, (), ANY, 0) is None
    assert allocate_one(job("j", cpus=4.5).task, CPU, HOST, (), ANY, 0) is None
    each = replace(
        job("j", cpus=2).task, resources=ResourceSpec(cpus_min=2, memory_per_cpu_mib=4096)
    )
    allocation = allocate_one(each, CPU, HOST, (), ANY, 0)
    assert allocation is not None
    assert allocation.memory_mib == 8192
    assert allocate_one(each, CPU, replace(HOST, memory_mib=8191), (), ANY, 0) is None
    other = Allocation(host=HOST.name, gang="o", rank=0, project="p", cpus=3.5, memory_mib=0)
    assert allocate_one(job("j", cpus=0.5).task, CPU, HOST, (other,), ANY, 0) is not None
    assert allocate_one(job("j", cpus=0.6).task, CPU, HOST, (other,), ANY, 0) is None


def test_the_host_of_an_offer() -> None:
    assert host_of(CPU, (HOST,)) is HOST
    assert host_of(replace(CPU, zone="me", region="x"), (HOST,)) is HOST
    assert host_of(CLOUD, (HOST,)) is None


def test_a_large_job_is_not_starved_by_small_ones() -> None:
    busy = Allocation(host=HOST.name, gang="o", rank=0, project="p", cpus=2, memory_mib=0)
    decisions = plan_jobs(
        [
            waiting_job(job("1-large", cpus=4), CPU),
            waiting_job(job("2-small"), CPU),
            waiting_job(job("3-small"), CPU),
        ],
        QueueCapacity(hosts=(HOST,), allocations=(busy,)),
    )
    assert placed(decisions) == []
    assert [decision.reason for decision in decisions if isinstance(decision, JobWait)] == [
        "waits for free capacity at local/me",
        "waits behind earlier jobs for local/me",
        "waits behind earlier jobs for local/me",
    ]


def test_a_job_that_fits_only_silent_hosts_says_why_and_what_to_do() -> None:
    silent = replace(HOST, ready=False, problem="Host key verification failed")
    (decision,) = plan_jobs([waiting_job(job("1"), CPU)], QueueCapacity(hosts=(silent,)))
    assert isinstance(decision, JobWait)
    assert decision.unusable
    assert decision.reason == (
        "waits because local/me cannot be used: Host key verification failed; "
        "`cavvy check local` shows more"
    )
    assert decision.behind == ("local/me",)
    assert placed(plan_jobs([waiting_job(job("1"), CPU)], QueueCapacity(hosts=(HOST,)))) == ["1"]


def test_a_job_that_also_fits_elsewhere_waits_only_for_what_can_be_used() -> None:
    silent = replace(HOST, name="local/other", ready=False, problem="no route to host")
    offers = (replace(CPU, region="other"), CPU)
    busy = replace(A_ALLOCATION, cpus=4)
    capacity = QueueCapacity(hosts=(silent, HOST), allocations=(busy,))
    (decision,) = plan_jobs([waiting_job(job("1"), *offers)], capacity)
    assert isinstance(decision, JobWait)
    assert (decision.reason, decision.unusable) == ("waits for free capacity at local/me", False)


def test_a_gang_that_needs_every_host_of_its_group_names_the_silent_ones() -> None:
    up = replace(HOST, name="ssh/a", group="ssh/lab")
    down = replace(up, name="ssh/b", ready=False, problem="no answer")
    group = replace(CPU, provider="ssh", region="lab", capacity=1)
    capacity = QueueCapacity(hosts=(up, down))
    (decision,) = plan_jobs([waiting_job(job("1", nodes=2), group)], capacity)
    assert isinstance(decision, JobWait)
    assert "ssh/b cannot be used: no answer" in decision.reason
    assert "ssh/a" not in decision.reason


def test_a_job_that_waits_for_a_quota_says_so() -> None:
    full = replace(CLOUD, capacity=0, limited_by="ResourceQuota few (pods: 2 of 2 used)")
    (decision,) = plan_jobs([waiting_job(job("1"), full)], QueueCapacity())
    assert isinstance(decision, JobWait)
    assert decision.reason.endswith(", limited by ResourceQuota few (pods: 2 of 2 used)")


def test_memory_that_others_hold_is_not_given_twice() -> None:
    waiting = [waiting_job(job("1", memory=5000), CPU), waiting_job(job("2", memory=5000), CPU)]
    assert placed(plan_jobs(waiting, QueueCapacity(hosts=(HOST,)))) == ["1"]


def test_who_fits_elsewhere_goes() -> None:
    busy = Allocation(host=HOST.name, gang="o", rank=0, project="p", cpus=4, memory_mib=0)
    decisions = plan_jobs(
        [
            waiting_job(job("1"), CPU),
            waiting_job(job("2"), CPU, CLOUD),
            waiting_job(job("3"), CLOUD),
            waiting_job(job("4"), CPU),
        ],
        QueueCapacity(hosts=(HOST,), allocations=(busy,)),
    )
    assert placed(decisions) == ["2"]


def test_capacity_counts_what_was_placed_since_it_was_told() -> None:
    two = replace(CLOUD, capacity=2)
    waiting = [waiting_job(job("1"), two), waiting_job(job("2"), two)]
    assert placed(plan_jobs(waiting, QueueCapacity())) == ["1", "2"]
    assert placed(plan_jobs(waiting, QueueCapacity(used={pool_of(two): Fraction(1, 2)}))) == ["1"]
    assert placed(plan_jobs([waiting_job(job("1", nodes=3), two)], QueueCapacity())) == []


def test_a_gang_uses_as_much_as_it_has_nodes() -> None:
    four = replace(CLOUD, capacity=4)
    used: dict[str, Fraction] = {}
    take(used, four, 3)
    assert count_left(four, used) == 1
    waiting = [waiting_job(job("1", nodes=3), four), waiting_job(job("2", nodes=2), four)]
    assert placed(plan_jobs(waiting, QueueCapacity())) == ["1"]


def test_a_job_with_several_wishes_waits_at_the_places_of_all_of_them() -> None:
    """Else small jobs would take what its second wish waits for."""
    first, second = replace(CLOUD, capacity=2), replace(CLOUD, instance_type="u", capacity=2)
    large = job("1", nodes=3)
    scheduler = JobScheduler(QueueCapacity())
    stay = scheduler.decide(waiting_job(large, first), waiting_job(large, second))
    assert isinstance(stay, JobWait)
    assert stay.behind == (first.key, second.key)
    for offer in (first, second):
        assert isinstance(scheduler.decide(waiting_job(job("2"), offer)), JobWait)
    place = JobScheduler(QueueCapacity()).decide(
        waiting_job(large, first), waiting_job(large, replace(second, capacity=3))
    )
    assert isinstance(place, JobPlacement)
    assert place.offer.instance_type == "u"


def test_offers_without_a_pool_do_not_use_each_others_capacity() -> None:
    other = replace(CLOUD, instance_type="u")
    waiting = [waiting_job(job("1"), CLOUD), waiting_job(job("2"), other)]
    assert placed(plan_jobs(waiting, QueueCapacity())) == ["1", "2"]


def test_offers_of_one_pool_draw_from_each_other() -> None:
    """Two nodes of eight: each size may be had so often, and not all of them at once."""
    sizes = {
        n: replace(CLOUD, instance_type=f"t{n}", capacity=2 * (8 // n), pool="nodes")
        for n in (1, 2, 4, 8)
    }
    waiting = [
        waiting_job(job("1"), sizes[8]),
        waiting_job(job("2"), sizes[4]),
        waiting_job(job("3"), sizes[8]),
        waiting_job(job("4"), sizes[2]),
    ]
    assert placed(plan_jobs(waiting, QueueCapacity())) == ["1", "2", "4"]
    elsewhere = replace(sizes[8], region="other")
    apart = replace(sizes[8], pool="others")
    alone = replace(sizes[8], pool="")
    full = QueueCapacity(used={pool_of(sizes[8]): Fraction(1)})
    assert (
        placed(plan_jobs([waiting_job(job(str(n)), offer) for n, offer in sizes.items()], full))
        == []
    )
    assert placed(
        plan_jobs(
            [
                waiting_job(job("1"), elsewhere),
                waiting_job(job("2"), apart),
                waiting_job(job("3"), alone),
            ],
            full,
        )
    ) == [
        "1",
        "2",
        "3",
    ]


@given(st.lists(st.sampled_from([1, 2, 4, 8]), max_size=40))
def test_no_more_is_given_away_than_there_is(sizes: list[int]) -> None:
    offers = {
        n: replace(CLOUD, instance_type=f"t{n}", capacity=2 * (8 // n), pool="nodes")
        for n in (1, 2, 4, 8)
    }
    decisions = plan_jobs(
        [waiting_job(job(str(at)), offers[n]) for at, n in enumerate(sizes)], QueueCapacity()
    )
    given_away = sum(
        int(place.offer.instance_type[1:]) for place in decisions if isinstance(place, JobPlacement)
    )
    assert given_away <= 16
    if sum(sizes) <= 16:
        assert given_away == sum(sizes)


def test_what_does_not_say_how_much_it_has_is_never_used_up() -> None:
    used: dict[str, Fraction] = {}
    endless = replace(CLOUD, capacity=None, pool="nodes")
    take(used, endless, 100)
    assert (count_left(endless, used), used) == (None, {})
    nothing = replace(endless, capacity=0)
    take(used, nothing, 1)
    assert count_left(nothing, used) == 0


def farm(*names: str, **differing: bool) -> tuple[Host, ...]:
    """Hosts of one group; those named in `differing` are ready or not."""
    ready = [differing.get(name, True) for name in names]
    hosts = zip(names, ready, strict=True)
    return tuple(
        Host(name=f"farm/{n}", cpus=4, memory_mib=8192, group="farm/all", ready=r) for n, r in hosts
    )


GROUP = replace(CPU, provider="farm", region="all")
ALONE = replace(GROUP, zone="a")


def test_a_group_spreads_a_gang_over_hosts() -> None:
    (place,) = plan_jobs(
        [waiting_job(job("1", nodes=2), ALONE, GROUP)], QueueCapacity(hosts=farm("a", "b", "c"))
    )
    assert isinstance(place, JobPlacement)
    assert place.offer == GROUP
    assert [(allocation.host, allocation.rank) for allocation in place.allocations] == [
        ("farm/a", 0),
        ("farm/b", 1),
    ]


def test_a_gang_is_spread_over_the_hosts_of_its_group_only() -> None:
    others = tuple(replace(host, group="farm/other") for host in farm("a", "b"))
    capacity = QueueCapacity(hosts=(*others, *farm("c", "d")))
    (place,) = plan_jobs([waiting_job(job("1", nodes=2), GROUP)], capacity)
    assert isinstance(place, JobPlacement)
    assert [allocation.host for allocation in place.allocations] == ["farm/c", "farm/d"]
    capacity = QueueCapacity(hosts=(*others, *farm("c")))
    assert placed(plan_jobs([waiting_job(job("1", nodes=2), GROUP)], capacity)) == []


def test_a_gang_is_not_placed_on_a_single_host_of_a_group() -> None:
    capacity = QueueCapacity(hosts=farm("a", "b"))
    assert placed(plan_jobs([waiting_job(job("1", nodes=2, cpus=1), ALONE)], capacity)) == []
    host = replace(farm("a")[0], group="")
    capacity = QueueCapacity(hosts=(host,))
    assert placed(plan_jobs([waiting_job(job("1", nodes=2, cpus=1), ALONE)], capacity)) == ["1"]


def test_a_group_takes_no_gang_of_one_and_none_that_is_too_large() -> None:
    capacity = QueueCapacity(hosts=farm("a", "b", "c"))
    assert placed(plan_jobs([waiting_job(job("1"), GROUP)], capacity)) == []
    assert placed(plan_jobs([waiting_job(job("1"), ALONE)], capacity)) == ["1"]
    assert placed(plan_jobs([waiting_job(job("1", nodes=4), GROUP)], capacity)) == []


def test_a_gang_of_one_that_waits_for_a_group_holds_up_no_host() -> None:
    jobs = [waiting_job(job("1", cpus=4), GROUP), waiting_job(job("2"), ALONE)]
    assert placed(plan_jobs(jobs, QueueCapacity(hosts=farm("a")))) == ["2"]


def test_nothing_is_placed_on_a_host_that_is_not_ready() -> None:
    capacity = QueueCapacity(hosts=farm("a", "b", a=False))
    assert placed(plan_jobs([waiting_job(job("1"), ALONE)], capacity)) == []
    assert placed(plan_jobs([waiting_job(job("1", nodes=2), GROUP)], capacity)) == []
    assert placed(plan_jobs([waiting_job(job("1"), replace(ALONE, zone="b"))], capacity)) == ["1"]


def test_a_gang_is_not_placed_on_a_host_that_failed_it() -> None:
    capacity = QueueCapacity(hosts=farm("a", "b", "c"))
    shy = replace(waiting_job(job("1", nodes=2), GROUP), avoid=frozenset({"farm/a"}))
    (place,) = plan_jobs([shy], capacity)
    assert isinstance(place, JobPlacement)
    assert [allocation.host for allocation in place.allocations] == ["farm/b", "farm/c"]
    assert placed(plan_jobs([replace(shy, avoid=frozenset({"farm/a", "farm/b"}))], capacity)) == []


def test_a_gang_neither_waits_for_nor_holds_up_a_host_that_failed_it() -> None:
    shy = replace(waiting_job(job("2", nodes=2), GROUP), avoid=frozenset({"farm/a"}))
    full = [replace(A_ALLOCATION, host=f"farm/{name}", cpus=4) for name in ("a", "b")]
    waits_for_a = waiting_job(job("1"), ALONE)
    assert placed(
        plan_jobs(
            [waits_for_a, shy], QueueCapacity(hosts=farm("a", "b", "c"), allocations=full[:1])
        )
    ) == ["2"]
    for_a = waiting_job(job("3"), ALONE)
    assert placed(
        plan_jobs([shy, for_a], QueueCapacity(hosts=farm("a", "b", "c"), allocations=full[1:]))
    ) == ["3"]


def test_a_gang_that_waits_for_a_group_is_not_starved_by_jobs_for_its_hosts() -> None:
    capacity = QueueCapacity(
        hosts=farm("a", "b"), allocations=[replace(A_ALLOCATION, host="farm/a", cpus=4)]
    )
    small = waiting_job(job("2"), replace(ALONE, zone="b"))
    whole = waiting_job(job("1", nodes=2, cpus=4), GROUP)
    assert placed(plan_jobs([whole, small], capacity)) == []
    part = waiting_job(job("1", nodes=2, cpus=3), GROUP)
    assert placed(plan_jobs([part, small], capacity)) == ["2"]


def held(gang: str, cpus: float, devices: tuple[str, ...] = ()) -> Allocation:
    return replace(A_ALLOCATION, gang=gang, cpus=cpus, devices=devices)


@pytest.mark.parametrize(
    ("waiting", "small", "running", "starts"),
    [
        # 6 of 8 CPUs are busy, and half of the host is wanted: the rest has room for 2 or 4 more.
        (4, 1, (6,), True),
        (4, 2, (6,), True),
        (8, 1, (6,), False),
        # The earlier job can start once either job of 3 CPUs has ended; 1 CPU is left then.
        (4, 1, (3, 3), True),
        (4, 2, (3, 3), False),
        # The earlier job can start once three of these jobs have ended; no CPU is left then.
        (4, 0.5, (1,) * 7, False),
    ],
)
def test_a_small_job_starts_beside_a_waiting_one_that_it_cannot_delay(
    waiting: float, small: float, running: tuple[float, ...], starts: bool
) -> None:
    host = replace(HOST, cpus=8, devices=())
    capacity = QueueCapacity(
        hosts=(host,),
        allocations=[held(f"running-{number}", cpus) for number, cpus in enumerate(running)],
    )
    jobs = [waiting_job(job("1", cpus=waiting), CPU), waiting_job(job("2", cpus=small), CPU)]
    assert placed(plan_jobs(jobs, capacity)) == (["2"] if starts else [])


def test_a_job_without_devices_starts_beside_one_that_waits_for_devices() -> None:
    capacity = QueueCapacity(hosts=(HOST,), allocations=[held("running", 1, ("a", "b", "c", "d"))])
    waits = waiting_job(job("1"), replace(GPU, accelerator_count=4))
    beside = [waiting_job(job(f"{number}"), CPU) for number in range(2, 6)]
    # Three CPUs are free, and the earlier job needs one of them.
    assert placed(plan_jobs([waits, *beside], capacity)) == ["2", "3", "4"]


def test_no_job_starts_beside_one_that_waits_for_a_host_that_is_not_ready() -> None:
    """The first job needs both hosts, and takes all of the second one when the first returns."""
    capacity = QueueCapacity(hosts=farm("a", "b", a=False))
    waits = waiting_job(job("1", nodes=2, cpus=4), GROUP)
    small = waiting_job(job("2"), replace(ALONE, zone="b"))
    assert placed(plan_jobs([waits, small], capacity)) == []


def test_a_job_waits_if_it_could_delay_any_of_several_earlier_ones() -> None:
    host = replace(HOST, cpus=8, devices=())
    capacity = QueueCapacity(hosts=(host,), allocations=[held("running", 6)])
    earlier = [waiting_job(job(f"{number}", cpus=3), CPU) for number in (1, 2)]
    for cpus, starts in ((2, ["9"]), (2.5, [])):
        capacity_for = QueueCapacity(hosts=(host,), allocations=[held("running", 8 - cpus)])
        small = waiting_job(job("9", cpus=cpus), CPU)
        assert placed(plan_jobs([*earlier, small], capacity_for)) == starts
    many = [waiting_job(job(f"{number}", cpus=3), CPU) for number in range(10, 19)]
    assert placed(plan_jobs([*many, waiting_job(job("9", cpus=1), CPU)], capacity)) == []


needs = st.builds(
    lambda cpus, memory, nodes, gpus: (
        TaskSpec(
            name="n",
            run="x",
            nodes=nodes,
            resources=ResourceSpec(
                cpus_min=cpus,
                memory_min_mib=memory,
                accelerators=(AcceleratorNeed(name="H100", count_min=gpus),) if gpus else (),
            ),
        ),
        replace(GPU, accelerator_count=gpus) if gpus else CPU,
    ),
    st.none() | st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    st.none() | st.integers(1, 4096),
    st.integers(1, 3),
    st.integers(0, 3),
)


@given(st.lists(needs, max_size=12))
def test_no_device_is_held_twice_and_no_host_is_overfull(
    wanted: list[tuple[TaskSpec, Offer]],
) -> None:
    waiting = [
        waiting_job(replace(job(f"{number:02}"), task=task), offer)
        for number, (task, offer) in enumerate(wanted)
    ]
    decisions = plan_jobs(waiting, QueueCapacity(hosts=(HOST,)))
    allocations = [
        allocation
        for decision in decisions
        if isinstance(decision, JobPlacement)
        for allocation in decision.allocations
    ]
    devices = [device for allocation in allocations for device in allocation.devices]
    assert len(devices) == len(set(devices))
    assert sum(allocation.cpus for allocation in allocations) <= HOST.cpus
    assert sum(allocation.memory_mib for allocation in allocations) <= HOST.memory_mib
    for decision in decisions:
        if isinstance(decision, JobPlacement):
            assert [allocation.rank for allocation in decision.allocations] == list(
                range(decision.job.task.nodes)
            )


ONE_PROJECT = replace(HOST, separates=False)


def of_project(name: str, project: str) -> WaitingJob:
    return waiting_job(replace(job(name, cpus=1), project=project), CPU)


def test_a_host_that_does_not_separate_runs_one_project_at_a_time() -> None:
    scheduler = JobScheduler(QueueCapacity(hosts=(ONE_PROJECT,), allocations=(A_ALLOCATION,)))
    assert isinstance(scheduler.decide(of_project("mine", "p")), JobPlacement)
    wait = scheduler.decide(of_project("other", "q"))
    assert isinstance(wait, JobWait)
    assert "one project at a time" in wait.reason
    assert "p" not in wait.reason.split()  # the other project is not named
    late = scheduler.decide(of_project("late", "p"))
    assert isinstance(late, JobWait), "the other project would wait forever"


def test_the_wait_says_why_a_host_does_not_separate() -> None:
    host = replace(ONE_PROJECT, obstacle="namespaces are missing")
    scheduler = JobScheduler(QueueCapacity(hosts=(host,), allocations=(A_ALLOCATION,)))
    wait = scheduler.decide(of_project("other", "q"))
    assert isinstance(wait, JobWait)
    assert "without isolation between projects (namespaces are missing) runs" in wait.reason


def test_the_wait_names_the_first_of_several_hosts_and_its_reason() -> None:
    hosts = [
        replace(ONE_PROJECT, name=f"local/{name}", obstacle=f"{name} is missing") for name in "abc"
    ]
    taken = [replace(A_ALLOCATION, host=host.name) for host in hosts]
    scheduler = JobScheduler(QueueCapacity(hosts=hosts, allocations=taken))
    offers = [replace(CPU, region=name) for name in "bca"]
    wait = scheduler.decide(waiting_job(replace(job("x", cpus=1), project="q"), *offers))
    assert isinstance(wait, JobWait)
    assert wait.reason.startswith("waits for local/b and 2 more, where")
    assert "(b is missing)" in wait.reason


def test_a_host_that_separates_runs_projects_side_by_side() -> None:
    scheduler = JobScheduler(QueueCapacity(hosts=(HOST,), allocations=(A_ALLOCATION,)))
    assert isinstance(scheduler.decide(of_project("other", "q")), JobPlacement)


def test_two_projects_never_start_on_such_a_host_in_one_pass() -> None:
    scheduler = JobScheduler(QueueCapacity(hosts=(ONE_PROJECT,)))
    assert isinstance(scheduler.decide(of_project("a", "p")), JobPlacement)
    assert isinstance(scheduler.decide(of_project("b", "q")), JobWait)


def test_a_job_that_can_use_another_host_waits_for_capacity_there() -> None:
    full = replace(ONE_PROJECT, name="local/full", cpus=0.5, separates=True)
    elsewhere = replace(CPU, region="full")
    taken = (A_ALLOCATION,)
    scheduler = JobScheduler(QueueCapacity(hosts=(ONE_PROJECT, full), allocations=taken))
    waiting = waiting_job(replace(job("b", cpus=1), project="q"), CPU, elsewhere)
    wait = scheduler.decide(waiting)
    assert isinstance(wait, JobWait)
    assert "free capacity" in wait.reason
    scheduler = JobScheduler(QueueCapacity(hosts=(ONE_PROJECT,), allocations=taken))
    wait = scheduler.decide(replace(waiting, offers=(CPU, replace(CLOUD, capacity=0))))
    assert isinstance(wait, JobWait)
    assert "free capacity" in wait.reason, "a cloud may have some later"


def rack(*names: str) -> tuple[Host, ...]:
    """Hosts with four accelerators each."""
    return tuple(replace(HOST, name=f"ssh/{name}", devices=("0", "1", "2", "3")) for name in names)


def busy_on(host: str, *devices: str, gang: str = "other") -> Allocation:
    return replace(A_ALLOCATION, host=f"ssh/{host}", devices=devices, gang=gang, cpus=0.1)


def gpus(count: int, *hosts: str) -> tuple[Offer, ...]:
    """The equal offers of hosts, in the order of their names."""
    offer = replace(GPU, provider="ssh", accelerator_count=count)
    return tuple(replace(offer, region=host) for host in hosts)


def test_of_equal_hosts_a_job_takes_the_one_that_it_breaks_least() -> None:
    """Two jobs of two run. A job of one takes the third device of a host, not one of a pair."""
    capacity = QueueCapacity(
        hosts=rack("a", "b", "c"),
        allocations=(busy_on("b", "0", "1"), busy_on("c", "0", "1"), busy_on("c", "2", gang="one")),
    )
    (place,) = plan_jobs([waiting_job(job("1", cpus=0.1), *gpus(1, "a", "b", "c"))], capacity)
    assert isinstance(place, JobPlacement)
    assert [(each.host, each.devices) for each in place.allocations] == [("ssh/c", ("3",))]


def test_small_jobs_leave_whole_hosts_to_large_ones() -> None:
    waiting = [
        waiting_job(job("1", cpus=0.1), *gpus(1, "a", "b")),
        waiting_job(job("2", cpus=0.1), *gpus(1, "b", "a")),
        waiting_job(job("3", cpus=0.1), *gpus(4, "a", "b")),
    ]
    assert placed(plan_jobs(waiting, QueueCapacity(hosts=rack("a", "b")))) == ["1", "2", "3"]


def test_cheaper_hosts_and_those_without_failures_come_first() -> None:
    full = (busy_on("b", "0", "1", "2"),)
    near, far = gpus(1, "a", "b")
    dear = replace(far, rate=HourlyRate(1))
    for offers, resting in (((near, dear), ()), ((near, far), (far.key,))):
        capacity = QueueCapacity(hosts=rack("a", "b"), allocations=full, resting=resting)
        (place,) = plan_jobs([waiting_job(job("1"), *offers)], capacity)
        assert isinstance(place, JobPlacement)
        assert place.offer == near


def test_a_gang_takes_the_hosts_of_its_group_that_it_breaks_least() -> None:
    hosts = tuple(replace(host, group="ssh/lab") for host in rack("a", "b", "c"))
    group = replace(GPU, provider="ssh", region="lab")
    capacity = QueueCapacity(hosts=hosts, allocations=(busy_on("c", "0"), busy_on("b", "0")))
    (place,) = plan_jobs([waiting_job(job("1", nodes=2, cpus=0.1), group)], capacity)
    assert isinstance(place, JobPlacement)
    assert [(each.host, each.rank) for each in place.allocations] == [("ssh/b", 0), ("ssh/c", 1)]


def test_a_job_that_waited_gets_the_first_host_of_those_it_waited_for() -> None:
    """Else jobs that were placed beside it while it waited would change its host."""
    busy = (busy_on("b", "0", "1", "2"),)
    for awaited, host in (((), "ssh/b"), (("ssh/a",), "ssh/a")):
        capacity = QueueCapacity(hosts=rack("a", "b"), allocations=busy, awaited=awaited)
        (place,) = plan_jobs([waiting_job(job("1", cpus=0.1), *gpus(1, "a", "b"))], capacity)
        assert isinstance(place, JobPlacement)
        assert [each.host for each in place.allocations] == [host]


PLACES = (
    *(
        Host(
            name=f"farm/{n}",
            cpus=4,
            memory_mib=8192,
            devices=("x", "y"),
            group="farm/all",
            labels=(("rack", "r1" if n == "a" else "r2"),),
        )
        for n in "abc"
    ),
    Host(name="farm/d", cpus=2, memory_mib=8192, group="farm/all", ready=False, problem="off"),
    Host(name="local/me", cpus=4, memory_mib=4096, devices=("x", "y"), separates=False),
    Host(name="local/too", cpus=8, memory_mib=8192, devices=("x",)),
)
ONE_GPU = replace(CPU, instance_type="H100", accelerator="H100", accelerator_count=1)
# Jobs that need the same have the same offers, also in later passes.
WISHES = (
    (replace(CPU, region="me"), replace(CPU, region="too")),
    (ALONE, replace(GROUP, zone="b"), replace(GROUP, zone="c"), replace(GROUP, zone="d")),
    (GROUP, replace(CLOUD, capacity=2)),
    (replace(ONE_GPU, region="too"), replace(ONE_GPU, region="me"), replace(CLOUD, capacity=1)),
    (
        replace(ONE_GPU, region="me", accelerator_part=0.5),
        replace(ONE_GPU, provider="farm", region="all", zone="a"),
        replace(ONE_GPU, provider="farm", region="all", zone="b", rate=HourlyRate(1)),
        replace(ONE_GPU, provider="farm", region="all", zone="c"),
    ),
)


def make_waiting(
    number: int, wish: int, nodes: int, cpus: float, project: str, avoid: str
) -> WaitingJob:
    task = replace(job(str(number), nodes=nodes, cpus=cpus).task, project=project)
    if wish == 2:  # the group
        task = replace(task, topology=TopologyNeed(same="rack"))
    record = replace(job(str(number)), task=task, project=project)
    gang = f"gang-{number}"
    avoided = frozenset((avoid,)) if avoid else frozenset()
    return WaitingJob(job=record, gang=gang, offers=WISHES[wish], avoid=avoided)


A_WISH = st.tuples(
    st.integers(0, len(WISHES) - 1),
    st.sampled_from([1, 1, 1, 2]),
    st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    st.sampled_from(["p", "q"]),
    st.sampled_from(["", "", "", "farm/a"]),
)
A_JOB = st.lists(A_WISH, min_size=1, max_size=2)
A_PASS = st.fixed_dictionaries(
    {
        "arrive": st.lists(A_JOB, max_size=4),
        "end": st.integers(0, 3),
        "resting": st.sampled_from([(), (), (WISHES[1][1].key,)]),
        "ready": st.sampled_from([True, True, True, False]),
        "kept": st.booleans(),  # whether the placements of the pass are written
    }
)


@given(st.lists(A_PASS, min_size=2, max_size=6))
def test_a_scheduler_that_looks_only_at_changes_decides_like_a_new_one(passes: list[Any]) -> None:
    """Also if placements were not written, or another server wrote some."""
    waiting: list[list[WaitingJob]] = []
    held: list[Allocation] = []
    awaited: set[str] = set()
    scheduler: JobScheduler | None = None
    for each in passes:
        first = len(waiting) + len(held)
        waiting += [
            [make_waiting(100 * first + number, *wish) for wish in wishes]
            for number, wishes in enumerate(each["arrive"])
        ]
        for gang in sorted({one.gang for one in held})[: each["end"]]:
            held = [one for one in held if one.gang != gang]
        hosts = tuple(
            replace(host, ready=each["ready"]) if host.name == "farm/b" else host for host in PLACES
        )
        capacity = QueueCapacity(
            hosts=hosts,
            allocations=sorted(held, key=lambda one: (one.host, one.gang, one.rank)),
            resting=each["resting"],
            awaited=awaited,
        )
        scheduler = JobScheduler(capacity) if scheduler is None else scheduler.renew(capacity)
        fresh = JobScheduler(capacity)
        for wishes in list(waiting):
            decision = scheduler.decide(*wishes)
            assert decision == fresh.decide(*wishes)
            if isinstance(decision, JobPlacement) and each["kept"]:
                held += decision.allocations
                waiting.remove(wishes)
        assert scheduler.blocked == fresh.blocked
        awaited = scheduler.blocked


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_host_that_becomes_free_is_used_in_the_next_pass(nodes: int) -> None:
    """A single host, and the hosts of a group, one after the other."""
    hosts = tuple(replace(each, group="" if nodes == 1 else each.group) for each in farm("a", "b"))
    offers = (GROUP,) if nodes == 2 else (ALONE, replace(ALONE, zone="b"))
    busy = [replace(A_ALLOCATION, host=each.name, gang=each.name, cpus=4) for each in hosts]
    waiting = waiting_job(job("1", nodes=nodes, cpus=4), *offers)
    scheduler = JobScheduler(QueueCapacity(hosts=hosts, allocations=busy))
    for left in range(nodes):
        assert isinstance(scheduler.decide(waiting), JobWait)
        scheduler = scheduler.renew(QueueCapacity(hosts=hosts, allocations=busy[left + 1 :]))
    decision = scheduler.decide(waiting)
    assert isinstance(decision, JobPlacement)
    assert [each.host for each in decision.allocations] == ["farm/a", "farm/b"][:nodes]


def test_a_host_on_which_a_job_has_failed_since_the_last_pass_is_the_last_choice() -> None:
    first, second = gpus(1, "b", "a")
    waiting = waiting_job(job("1", cpus=0.1), first, second)
    busy = [busy_on("a", "0", "1", "2")]  # so host a is the best fit
    capacity = QueueCapacity(hosts=rack("a", "b"), allocations=busy)
    scheduler = JobScheduler(capacity)
    assert scheduler.can_start(waiting)
    for resting, chosen in (((second.key,), first), ((), second)):
        scheduler = scheduler.renew(replace(capacity, resting=resting))
        decision = scheduler.decide(waiting)
        assert isinstance(decision, JobPlacement)
        assert decision.offer == chosen
