"""Which offers a waiting job may use, and what it is told where there is none."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.records import make_job_record, make_offer

from cavvy.domain.allocations import Host, SilentPlace, VolumeLocation
from cavvy.domain.elastic import NodeRange
from cavvy.domain.jobs import JobRecord, PlanState
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import (
    AcceleratorNeed,
    CheckpointPolicy,
    JobLimits,
    Objection,
    ResourceSpec,
    SpotPolicy,
    TaskSpec,
    Volume,
    VolumeKind,
    Workload,
)
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.planner.candidates import (
    Candidates,
    OfferedMarket,
    find_candidates,
    jobs_of,
    match,
    merge_candidates,
    rank_candidates,
)
from cavvy.planner.placements import PlanningContext

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOST = Host(name="here/a", cpus=4, memory_mib=4096)
FREE = make_offer("here/a/cpu", 0, vcpus=4, memory_mib=4096, shared=True)
PAID = replace(FREE, provider="cloud", shared=False, rate=HourlyRate(2_000_000))
WORK = Workload(samples=3600.0, rates={"cpu": 1.0})


def look(
    job: JobRecord,
    market: OfferedMarket,
    situation: PlanningContext | None = None,
    objections: tuple[Objection, ...] = (),
) -> Candidates:
    known = situation or PlanningContext()
    found = match(job, market)
    return find_candidates(
        job, market, found, lambda _task, _provider: objections, situation=known, now=NOW
    )


def merge(found: list[Candidates]) -> Candidates:
    return merge_candidates([(make_job(), each) for each in found])


def make_job(task: TaskSpec | None = None, consented: bool = True) -> JobRecord:
    the_task = task or TaskSpec(name="t", run="true")
    return make_job_record(NOW, task=the_task, consented=consented)


def test_the_cheapest_comes_first_and_paid_offers_need_consent() -> None:
    market = OfferedMarket(offers=[PAID, FREE], hosts=[HOST])
    assert look(make_job(), market).offers == (FREE, PAID)
    assert look(make_job(consented=False), market).offers == (FREE,)
    none = look(make_job(consented=False), OfferedMarket(offers=[PAID]))
    assert none.hopeless
    assert "--yes" in none.reason


def test_what_fits_nowhere_is_said_with_what_would_have_to_change() -> None:
    task = TaskSpec(name="t", run="true", resources=ResourceSpec(cpus_min=8))
    found = look(make_job(task), OfferedMarket(offers=[PAID]))
    assert found.hopeless
    assert found.reason.startswith("No offer: ")
    assert "resources.cpu" in found.reason


def test_one_node_is_told_that_only_a_group_of_hosts_has_what_it_needs() -> None:
    hosts = [Host(name=f"here/{name}", cpus=4, memory_mib=4096, group="here/rack") for name in "ab"]
    group = replace(FREE, region="rack", instance_type="rack")
    found = look(make_job(), OfferedMarket(offers=[group], hosts=hosts))
    assert found.hopeless
    assert "only groups of hosts have what the task needs (here rack)" in found.reason


def test_a_part_of_a_gpu_that_must_be_isolated_starts_on_no_shared_gpu() -> None:
    offer = replace(FREE, accelerator="A100", accelerator_count=1, accelerator_memory_mib=40960)
    host = replace(HOST, devices=("a",))

    def find(*, isolated: bool) -> Candidates:
        need = AcceleratorNeed(name="A100", part=0.5, isolated=isolated)
        task = TaskSpec(name="t", run="true", resources=ResourceSpec(accelerators=(need,)))
        return look(make_job(task), OfferedMarket(offers=[offer], hosts=[host]))

    assert [each.accelerator_part for each in find(isolated=False).offers] == [0.5]
    assert find(isolated=True).hopeless
    assert "the task requires isolation" in find(isolated=True).reason


def test_a_limit_that_no_offer_keeps_is_said_with_what_would_have_to_change() -> None:
    task = TaskSpec(
        name="t", run="true", work=WORK, limits=JobLimits(duration=timedelta(minutes=30))
    )
    found = look(make_job(task), OfferedMarket(offers=[FREE], hosts=[HOST]))
    assert found.hopeless
    assert found.reason.endswith(
        "would run 1h00m, but your duration leaves 30m00s; raise limits.duration by 30m00s"
    )


def test_work_that_cannot_be_saved_does_not_start_where_the_node_ends_earlier() -> None:
    ending = replace(FREE, purchase=Purchase.SPOT, ends_at=NOW + timedelta(hours=2))
    market = OfferedMarket(offers=[ending], hosts=[HOST])

    def find(hours: float, **changes: Any) -> Candidates:
        limits = JobLimits(duration=timedelta(hours=hours))
        spot = ResourceSpec(spot=SpotPolicy.AUTO)
        task = TaskSpec(name="t", run="true", limits=limits, resources=spot, **changes)
        return look(make_job(task), market)

    assert find(1).offers == (ending,)
    assert find(2, checkpoint=CheckpointPolicy(path="c")).offers == (ending,)
    late = find(2)
    assert late.hopeless
    assert "ends by itself before the time of limits.duration" in late.reason


def test_the_rest_of_an_interrupted_job_is_not_ruled_out_by_the_estimate_of_the_whole() -> None:
    limits = JobLimits(duration=timedelta(minutes=65))
    task = TaskSpec(
        name="t", run="true", work=WORK, limits=limits, checkpoint=CheckpointPolicy(path="c")
    )
    situation = PlanningContext(ran=timedelta(minutes=30), done=0.5)
    assert look(make_job(task), OfferedMarket(offers=[FREE], hosts=[HOST]), situation).offers == (
        FREE,
    )


def test_the_rest_is_ruled_out_where_the_limit_was_never_enough_for_the_whole() -> None:
    task = TaskSpec(
        name="t", run="true", work=WORK, checkpoint=CheckpointPolicy(path="c")
    )  # an hour
    half = PlanningContext(ran=timedelta(minutes=40), done=0.5, spent=Money(1_500_000))
    for minutes, fits in ((50, False), (65, True)):
        limited = replace(task, limits=JobLimits(duration=timedelta(minutes=minutes)))
        assert (
            bool(look(make_job(limited), OfferedMarket(offers=[FREE], hosts=[HOST]), half).offers)
            is fits
        )
    for budget, fits in ((2_000_000, False), (2_400_000, True)):
        limited = replace(task, limits=JobLimits(budget=Money(budget)))
        assert bool(look(make_job(limited), OfferedMarket(offers=[PAID]), half).offers) is fits


def test_nothing_is_hopeless_while_a_place_has_not_answered() -> None:
    task = TaskSpec(
        name="t", run="true", resources=ResourceSpec(accelerators=(AcceleratorNeed(name="H100"),))
    )
    found = look(
        make_job(task),
        OfferedMarket(offers=[FREE], hosts=[HOST], problems=[SilentPlace("cloud", "no answer")]),
    )
    assert not found.hopeless
    assert found.reason.endswith(
        "; without a complete answer: cloud: no answer; `cavvy check cloud` shows more"
    )
    assert found.unusable
    for providers, hopeless in ((("here",), True), (("here", "cloud"), False)):
        bound = replace(task, resources=replace(task.resources, providers=providers))
        found = look(
            make_job(bound),
            OfferedMarket(
                offers=[FREE], hosts=[HOST], problems=[SilentPlace("cloud", "no answer")]
            ),
        )
        assert found.hopeless is hopeless


def test_an_offer_that_failed_is_left_alone_for_a_while() -> None:
    soon = NOW + timedelta(minutes=5)
    job = replace(make_job(), avoid={FREE.key: soon})
    assert look(job, OfferedMarket(offers=[FREE, PAID], hosts=[HOST])).offers == (PAID,)
    alone = look(job, OfferedMarket(offers=[FREE], hosts=[HOST]))
    assert (alone.offers, alone.hopeless, alone.again_at) == ((), False, soon)
    failed = replace(job, setback="no capacity")
    once = look(failed, OfferedMarket(offers=[FREE], hosts=[HOST]))
    told = f"no capacity; Cavvy tries again at {soon:%H:%M:%S} UTC"
    assert once.reason == f"{told}; `cavvy check {FREE.provider}` shows more"
    again = look(replace(failed, reason=once.reason), OfferedMarket(offers=[FREE], hosts=[HOST]))
    assert again.reason == once.reason
    refused = replace(job, setback="it was refused", avoid={FREE.key: NOW + timedelta(days=1)})
    found = look(refused, OfferedMarket(offers=[FREE], hosts=[HOST]))
    assert (found.hopeless, found.reason) == (True, "it was refused"), "a person must act"


def test_what_a_provider_refuses_is_passed_on() -> None:
    found = look(
        make_job(),
        OfferedMarket(offers=[FREE], hosts=[HOST]),
        objections=(Objection("image", "no container engine"),),
    )
    assert found.hopeless
    assert found.reason == "here: image: no container engine"


def test_a_gang_that_does_not_fit_the_host_is_refused() -> None:
    task = TaskSpec(name="t", run="true", nodes=5)
    found = look(make_job(task), OfferedMarket(offers=[FREE], hosts=[HOST]))
    assert found.hopeless
    assert "5 nodes with 1 CPU each do not fit" in found.reason


def test_what_no_configured_place_has_is_said_with_the_places() -> None:
    task = TaskSpec(
        name="t",
        run="true",
        resources=ResourceSpec(accelerators=(AcceleratorNeed(name="H100", count_min=8),)),
    )
    found = look(make_job(task), OfferedMarket(offers=[FREE], hosts=[HOST]))
    assert found.hopeless
    assert found.reason == "No offer: none of the configured providers (here) has H100:8"


def test_a_provider_that_is_not_configured_is_named_with_those_that_are() -> None:
    task = TaskSpec(name="t", run="true", resources=ResourceSpec(providers=("aws",)))
    found = look(make_job(task), OfferedMarket(offers=[FREE, PAID], hosts=[HOST]))
    assert found.hopeless
    assert (
        found.reason == "No offer: the task allows only aws (resources.providers), but only these "
        "providers have offers: cloud and here"
    )


@pytest.mark.parametrize("asked", [(), ("azure",)])
def test_offers_that_could_not_be_read_are_not_said_to_be_missing(asked: tuple[str, ...]) -> None:
    task = TaskSpec(name="t", run="true", resources=ResourceSpec(providers=asked))
    problems = [SilentPlace("azure", "the price list cannot be read: HTTP 503")]
    offers = [FREE] if asked else []
    found = look(make_job(task), OfferedMarket(offers=offers, hosts=[HOST], problems=problems))
    assert not found.hopeless
    assert found.reason == (
        "Cavvy cannot read the offers: azure: the price list cannot be read: HTTP 503; "
        "`cavvy check azure` shows more"
    )


def test_a_task_that_lacks_gpus_names_the_broken_driver() -> None:
    broken = replace(HOST, name="here/box", notes=("NVIDIA: the driver reports an error",))
    need = ResourceSpec(accelerators=(AcceleratorNeed(name="H100", count_min=1),))
    task = TaskSpec(name="t", run="true", resources=need)
    market = OfferedMarket(offers=[FREE], hosts=[broken])
    found = look(make_job(task), market)
    assert found.hopeless
    assert "here/box: NVIDIA: the driver reports an error" in found.reason
    assert found.reason.endswith("`cavvy check here` shows more")
    elsewhere = replace(task, resources=replace(need, providers=("cloud",)))
    assert "NVIDIA" not in look(make_job(elsewhere), market).reason


def test_a_volume_that_exists_rules_out_the_offers_of_other_zones() -> None:
    zones = [replace(PAID, zone=zone) for zone in ("a-1", "a-2")]
    everywhere, abroad = replace(PAID, rate=HourlyRate(3_000_000)), replace(PAID, region="b")
    volumes = [VolumeLocation(provider="cloud", names=("vol-1", "data"), region="a", zone="a-2")]
    market = OfferedMarket(offers=[*zones, everywhere, abroad], volumes=volumes)

    def task(source: str, keep: bool = True) -> TaskSpec:
        return TaskSpec(
            name="t",
            run="true",
            volumes=(Volume(kind=VolumeKind.NAMED, source=source, path="/d", keep=keep),),
        )

    for name in ("vol-1", "data"):
        assert look(make_job(task(name)), market).offers == (zones[1], everywhere)
    assert len(look(make_job(task("another")), market).offers) == 4
    assert len(look(make_job(task("data", keep=False)), market).offers) == 4
    none = look(make_job(task("data")), replace(market, offers=[zones[0]]))
    assert none.hopeless
    assert none.reason == "cloud: volumes: data is in a-2 and can be used only there"
    twice = [*volumes, VolumeLocation(provider="cloud", names=("data",), region="b")]
    assert abroad in look(make_job(task("data")), replace(market, volumes=twice)).offers


SLOW = replace(PAID, instance_type="slow", rate=HourlyRate(2_000_000))
FAST = replace(PAID, instance_type="fast", vcpus=8, rate=HourlyRate(3_000_000))
TWICE = Workload(samples=36000.0, rates={"cpu:4": 1.0, "cpu:8": 2.0})


def lined_up(
    work: Workload | None, *offers: Offer, ordered: bool = False, avoid: tuple[str, ...] = ()
) -> list[str]:
    """The types that a job with a wish for each offer is tried at, in order."""
    wishes = tuple(ResourceSpec(instance=offer.instance_type) for offer in offers)
    resources = replace(wishes[0], any_of=wishes, ordered=ordered)
    job = make_job(TaskSpec(name="t", run="true", nodes=2, work=work, resources=resources))
    market = OfferedMarket(offers=offers)
    lines = rank_candidates([(each, look(each, market)) for each in jobs_of(job)], avoid)
    assert all(
        job.task.resources.instance == offer.instance_type
        for job, found in lines
        for offer in found
    )
    return [offer.instance_type for _, found in lines for offer in found]


def test_of_several_wishes_the_one_that_finishes_at_the_least_cost_comes_first() -> None:
    assert lined_up(TWICE, SLOW, FAST) == ["fast", "slow"], (
        "twice as fast for one and a half times the price"
    )
    assert lined_up(None, FAST, SLOW) == ["slow", "fast"], "without work the price per hour decides"
    assert lined_up(TWICE, SLOW, FAST, ordered=True) == ["slow", "fast"]


def test_a_wish_whose_place_failed_others_a_moment_ago_or_is_full_comes_last() -> None:
    assert lined_up(TWICE, SLOW, FAST, avoid=(FAST.key,)) == ["slow", "fast"]
    assert lined_up(TWICE, SLOW, replace(FAST, capacity=1)) == ["slow", "fast"]


def test_a_wish_with_an_order_of_its_own_keeps_it() -> None:
    third = replace(PAID, instance_type="third", rate=HourlyRate(1_000_000))
    wishes = (ResourceSpec(cpus_min=1), ResourceSpec(cpus_min=2))
    first, second = jobs_of(
        make_job(TaskSpec(name="t", run="true", resources=replace(wishes[0], any_of=wishes)))
    )
    lines = rank_candidates(
        [(first, Candidates(offers=(FAST, third))), (second, Candidates(offers=(SLOW,)))]
    )
    assert [(job, offers) for job, offers in lines] == [(second, (SLOW,)), (first, (FAST, third))]


def test_what_is_said_of_all_wishes_together() -> None:
    """Hopeless only where each of them is, and tried again when the first of them may be."""
    soon, late = NOW + timedelta(minutes=1), NOW + timedelta(minutes=2)
    never = Candidates(reason="No offer: no H100", hopeless=True)
    cooldowns, other = (
        Candidates(reason="refused", again_at=late),
        Candidates(reason="full", again_at=soon),
    )
    assert merge([never]) is never
    both = merge([never, replace(never, reason="No offer: no A100")])
    assert (both.hopeless, both.reason) == (True, "No offer: no H100; or No offer: no A100")
    waits = merge([never, cooldowns, other, other])
    assert (waits.hopeless, waits.reason, waits.again_at) == (False, "refused; or full", soon)
    assert merge([Candidates(offers=(SLOW,)), Candidates(offers=(FAST,))]).offers == (
        SLOW,
        FAST,
    )


def test_of_the_sizes_of_a_job_only_the_least_is_a_reason() -> None:
    """The same sentence with each number of nodes says no more."""
    task = TaskSpec(name="t", run="true", nodes=3, elastic=NodeRange(least=3, most=200))
    sizes = jobs_of(make_job(task))
    full, never = [
        [Candidates(reason=f"{each.task.nodes} nodes", hopeless=hopeless) for each in sizes]
        for hopeless in (False, True)
    ]
    assert len(sizes) > 2
    assert merge_candidates([*zip(sizes, never, strict=True)]).reason == "3 nodes"
    some = [*never[:2], *full[2:-1], never[-1]]
    waits = merge_candidates([*zip(sizes, some, strict=True)])
    assert not waits.hopeless
    assert waits.reason == f"{sizes[-2].task.nodes} nodes", "what can start at some time"


def test_the_decision_for_several_wishes_is_that_of_one_which_has_offers_if_any_has() -> None:
    waits, goes = (PlanState(at=NOW, mode=mode, reason=mode) for mode in ("idle", "spot"))
    idle, there = (
        Candidates(reason="waits: idle", plan_state=waits),
        Candidates(offers=(FAST,), reason="spot", plan_state=goes),
    )
    assert merge([idle, there]).plan_state == goes
    assert merge([idle, Candidates(offers=(FAST,))]).plan_state is None, (
        "what is gone to was not decided by the policy"
    )
    assert merge([idle, idle]).plan_state == waits, (
        "a job that waits by decision is told so, however many wishes it has"
    )


def test_each_shared_host_is_a_candidate_however_many_there_are() -> None:
    """Else a job waits for the first hosts while others are idle."""
    names = [f"{number:02}" for number in range(30)]
    market = OfferedMarket(
        offers=[
            *(replace(FREE, region=name) for name in names),
            *(replace(PAID, region=name) for name in names),
        ],
        hosts=[replace(HOST, name=f"here/{name}") for name in names],
    )
    found = look(replace(make_job_record("j"), consented=True), market).offers
    assert [each.region for each in found if each.shared] == names
    assert len(found) == 30


def test_each_kind_of_host_is_checked_and_equal_hosts_once() -> None:
    """Hosts that differ in what a job needs are not taken for equal."""
    fits = Host(name="p/a", cpus=4, memory_mib=4096, disk_gib=100)
    others = {"cpus": 1, "memory_mib": 1, "disk_gib": 1}
    hosts = [fits, replace(fits, name="p/b")]
    hosts += [replace(fits, name=f"p/{name}", **{name: much}) for name, much in others.items()]
    offers = [replace(FREE, provider="p", region=host.name[2:]) for host in hosts]
    need = ResourceSpec(cpus_min=2, memory_min_mib=2048, disk_gib=50)
    task = TaskSpec(name="n", run="x", resources=need)
    market = OfferedMarket(offers=offers, hosts=hosts)
    job = JobRecord(id="j", project="p", name="n", task=task, submitted_at=NOW, since=NOW)
    found = find_candidates(
        job,
        market,
        match(job, market),
        lambda task, account: [],
        situation=PlanningContext(),
        now=NOW,
    )
    assert [offer.region for offer in found.offers] == ["a", "b"]
