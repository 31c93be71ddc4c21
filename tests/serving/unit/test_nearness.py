"""Replicas are assigned to tiers by their round trips, and places are named by their regions."""

import pytest
from tests.serving.unit.test_decide_service import SPEC, TASK

from cavvy.capabilities.serving.server.relays import FARTHEST, RoundTrips, add_round_trip
from cavvy.catalog.regions import list_places_within, places_of
from cavvy.control.decide.task_places import list_possible_places
from cavvy.domain.tasks import ResourceSpec
from cavvy.domain.values import replace


def measure(*milliseconds: float) -> list[int | None]:
    """The tier after each round trip."""
    known, tiers = RoundTrips(), []
    for each in milliseconds:
        known = add_round_trip(known, each / 1000)
        tiers.append(known.tier)
    return tiers


def test_tiers_are_a_zone_a_region_a_continent_and_the_rest() -> None:
    assert [measure(each) for each in (0.2, 12, 80, 150)] == [[0], [1], [2], [FARTHEST]]
    assert RoundTrips().tier is None


def test_a_slow_answer_moves_no_replica_but_a_slow_network_does() -> None:
    assert measure(2, 400, 90, 2, 700) == [0] * 5, "noise only makes round trips longer"
    assert measure(2, *[80] * 6) == [0] * 6 + [2], "after six measurements it is no noise"
    assert measure(80, 2) == [2, 0], "one short round trip proves that the replica is near"


def test_a_replica_at_a_bound_keeps_its_tier() -> None:
    assert measure(28, *[33] * 9) == [1] * 10
    assert measure(33, *[28] * 9) == [2] * 10
    assert measure(28, *[38] * 6)[-1] == 2
    assert measure(33, 23)[-1] == 1


def test_a_place_has_the_names_of_its_region_country_and_area() -> None:
    assert places_of("aws", "eu-west-1") == {"eu-west-1", "ie", "eu", "europe"}
    assert places_of("aws", "eu-west-2") == {"eu-west-2", "gb", "uk", "eu", "europe"}
    assert places_of("local", "local") == {"local"}, "its location is unknown"
    assert list_places_within("eu-west-1") == places_of("aws", "eu-west-1")
    assert {"eu", "de", "fr"} <= list_places_within("Europe")
    assert list_places_within("de") == {"de", "eu", "europe"}
    assert {"us-central1", "us"} <= list_places_within("us-central1-a")


@pytest.mark.parametrize(
    ("spec", "needs", "may", "never"),
    [
        ({}, ResourceSpec(), {"eu", "us", "jp"}, set()),
        ({"residency": "eu"}, ResourceSpec(), {"eu", "de"}, {"us", "jp"}),
        ({"regions": ("eu-west-1", "us")}, ResourceSpec(), {"eu", "ie", "us"}, {"de", "jp"}),
        ({}, ResourceSpec(regions=("de",)), {"eu", "de"}, {"ie", "us"}),
        (
            {},
            ResourceSpec(any_of=(ResourceSpec(regions=("de",)), ResourceSpec())),
            {"us", "jp"},
            set(),
        ),
    ],
)
def test_a_service_has_the_places_in_which_its_replicas_may_be(
    spec: dict[str, object], needs: ResourceSpec, may: set[str], never: set[str]
) -> None:
    task = replace(TASK, resources=needs, service=replace(SPEC, **spec))
    found = set(list_possible_places(task))
    assert may <= found
    assert not never & found
