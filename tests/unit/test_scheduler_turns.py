"""Whose turn it is: order, strictness at each place, and what is held of a shared host."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from cavvy.domain.jobs import Job
from cavvy.domain.offers import Offer
from cavvy.domain.places import Hold, Host
from cavvy.domain.tasks import AcceleratorNeed, Resources, Task
from cavvy.domain.units import HourlyRate
from cavvy.scheduler.packing import Owner, hold_for, holds_for, host_of
from cavvy.scheduler.pools import count_left, pool_of, take
from cavvy.scheduler.turns import Capacity, Place, Stay, Turns, Waiting

T0 = datetime(2030, 1, 1, tzinfo=UTC)
HOST = Host(name="local/me", cpus=4, memory_mib=8192, devices=("a", "b", "c", "d"))
CPU = Offer(
    provider="local", region="me", instance_type="cpu", vcpus=4, rate=HourlyRate(0), shared=True
)
GPU = replace(CPU, instance_type="H100-80GB", accelerator="H100", accelerator_count=1)
CLOUD = Offer(provider="cloud", region="r", instance_type="t", rate=HourlyRate(5), capacity=1)
ANY = Owner(gang="g", project="p")
A_HOLD = Hold(host="local/me", gang="other", rank=0, project="p", cpus=1, memory_mib=0)


def job(
    name: str,
    *,
    nodes: int = 1,
    cpus: float | None = None,
    memory: int | None = None,
    priority: int = 0,
) -> Job:
    need = Resources(cpus_min=cpus, memory_min_mib=memory)
    task = Task(name=name, run="x", nodes=nodes, resources=need, priority=priority)
    return Job(id=name, project="p", name=name, task=task, submitted_at=T0, since=T0)


def turn(wanting: Job, *offers: Offer) -> Waiting:
    return Waiting(job=wanting, gang=f"gang-{wanting.id}", offers=offers)


def plan_turns(waiting: Iterable[Waiting], capacity: Capacity) -> list[Place | Stay]:
    turns = Turns(capacity)
    return [turns.decide(turn) for turn in waiting]


def placed(decisions: list[Place | Stay]) -> list[str]:
    return [decision.job.id for decision in decisions if isinstance(decision, Place)]


def test_a_task_that_does_not_say_holds_one_cpu() -> None:
    hold = hold_for(job("j").task, CPU, HOST, (), ANY, 0)
    assert hold == Hold(host="local/me", gang="g", rank=0, project="p", cpus=1, memory_mib=0)
    small = hold_for(job("j").task, CPU, replace(HOST, cpus=0.5), (), ANY, 0)
    assert small is not None
    assert small.cpus == 0.5


def test_each_rank_holds_its_own_devices() -> None:
    holds = holds_for(job("j", nodes=2).task, replace(GPU, accelerator_count=2), HOST, (), ANY)
    assert holds is not None
    assert [hold.devices for hold in holds] == [("a", "b"), ("c", "d")]
    assert (
        holds_for(job("j", nodes=3).task, replace(GPU, accelerator_count=2), HOST, (), ANY) is None
    )


def test_only_devices_of_the_offers_kind_are_taken() -> None:
    mixed = replace(HOST, kinds=("A100-40GB", "H100-80GB", "A100-40GB", "H100-80GB"))
    hold = hold_for(job("j").task, replace(GPU, accelerator_count=2), mixed, (), ANY, 0)
    assert hold is not None
    assert hold.devices == ("b", "d")
    assert hold_for(job("j").task, replace(GPU, accelerator_count=3), mixed, (), ANY, 0) is None


def test_memory_and_cpus_are_counted() -> None:
    assert hold_for(job("j", memory=8193).task, CPU, HOST, (), ANY, 0) is None
    assert hold_for(job("j", cpus=4.5).task, CPU, HOST, (), ANY, 0) is None
    each = replace(job("j", cpus=2).task, resources=Resources(cpus_min=2, memory_per_cpu_mib=4096))
    hold = hold_for(each, CPU, HOST, (), ANY, 0)
    assert hold is not None
    assert hold.memory_mib == 8192
    assert hold_for(each, CPU, replace(HOST, memory_mib=8191), (), ANY, 0) is None
    other = Hold(host=HOST.name, gang="o", rank=0, project="p", cpus=3.5, memory_mib=0)
    assert hold_for(job("j", cpus=0.5).task, CPU, HOST, (other,), ANY, 0) is not None
    assert hold_for(job("j", cpus=0.6).task, CPU, HOST, (other,), ANY, 0) is None


def test_the_host_of_an_offer() -> None:
    assert host_of(CPU, (HOST,)) is HOST
    assert host_of(replace(CPU, zone="me", region="x"), (HOST,)) is HOST
    assert host_of(CLOUD, (HOST,)) is None


def test_a_large_job_is_not_starved_by_small_ones() -> None:
    busy = Hold(host=HOST.name, gang="o", rank=0, project="p", cpus=2, memory_mib=0)
    decisions = plan_turns(
        [turn(job("1-large", cpus=4), CPU), turn(job("2-small"), CPU), turn(job("3-small"), CPU)],
        Capacity(hosts=(HOST,), holds=(busy,)),
    )
    assert placed(decisions) == []
    assert [decision.reason for decision in decisions if isinstance(decision, Stay)] == [
        "waits for free capacity at local/me",
        "waits behind earlier jobs for local/me",
        "waits behind earlier jobs for local/me",
    ]


def test_memory_that_others_hold_is_not_given_twice() -> None:
    waiting = [turn(job("1", memory=5000), CPU), turn(job("2", memory=5000), CPU)]
    assert placed(plan_turns(waiting, Capacity(hosts=(HOST,)))) == ["1"]


def test_who_fits_elsewhere_goes() -> None:
    busy = Hold(host=HOST.name, gang="o", rank=0, project="p", cpus=4, memory_mib=0)
    decisions = plan_turns(
        [
            turn(job("1"), CPU),
            turn(job("2"), CPU, CLOUD),
            turn(job("3"), CLOUD),
            turn(job("4"), CPU),
        ],
        Capacity(hosts=(HOST,), holds=(busy,)),
    )
    assert placed(decisions) == ["2"]


def test_capacity_counts_what_was_placed_since_it_was_told() -> None:
    two = replace(CLOUD, capacity=2)
    waiting = [turn(job("1"), two), turn(job("2"), two)]
    assert placed(plan_turns(waiting, Capacity())) == ["1", "2"]
    assert placed(plan_turns(waiting, Capacity(used={pool_of(two): Fraction(1, 2)}))) == ["1"]
    assert placed(plan_turns([turn(job("1", nodes=3), two)], Capacity())) == []


def test_a_gang_uses_as_much_as_it_has_nodes() -> None:
    four = replace(CLOUD, capacity=4)
    used: dict[str, Fraction] = {}
    take(used, four, 3)
    assert count_left(four, used) == 1
    waiting = [turn(job("1", nodes=3), four), turn(job("2", nodes=2), four)]
    assert placed(plan_turns(waiting, Capacity())) == ["1"]


def test_a_job_with_several_wishes_waits_at_the_places_of_all_of_them() -> None:
    """Else small jobs would take what its second wish waits for."""
    first, second = replace(CLOUD, capacity=2), replace(CLOUD, instance_type="u", capacity=2)
    large = job("1", nodes=3)
    turns = Turns(Capacity())
    stay = turns.decide(turn(large, first), turn(large, second))
    assert isinstance(stay, Stay)
    assert stay.behind == (first.key, second.key)
    for offer in (first, second):
        assert isinstance(turns.decide(turn(job("2"), offer)), Stay)
    place = Turns(Capacity()).decide(turn(large, first), turn(large, replace(second, capacity=3)))
    assert isinstance(place, Place)
    assert place.offer.instance_type == "u"


def test_offers_of_one_pool_draw_from_each_other() -> None:
    """Two nodes of eight: each size may be had so often, and not all of them at once."""
    sizes = {
        n: replace(CLOUD, instance_type=f"t{n}", capacity=2 * (8 // n), pool="nodes")
        for n in (1, 2, 4, 8)
    }
    waiting = [
        turn(job("1"), sizes[8]),
        turn(job("2"), sizes[4]),
        turn(job("3"), sizes[8]),
        turn(job("4"), sizes[2]),
    ]
    assert placed(plan_turns(waiting, Capacity())) == ["1", "2", "4"]
    elsewhere = replace(sizes[8], region="other")
    apart = replace(sizes[8], pool="others")
    alone = replace(sizes[8], pool="")
    full = Capacity(used={pool_of(sizes[8]): Fraction(1)})
    assert placed(plan_turns([turn(job(str(n)), offer) for n, offer in sizes.items()], full)) == []
    assert placed(
        plan_turns([turn(job("1"), elsewhere), turn(job("2"), apart), turn(job("3"), alone)], full)
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
    decisions = plan_turns(
        [turn(job(str(at)), offers[n]) for at, n in enumerate(sizes)], Capacity()
    )
    given_away = sum(
        int(place.offer.instance_type[1:]) for place in decisions if isinstance(place, Place)
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
    (place,) = plan_turns(
        [turn(job("1", nodes=2), ALONE, GROUP)], Capacity(hosts=farm("a", "b", "c"))
    )
    assert isinstance(place, Place)
    assert place.offer == GROUP
    assert [(hold.host, hold.rank) for hold in place.holds] == [("farm/a", 0), ("farm/b", 1)]


def test_a_group_takes_no_gang_of_one_and_none_that_is_too_large() -> None:
    capacity = Capacity(hosts=farm("a", "b", "c"))
    assert placed(plan_turns([turn(job("1"), GROUP)], capacity)) == []
    assert placed(plan_turns([turn(job("1"), ALONE)], capacity)) == ["1"]
    assert placed(plan_turns([turn(job("1", nodes=4), GROUP)], capacity)) == []


def test_nothing_is_placed_on_a_host_that_is_not_ready() -> None:
    capacity = Capacity(hosts=farm("a", "b", a=False))
    assert placed(plan_turns([turn(job("1"), ALONE)], capacity)) == []
    assert placed(plan_turns([turn(job("1", nodes=2), GROUP)], capacity)) == []
    assert placed(plan_turns([turn(job("1"), replace(ALONE, zone="b"))], capacity)) == ["1"]


def test_a_gang_is_not_placed_on_a_host_that_failed_it() -> None:
    capacity = Capacity(hosts=farm("a", "b", "c"))
    shy = replace(turn(job("1", nodes=2), GROUP), avoid=frozenset({"farm/a"}))
    (place,) = plan_turns([shy], capacity)
    assert isinstance(place, Place)
    assert [hold.host for hold in place.holds] == ["farm/b", "farm/c"]
    assert placed(plan_turns([replace(shy, avoid=frozenset({"farm/a", "farm/b"}))], capacity)) == []


def test_a_gang_neither_waits_for_nor_holds_up_a_host_that_failed_it() -> None:
    shy = replace(turn(job("2", nodes=2), GROUP), avoid=frozenset({"farm/a"}))
    full = [replace(A_HOLD, host=f"farm/{name}", cpus=4) for name in ("a", "b")]
    waits_for_a = turn(job("1"), ALONE)
    assert placed(
        plan_turns([waits_for_a, shy], Capacity(hosts=farm("a", "b", "c"), holds=full[:1]))
    ) == ["2"]
    for_a = turn(job("3"), ALONE)
    assert placed(
        plan_turns([shy, for_a], Capacity(hosts=farm("a", "b", "c"), holds=full[1:]))
    ) == ["3"]


def test_a_gang_that_waits_for_a_group_is_not_starved_by_jobs_for_its_hosts() -> None:
    capacity = Capacity(hosts=farm("a", "b"), holds=[replace(A_HOLD, host="farm/a", cpus=4)])
    waiting = [turn(job("1", nodes=2), GROUP), turn(job("2"), replace(ALONE, zone="b"))]
    assert placed(plan_turns(waiting, capacity)) == []


needs = st.builds(
    lambda cpus, memory, nodes, gpus: (
        Task(
            name="n",
            run="x",
            nodes=nodes,
            resources=Resources(
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
def test_no_device_is_held_twice_and_no_host_is_overfull(wanted: list[tuple[Task, Offer]]) -> None:
    waiting = [
        turn(replace(job(f"{number:02}"), task=task), offer)
        for number, (task, offer) in enumerate(wanted)
    ]
    decisions = plan_turns(waiting, Capacity(hosts=(HOST,)))
    holds = [
        hold for decision in decisions if isinstance(decision, Place) for hold in decision.holds
    ]
    devices = [device for hold in holds for device in hold.devices]
    assert len(devices) == len(set(devices))
    assert sum(hold.cpus for hold in holds) <= HOST.cpus
    assert sum(hold.memory_mib for hold in holds) <= HOST.memory_mib
    first_stay = next(
        (i for i, decision in enumerate(decisions) if isinstance(decision, Stay)), len(decisions)
    )
    assert all(isinstance(decision, Stay) for decision in decisions[first_stay:]), (
        "one host: strictly in order"
    )
    for decision in decisions:
        if isinstance(decision, Place):
            assert [hold.rank for hold in decision.holds] == list(range(decision.job.task.nodes))
