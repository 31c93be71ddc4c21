"""The instance type of an exported task, found without reading all offers of a cloud."""

from collections.abc import Sequence

import pytest
from tests.records import make_offer

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import ResourceSpec, TaskSpec
from cavvy.providers.base import Refused
from cavvy.providers.formats import choose_machine
from cavvy.providers.formats.services.azure_batch import FORMAT
from cavvy.store.snapshot.reader import find_offers

TASK = TaskSpec(name="t", run="true")
OFFERS = [make_offer(f"fake/r/odd-{at}", 1000 + at) for at in range(2500)]
OFFERS += [make_offer("fake/r/good-1", 5000), make_offer("fake/r/good-2", 6000)]


def find(need: ResourceSpec, limit: int | None) -> Sequence[Offer]:
    return OFFERS[:limit]


def test_the_cheapest_supported_type_is_found_behind_many_others() -> None:
    found = choose_machine(TASK, find, "fake", "A", lambda name: name.startswith("good"))
    assert found.instance_type == "good-1"
    found = choose_machine(TASK, find, "fake", "A", lambda name: name.endswith("7"))
    assert found.instance_type == "odd-7"
    with pytest.raises(Refused, match="no instance type of A fits"):
        choose_machine(TASK, find, "fake", "A", lambda name: False)


def test_not_all_offers_of_a_cloud_are_read() -> None:
    asked: list[tuple[int | None, int]] = []

    def count(need: ResourceSpec, limit: int | None) -> Sequence[Offer]:
        found = find_offers(need, limit)
        asked.append((limit, len(found)))
        return found

    FORMAT.write(TASK, count)
    assert asked
    assert all(limit is not None and read <= limit for limit, read in asked)
