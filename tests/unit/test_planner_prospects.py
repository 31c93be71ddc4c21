"""Which offers a waiting job may use, and what it is told where there is none."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from remuda.domain.jobs import Job
from remuda.domain.offers import Offer
from remuda.domain.places import Host
from remuda.domain.tasks import AcceleratorNeed, Checkpoint, Limits, Resources, Task, Work
from remuda.domain.units import HourlyRate
from remuda.planner.placements import Situation
from remuda.planner.prospects import Market, Prospects, find_prospects, match

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOST = Host(name="here/a", cpus=4, memory_mib=4096)
FREE = Offer(
    provider="here", region="a", instance_type="cpu", vcpus=4, memory_mib=4096, rate=HourlyRate(0), shared=True
)
PAID = replace(FREE, provider="cloud", shared=False, rate=HourlyRate(2_000_000))
WORK = Work(samples=3600.0, rates={"cpu": 1.0})


def look(job: Job, market: Market, situation: Situation | None = None, objections: tuple[str, ...] = ()) -> Prospects:
    known = situation or Situation()
    found = match(job, market)
    return find_prospects(job, market, found, lambda _task, _provider: objections, situation=known, now=NOW)


def make_job(task: Task | None = None, consented: bool = True) -> Job:
    the_task = task or Task(name="t", run="true")
    return Job(id="j", project="p", name="n", task=the_task, submitted_at=NOW, since=NOW, consented=consented)


def test_the_cheapest_comes_first_and_paid_offers_need_consent() -> None:
    market = Market(offers=[PAID, FREE], hosts=[HOST])
    assert look(make_job(), market).offers == (FREE, PAID)
    assert look(make_job(consented=False), market).offers == (FREE,)
    none = look(make_job(consented=False), Market(offers=[PAID]))
    assert none.hopeless
    assert "--yes" in none.reason


def test_what_fits_nowhere_is_said_with_what_would_have_to_change() -> None:
    task = Task(name="t", run="true", resources=Resources(cpus_min=8))
    found = look(make_job(task), Market(offers=[PAID]))
    assert found.hopeless
    assert found.reason.startswith("No offer: ")
    assert "resources.cpu" in found.reason


def test_a_limit_that_no_offer_keeps_is_said_with_what_would_have_to_change() -> None:
    task = Task(name="t", run="true", work=WORK, limits=Limits(duration=timedelta(minutes=30)))
    found = look(make_job(task), Market(offers=[FREE], hosts=[HOST]))
    assert found.hopeless
    assert found.reason.endswith("would run 1h00m, your duration leaves 30m00s; raise limits.duration by 30m00s")


def test_the_rest_of_an_interrupted_job_is_not_ruled_out_by_the_estimate_of_the_whole() -> None:
    limits = Limits(duration=timedelta(minutes=65))
    task = Task(name="t", run="true", work=WORK, limits=limits, checkpoint=Checkpoint(path="c"))
    situation = Situation(ran=timedelta(minutes=30))
    assert look(make_job(task), Market(offers=[FREE], hosts=[HOST]), situation).offers == (FREE,)


def test_nothing_is_hopeless_while_a_place_has_not_answered() -> None:
    task = Task(name="t", run="true", resources=Resources(accelerators=(AcceleratorNeed(name="H100"),)))
    found = look(make_job(task), Market(offers=[FREE], hosts=[HOST], problems=["cloud: no answer"]))
    assert not found.hopeless
    assert found.reason.endswith("; not known: cloud: no answer")


def test_an_offer_that_failed_is_left_alone_for_a_while() -> None:
    soon = NOW + timedelta(minutes=5)
    job = replace(make_job(), avoid={FREE.key: soon})
    assert look(job, Market(offers=[FREE, PAID], hosts=[HOST])).offers == (PAID,)
    alone = look(job, Market(offers=[FREE], hosts=[HOST]))
    assert (alone.offers, alone.hopeless, alone.again_at) == ((), False, soon)


def test_what_a_provider_refuses_is_passed_on() -> None:
    found = look(make_job(), Market(offers=[FREE], hosts=[HOST]), objections=("image: no container engine",))
    assert found.hopeless
    assert found.reason == "here: image: no container engine"


def test_a_gang_that_does_not_fit_the_host_is_refused() -> None:
    task = Task(name="t", run="true", nodes=5)
    found = look(make_job(task), Market(offers=[FREE], hosts=[HOST]))
    assert found.hopeless
    assert "5 nodes with 1 CPU each do not fit" in found.reason


def test_what_no_configured_place_has_is_said_with_the_places() -> None:
    task = Task(name="t", run="true", resources=Resources(accelerators=(AcceleratorNeed(name="H100", count_min=8),)))
    found = look(make_job(task), Market(offers=[FREE], hosts=[HOST]))
    assert found.hopeless
    assert found.reason == "No offer: no place that is configured here (here) has H100:8"


def test_a_provider_that_is_not_configured_is_named_with_those_that_are() -> None:
    task = Task(name="t", run="true", resources=Resources(providers=("aws",)))
    found = look(make_job(task), Market(offers=[FREE, PAID], hosts=[HOST]))
    assert found.hopeless
    assert (
        found.reason
        == "No offer: the task is for aws (resources.providers), and here there are offers of cloud and here only"
    )
