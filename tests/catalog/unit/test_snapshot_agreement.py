"""The snapshot's SQL and the pure functions of `catalog/fit.py` give the same answer to every
need.
"""

from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cavvy.catalog.fit import Constraint, match_offers
from cavvy.catalog.needs import parse_accelerator
from cavvy.domain.offers import Purchase
from cavvy.domain.tasks import Fabric, NetworkNeed, ResourceSpec, SpotPolicy
from cavvy.domain.units import HourlyRate, parse_rate
from cavvy.domain.values import replace
from cavvy.store.snapshot import CatalogSnapshot
from cavvy.store.snapshot.choose import SHIPPED
from cavvy.store.snapshot.refresh import write_snapshot

REQUESTS = [
    "A100:8",
    "A100:80GB:8",
    "A100:40GB..80GB:1..4",
    "H100:8",
    "H100-SXM:8",
    "H100|A100:8",
    "24GB",
    "nvidia:1",
    "gpu:1..",
    "tpu:1",
    "fpga:1..8",
    "amd:8",
    "V100:16GB:4",
    "any:3",
    "B200:8|H200:8",
    "MI300X:1",
    "H100-NVL:2..4",
    "A10:0.3",
    "A10:0.167",
    "L4:1/4|A10:1/6",
    "TPU-v5e:8",
]
REGIONS = [
    "eu",
    "us",
    "asia",
    "uk",
    "de",
    "us-east-1",
    "us-central1-a",
    "US-EAST-1",
    "europe-west4",
    "africa",
    "use1-az1",
    "nowhere",
]
KINDS = {"aws", "azure", "gcp", "nebius", "verda", "vast", "lambda", "oci"}


class Sample:
    """Real rows of every kind, in memory and as a snapshot."""

    def __init__(self, path: Path) -> None:
        with CatalogSnapshot.open(SHIPPED) as shipped:
            offers = list(shipped.all_offers())
        plain = [offer for offer in offers if offer.accelerator is None][::250]
        whole = [offer for offer in offers if offer.accelerator and offer.accelerator_part == 1]
        accelerated = whole[::7]
        accelerated += [offer for offer in offers if offer.accelerator_part < 1][::9]
        reserved = [
            replace(offer, purchase=Purchase.RESERVED, term_months=months)
            for offer in accelerated[::10]
            for months in (12, 36)
        ]
        # one offer for each key; the shipped offers have prices with a commitment, too
        every = {offer.key: offer for offer in plain + accelerated + reserved}
        self.offers = list(every.values())
        write_snapshot(path, self.offers, as_of=date(2026, 11, 20))
        self.snapshot = CatalogSnapshot.open(path)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sample]:
    made = Sample(tmp_path_factory.mktemp("catalog") / "sample.db")
    yield made
    made.snapshot.close()


@st.composite
def needs(draw: st.DrawFn) -> ResourceSpec:
    low, more = draw(st.tuples(st.sampled_from([1, 4, 8, 30, 96]), st.sampled_from([0, 4, 100])))
    memory, more_memory = draw(
        st.tuples(st.sampled_from([1, 16, 32, 640]), st.sampled_from([0, 200]))
    )
    cpus = draw(st.sampled_from([(None, None), (low, None), (low, low + more), (None, low)]))
    memories = draw(st.sampled_from([(None, None), (memory, None), (memory, memory + more_memory)]))
    mib = tuple(None if size is None else size * 1024 for size in memories)
    request = draw(st.none() | st.sampled_from(REQUESTS))
    network = draw(st.none() | st.sampled_from([10_000, 400_000, 3_200_000]))
    fabric = draw(st.none() | st.sampled_from(Fabric)) if draw(st.booleans()) else None
    rate = draw(st.none() | st.sampled_from(["0.05", "1", "3.67", "15", "40"]))
    return ResourceSpec(
        instance=draw(
            st.none() | st.sampled_from(["p4d.24xlarge", "STANDARD_ND96ASR_V4", "no-such-type"])
        )
        if draw(st.integers(0, 5)) == 0
        else None,
        accelerators=parse_accelerator(request) if request else (),
        cpus_min=cpus[0],
        cpus_max=cpus[1],
        memory_min_mib=mib[0],
        memory_max_mib=mib[1],
        memory_per_cpu_mib=draw(
            st.none() | st.sampled_from([3 * 1024, 4 * 1024, 8 * 1024 + 1, 100 * 1024])
        ),
        disk_gib=draw(st.none() | st.sampled_from([100, 2000, 50_000])),
        spot=draw(st.sampled_from(SpotPolicy)),
        providers=tuple(draw(st.lists(st.sampled_from(sorted(KINDS)), max_size=2, unique=True))),
        regions=tuple(draw(st.lists(st.sampled_from(REGIONS), max_size=2, unique=True))),
        network=NetworkNeed(min_mbps=network, fabric=fabric) if network or fabric else None,
        max_rate=parse_rate(rate) if rate else None,
    )


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(need=needs(), limit=st.none() | st.integers(0, 40), misses=st.integers(0, 7))
def test_sql_and_the_pure_functions_agree(
    sample: Sample, need: ResourceSpec, limit: int | None, misses: int
) -> None:
    expected = match_offers(sample.offers, need, limit=limit, misses=misses)
    found = sample.snapshot.match(need, limit=limit, misses=misses)
    assert found.offers == expected.offers
    assert (found.matched, found.total, dict(found.rejected)) == (
        expected.matched,
        expected.total,
        dict(expected.rejected),
    )
    assert found.misses == expected.misses
    assert found.matched + sum(found.rejected.values()) == found.total == len(sample.offers)


def test_a_reserved_offer_fits_no_task_and_is_listed_on_request(sample: Sample) -> None:
    need = ResourceSpec(accelerators=parse_accelerator("gpu:1.."), spot=SpotPolicy.AUTO)
    assert all(
        offer.purchase is not Purchase.RESERVED for offer in sample.snapshot.match(need).offers
    )
    assert {
        offer.purchase
        for offer in sample.snapshot.match(need, purchases=(Purchase.RESERVED,)).offers
    } == {Purchase.RESERVED}
    assert any(offer.purchase is Purchase.RESERVED for offer in sample.offers)


def test_near_misses_say_what_would_have_to_change() -> None:
    with CatalogSnapshot.open(SHIPPED) as shipped:
        need = ResourceSpec(
            accelerators=parse_accelerator("H100:8"),
            regions=("eu",),
            max_rate=HourlyRate(15_000_000),
        )
        answer = shipped.match(need)
        assert answer.matched == 0
        assert len(answer.misses) == 5
        nearest = answer.misses[0]
        assert nearest.constraint is Constraint.PRICE
        assert nearest.text == f"costs ${nearest.offer.rate.usd:.2f}/h, your limit is $15.00/h"
        within = replace(need, max_rate=nearest.offer.rate)
        assert shipped.match(within).offers[0] == nearest.offer, (
            "raising the limit as told gives that offer"
        )


def test_prices_that_print_alike_are_told_apart() -> None:
    with CatalogSnapshot.open(SHIPPED) as shipped:
        limit = HourlyRate(999_999)
        answer = shipped.match(ResourceSpec(cpus_min=4, max_rate=limit), limit=1)
        texts = [miss.text for miss in answer.misses if miss.constraint is Constraint.PRICE]
        assert texts
        for text in texts:
            price, bound = text.removeprefix("costs ").split(", your limit is ")
            assert price != bound
