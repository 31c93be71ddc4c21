"""Which offers of a shared host mean a task, and whether it fits there."""

from hypothesis import given
from hypothesis import strategies as st

from cavvy.domain.allocations import Host
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import AcceleratorNeed, ResourceSpec, TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.planner.shared_hosts import fits_empty, smallest_shares

CPU_TASK = TaskSpec(name="t", run="true")
GPU_TASK = TaskSpec(name="t", run="true", resources=ResourceSpec(accelerators=(AcceleratorNeed(),)))


def make_offer(count: int, kind: str = "cpu", region: str = "a", shared: bool = True) -> Offer:
    return Offer(
        provider="p",
        region=region,
        instance_type=kind,
        accelerator=kind if count else None,
        accelerator_count=count,
        vcpus=8,
        rate=HourlyRate(1),
        shared=shared,
    )


def test_a_task_without_accelerators_gets_the_share_without_any() -> None:
    offers = [make_offer(2, "L4"), make_offer(0), make_offer(1, "L4")]
    assert smallest_shares(CPU_TASK, offers, ()) == [make_offer(0)]


def test_a_task_with_accelerators_gets_the_fewest_of_each_kind() -> None:
    offers = [make_offer(2, "L4"), make_offer(3, "T4"), make_offer(4, "L4")]
    assert smallest_shares(GPU_TASK, offers, ()) == [make_offer(2, "L4"), make_offer(3, "T4")]


def test_hosts_are_separate_and_whole_machines_stay_as_they_are() -> None:
    rented = [make_offer(n, "L4", shared=False) for n in (1, 2)]
    offers = [*rented, make_offer(1, "L4", "b"), make_offer(1, "L4", "a")]
    assert smallest_shares(GPU_TASK, offers, ()) == [
        *rented,
        make_offer(1, "L4", "a"),
        make_offer(1, "L4", "b"),
    ]


def test_the_offers_of_a_group_are_for_several_nodes() -> None:
    hosts = [Host(name=f"p/{n}", cpus=8, memory_mib=1024, group="p/a") for n in "xy"]
    group = make_offer(1, "L4")
    own = [replace(group, zone=zone) for zone in "xy"]
    assert smallest_shares(GPU_TASK, [group, *own], hosts) == own
    pair = replace(GPU_TASK, nodes=2)
    assert smallest_shares(pair, [group, *own], hosts) == [group]
    assert smallest_shares(pair, own, hosts) == own


@given(
    st.lists(
        st.builds(make_offer, st.integers(0, 3), st.sampled_from(["x", "y"]), st.sampled_from("ab"))
    )
)
def test_every_host_keeps_an_offer(offers: list[Offer]) -> None:
    kept = smallest_shares(CPU_TASK, offers, ())
    assert {offer.region for offer in kept} == {offer.region for offer in offers}
    assert len(kept) == len({offer.region for offer in offers})


def test_all_nodes_must_fit_at_once() -> None:
    host = Host(name="p/a", cpus=8, memory_mib=1024)
    asks = ResourceSpec(cpus_min=4)
    for nodes, fits in ((1, True), (2, True), (3, False)):
        task = TaskSpec(name="t", run="true", nodes=nodes, resources=asks)
        assert fits_empty(task, make_offer(0), [host]) is fits
    assert not fits_empty(CPU_TASK, make_offer(0, region="nowhere"), [host])


def test_a_host_that_does_not_answer_is_waited_for() -> None:
    assert fits_empty(
        CPU_TASK, make_offer(0), [Host(name="p/a", cpus=4, memory_mib=8192, ready=False)]
    )


def test_nodes_on_one_machine_pay_its_price_once() -> None:
    machine = replace(make_offer(0), payers=0, rate=HourlyRate(3_600_000))
    for nodes, each in ((1, 3_600_000), (2, 1_800_000), (3, 1_200_000), (7, 514_286)):
        (offer,) = smallest_shares(replace(CPU_TASK, nodes=nodes), [machine], ())
        assert (offer.payers, offer.rate.micros_per_hour) == (nodes, each)
    hosts = replace(machine, payers=1)  # a host of its own for each node
    assert smallest_shares(replace(CPU_TASK, nodes=2), [hosts], ()) == [hosts]
