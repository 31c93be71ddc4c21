"""Which offers can have the volumes that a task names."""

import pytest

from cavvy.domain.allocations import VolumeLocation
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec, Volume, VolumeKind
from cavvy.domain.units import HourlyRate
from cavvy.planner.objections import explain_misplaced


def offer(region: str = "r1", zone: str | None = None) -> Offer:
    return Offer(provider="cloud", region=region, zone=zone, instance_type="m", rate=HourlyRate(1))


def task(*names: str) -> TaskSpec:
    return TaskSpec(
        name="t",
        run="x",
        volumes=tuple(Volume(kind=VolumeKind.NAMED, source=n, path=f"/{n}") for n in names),
    )


def place(name: str, zone: str | None, region: str = "r1") -> VolumeLocation:
    return VolumeLocation(provider="cloud", names=(name,), region=region, zone=zone)


@pytest.mark.parametrize(
    ("names", "where", "places", "told"),
    [
        (
            ("a",),
            offer(),
            [place("a", "r1a")],
            "",
        ),  # its provider starts the node in the volume's zone
        (("a",), offer(zone="r1b"), [place("a", "r1a")], "a is in r1a"),
        (("a",), offer("r2"), [place("a", "r1a")], "a is in r1a"),
        (("a", "b"), offer(), [place("a", "r1a"), place("b", "r1a")], ""),
        (
            ("a", "b"),
            offer(),
            [place("a", "r1a"), place("b", "r1b")],
            "a and b are in different zones of r1",
        ),
        (("a", "b"), offer(), [place("a", "r1a"), place("b", None)], ""),
        (("a", "b"), offer(), [place("a", "r1a"), place("b", "r1b"), place("b", "r1a")], ""),
        (("a", "b"), offer(), [place("a", "r1a"), place("b", "r2a", "r2")], "b is in r2a"),
        (
            ("a", "b", "c"),
            offer(),
            [place("a", "r1a"), place("b", "r1a"), place("b", "r1b"), place("c", "r1b")],
            "a and c are in different zones of r1",
        ),
        (("a", "new"), offer("r2"), [], ""),
    ],
)
def test_volumes_bind_an_offer_to_one_zone(
    names: tuple[str, ...], where: Offer, places: list[VolumeLocation], told: str
) -> None:
    objection = explain_misplaced(task(*names), where, places)
    assert bool(objection) == bool(told)
    assert objection is None or told in objection.reason
