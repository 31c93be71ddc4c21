"""Offers that only a task with a machine image of its own can use are rejected while planning, with
the reason for which a launch would be refused.
"""

from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from tests.records import make_offer

from cavvy.domain.jobs import JobRecord
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import ProviderOptions, ResourceSpec, TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.planner.candidates import Candidates, OfferedMarket, find_candidates, match
from cavvy.planner.placements import PlanningContext
from cavvy.providers.azure.machines import find_default as find_azure
from cavvy.providers.gcp.instance import find_default as find_google
from cavvy.providers.oci.market import find_default as find_oracle
from cavvy.providers.required_images import require_images

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FREE = HourlyRate(0)
V100 = make_offer("gcp/a/n1-standard-8-v100x1", 0, accelerator="V100", accelerator_count=1)
T4 = replace(V100, instance_type="n1-standard-8-t4x1", accelerator="T4")
PART = replace(
    V100,
    provider="azure",
    instance_type="Standard_NV6ads_A10_v5",
    accelerator="A10",
    accelerator_part=1 / 6,
)
AMD = replace(V100, provider="oci", instance_type="BM.GPU.MI300X.8", accelerator="MI300X")


def look(offers: list[Offer], need: ResourceSpec) -> Candidates:
    task = TaskSpec(name="t", run="true", resources=need)
    job = JobRecord(id="j", project="p", name="n", task=task, submitted_at=NOW, since=NOW)
    market = OfferedMarket(offers=tuple(offers))
    known = PlanningContext()
    return find_candidates(job, market, match(job, market), lambda *_: (), situation=known, now=NOW)


@pytest.mark.parametrize(
    ("offer", "find_default"),
    [(V100, find_google), (PART, find_azure), (AMD, find_oracle)],
    ids=["gcp", "azure", "oci"],
)
def test_an_offer_without_an_image_is_planned_only_for_tasks_that_name_one(
    offer: Offer, find_default: Callable[[Offer], object]
) -> None:
    (marked,) = require_images([offer], None, find_default)
    found = look([marked], ResourceSpec())
    assert found.hopeless
    assert found.reason.startswith(f"{offer.provider}: image: ")
    assert "name an image in the setting `image`" in found.reason
    own = ProviderOptions(provider=offer.provider, values='{"image": "mine"}')
    assert look([marked], ResourceSpec(options=(own,))).offers == (marked,)
    assert require_images([offer], "mine", find_default) == [offer]


def test_other_offers_are_used_instead() -> None:
    offers = require_images([V100, T4], None, find_google)
    assert look(offers, ResourceSpec()).offers == (T4,)
