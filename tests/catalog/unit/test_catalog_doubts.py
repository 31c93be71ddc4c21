"""Offers that are far from all other offers of their accelerator are in doubt, and no real offer
is.
"""

import asyncio
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import pytest
from tests.records import make_offer

from cavvy.catalog.doubts import OfferJudge
from cavvy.cli.check import _find_doubts
from cavvy.cli.task import market
from cavvy.cli.task.available import _sort_offers
from cavvy.domain.offers import Offer, Readiness
from cavvy.domain.tasks import ResourceSpec, TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.base import Manifest, Provider
from cavvy.providers.contract.sold import read_table
from cavvy.server.open_state import list_doubts
from cavvy.store.snapshot import CatalogSnapshot

STAND_INS = sorted(Path(__file__).parents[2].glob("contract/*_stand_in.py"))
H100S = {"accelerator": "H100", "accelerator_count": 8, "accelerator_memory_mib": 81920}
EIGHT = make_offer("steppe/east/H100-8", 23_200_000, **H100S, vcpus=192, memory_mib=1920 * 1024)


@pytest.fixture(scope="module")
def snapshot() -> Iterator[CatalogSnapshot]:
    with CatalogSnapshot.open() as opened:
        yield opened


@pytest.fixture(scope="module")
def judge(snapshot: CatalogSnapshot) -> OfferJudge:
    return snapshot.make_judge()


def test_no_offer_of_the_snapshot_is_in_doubt(snapshot: CatalogSnapshot, judge: OfferJudge) -> None:
    assert [doubt for each in snapshot.all_offers() if (doubt := judge.doubt(each))] == []


@pytest.mark.parametrize("path", STAND_INS, ids=lambda path: path.stem)
def test_no_offer_of_a_simulated_cloud_is_in_doubt(path: Path, judge: OfferJudge) -> None:
    text = path.read_text()
    for table in re.findall(r'    sells = """\n(.*?)"""', text, re.DOTALL):
        for each in read_table(table):
            fields = {name: getattr(each, name) for name in each.__struct_fields__}
            del fields["price"]
            offer = Offer(provider=path.stem, **fields)
            assert judge.doubt(offer) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rate": HourlyRate(23_200_000 * 730)}, "the price is $2117 an hour for one H100, but"),
        ({"rate": HourlyRate(23_200_000 // 60)}, "the price is $0.04833 an hour for one H100"),
        ({"rate": HourlyRate(23_200_000 // 3600)}, "the median of 18 other providers is $3"),
        ({"rate": HourlyRate(23_200_000 * 100)}, "the price is $290 an hour"),
        ({"rate": HourlyRate(0)}, "the price is $0 an hour"),
        ({"rate": HourlyRate(-1)}, "the price is $-1.25e-07 an hour"),
        ({"accelerator_memory_mib": 80}, "H100 has 0.078125 GiB of memory, but H100 has 80 GiB"),
        ({"accelerator_memory_mib": 8 * 81920}, "H100 has 640 GiB of memory, but H100 has 80 GiB"),
        ({"accelerator_count": 1}, "192 CPUs and 1920 GiB of memory for each H100"),
    ],
)
def test_an_offer_far_from_all_others_is_in_doubt(
    judge: OfferJudge, changes: Mapping[str, object], words: str
) -> None:
    assert judge.doubt(EIGHT) == ""
    doubt = judge.doubt(replace(EIGHT, **changes))  # type: ignore[arg-type]  # of any type
    assert doubt.startswith("steppe/east/H100-8:")
    assert words in doubt
    assert "only if the task names its machine type (resources.instance)" in doubt


def test_the_count_of_a_known_machine_type_is_compared_with_the_catalog(
    judge: OfferJudge,
) -> None:
    offer = replace(EIGHT, provider="aws", instance_type="p5.48xlarge", accelerator_count=1)
    assert "the offer has 1 H100, but the catalog lists this machine type with 8" in judge.doubt(
        offer
    )


def test_own_machines_and_unknown_accelerators_are_not_judged(judge: OfferJudge) -> None:
    free = replace(EIGHT, rate=HourlyRate(0))
    for each in (
        replace(free, owned=True),
        replace(free, shared=True),
        replace(free, accelerator=None, accelerator_count=0),
        replace(EIGHT, accelerator_count=0),
    ):
        assert judge.doubt(each) == ""
    assert OfferJudge(()).doubt(free) == ""
    assert OfferJudge([replace(free, provider="charity")]).doubt(EIGHT) == ""


class Steppe:
    """A provider that offers a machine at a price per month."""

    manifest = Manifest(name="steppe", title="the Steppe", docs="x", test_double=False)

    async def offers(self) -> list[Offer]:
        return [replace(EIGHT, rate=HourlyRate(23_200_000 * 730)), EIGHT]


def test_check_and_the_server_find_offers_in_doubt() -> None:
    facts = asyncio.run(_find_doubts(cast(Provider, Steppe())))
    assert facts[0] == ("offers in doubt", "1 of 2")
    assert "the price is $2117 an hour for one H100" in facts[1][1]
    monthly, right = asyncio.run(Steppe().offers())
    assert list(list_doubts([right])) == []
    assert list_doubts([monthly])[monthly.key] == facts[1][1]


def test_plans_and_ready_offers_do_not_contain_offers_in_doubt() -> None:
    cheap = replace(EIGHT, instance_type="cheap", rate=HourlyRate(23_200_000 // 3600))
    doubts = market.find_doubts([cheap, EIGHT])
    assert list(doubts) == [cheap.key]
    live = market.LiveMarket(
        providers={"steppe": cast(Provider, Steppe())},
        answers={"steppe": market.ProviderAnswer([cheap, EIGHT], ())},
        usable=frozenset({("steppe", "east")}),
        doubts=doubts,
    )
    judge = live.make_judge()
    assert [judge(each) for each in (cheap, EIGHT)] == [Readiness.FAILS, Readiness.READY]
    for instance, kept in ((None, [EIGHT]), ("CHEAP", [cheap])):
        need = ResourceSpec(instance=instance)
        sorted_ = _sort_offers(TaskSpec(name="t", run="x", resources=need), live)
        assert sorted_.fitting == kept
        assert [each.reason for each in sorted_.refused] == ([] if instance else [*doubts.values()])
        assert [*live.match(need, ready=True)["steppe"].offers] == kept
