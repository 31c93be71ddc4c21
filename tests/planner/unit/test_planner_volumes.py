"""Which offers can have the volumes that a task names."""

import pytest

from cavvy.domain.allocations import VolumeLocation
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import ResourceSpec, TaskSpec, Volume, VolumeKind
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.planner.objections import explain_misplaced, say_bound


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


def test_a_volume_that_only_another_provider_has_is_not_made_unless_it_has_a_size() -> None:
    known = [replace(place("a", None), provider="other")]
    objection = explain_misplaced(task("a"), offer(), known, makers={"cloud"})
    assert objection is not None
    assert "a is a volume of other" in objection.reason
    # a volume that a task names is there, if nothing makes one, or if no other place may be used
    assert explain_misplaced(task("a"), offer(), known) is None
    here = replace(task("a"), resources=ResourceSpec(providers=("cloud",)))
    assert explain_misplaced(here, offer(), known, makers={"cloud"}) is None
    (volume,) = task("a").volumes
    new = replace(task("a"), volumes=(replace(volume, size_gib=5),))
    assert explain_misplaced(new, offer(), known, makers={"cloud"}) is None
    assert explain_misplaced(task("b"), offer(), known, makers={"cloud"}) is None


def test_a_volume_that_a_place_may_have_without_telling_is_not_made_elsewhere() -> None:
    objection = explain_misplaced(task("a"), offer(), [], unlisted={"k8s"}, makers={"cloud"})
    assert objection is not None
    assert objection.reason == (
        "a may be a volume of k8s; for a new one here, name only `cloud` in "
        "`resources.providers`, or state the volume's `size`"
    )
    assert explain_misplaced(task("a"), offer(), [], unlisted={"cloud"}) is None  # it is here
    (volume,) = task("a").volumes
    for other in (replace(volume, size_gib=9), replace(volume, keep=False)):
        new = replace(task("a"), volumes=(other,))
        assert explain_misplaced(new, offer(), [], unlisted={"k8s"}, makers={"cloud"}) is None


@pytest.mark.parametrize(
    ("providers", "size_gib", "told"),
    [
        ((), None, "the location of a is currently unknown"),
        (("cloud", "other"), None, "the location of a is currently unknown"),
        (("cloud",), None, ""),  # the volume must be there
        ((), 5, ""),
    ],
)
def test_a_volume_that_a_silent_provider_may_have_is_not_made_elsewhere(
    providers: tuple[str, ...], size_gib: int | None, told: str
) -> None:
    (volume,) = task("a").volumes
    named = replace(
        task("a"),
        volumes=(replace(volume, size_gib=size_gib),),
        resources=ResourceSpec(providers=providers),
    )
    objection = explain_misplaced(named, offer(), [], {"other"}, makers={"cloud"})
    assert (objection.reason if objection else "") == told
    assert explain_misplaced(named, offer(), [], {"other"}) is None, "nothing is made"
    here = [place("a", None)]
    assert explain_misplaced(named, offer(), here, {"other"}, makers={"cloud"}) is None


def test_a_volume_of_another_project_is_none() -> None:
    elsewhere = replace(place("a", "r1a"), project="p")
    named = replace(task("a"), project="p")
    assert explain_misplaced(named, offer(zone="r1b"), [elsewhere]) is not None
    assert explain_misplaced(replace(named, project="q"), offer(zone="r1b"), [elsewhere]) is None


def test_of_two_providers_that_make_volumes_and_have_one_of_a_name_the_task_names_one() -> None:
    both = [place("a", None), replace(place("a", "h1"), provider="other")]
    objection = explain_misplaced(task("a"), offer(), both, makers={"cloud", "other"})
    assert objection is not None
    assert objection.reason == (
        "cloud and other each have a volume a; name one of them in `resources.providers`"
    )
    here = replace(task("a"), resources=ResourceSpec(providers=("cloud",)))
    assert explain_misplaced(here, offer(), both, makers={"cloud", "other"}) is None


def test_a_wait_tells_which_host_has_the_volume_and_a_lost_host_what_to_do() -> None:
    mine = replace(offer(zone="h1"), shared=True)
    known = [place("a", "h1"), replace(place("b", "h1"), project="other")]
    assert say_bound(task("a", "b"), [mine], known) == "only h1 has the volume a"
    assert say_bound(task("a"), [offer(zone="h1")], known) == "", "a cloud's zone"
    lost = [replace(place("a", "h2"), problem="h2, which is gone: list it")]
    objection = explain_misplaced(task("a"), mine, lost)
    assert objection is not None
    assert objection.reason == "a is on h2, which is gone: list it"
