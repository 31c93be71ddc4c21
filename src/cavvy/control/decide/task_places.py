"""The places in which a job, or the replicas of a service, may run, as its task says."""

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet

from cavvy.catalog.regions import (
    list_known_places,
    list_places_around,
    list_places_within,
    wished_place,
)
from cavvy.domain.offers import list_sellers
from cavvy.domain.services import HERE
from cavvy.domain.tasks import ResourceSpec, TaskSpec, take_role
from cavvy.domain.values import replace


def list_elsewhere(task: TaskSpec, providers: Collection[str]) -> tuple[str, ...]:
    """Return the providers where the task may run, except the server's own machine."""
    choices = task.resources.choices
    named = {each for need in choices for each in list_sellers(need.providers) or providers}
    return tuple(sorted(named & {*providers} - {HERE}))


def place_in_regions(task: TaskSpec) -> TaskSpec:
    """Return the task, restricted to the regions and the area of its service, if it has one."""
    spec = task.service
    if spec is None:
        return task
    regions = spec.regions or ((spec.residency,) if spec.residency else ())

    def restrict(needs: ResourceSpec) -> ResourceSpec:
        kept = needs.regions if spec.residency and not spec.regions else ()
        return replace(needs, regions=kept or regions)

    if not regions:
        return task
    choices = tuple(restrict(each) for each in task.resources.any_of)
    return replace(task, resources=replace(restrict(task.resources), any_of=choices))


def is_bound_to_places(task: TaskSpec) -> bool:
    """Return whether the replicas of the service must run in some regions."""
    return all(each.regions for each in place_in_regions(task).resources.choices)


def stays_within(task: TaskSpec, other: TaskSpec) -> bool:
    """Return whether each replica of the service runs where replicas of the other service may."""
    if not is_bound_to_places(other):
        return True
    return _runs_in(task, {wished_place(name) for name in _list_regions(other)})


def is_within(task: TaskSpec, place: str) -> bool:
    """Return whether each replica of the service, or the job, runs in this place, such as eu."""
    return _runs_in(task, {wished_place(place)})


def _runs_in(task: TaskSpec, allowed: AbstractSet[str]) -> bool:
    parts = [take_role(task, each) for each in task.replica_groups] or [task]
    return all(
        is_bound_to_places(each)
        and all(allowed & list_places_around(name) for name in _list_regions(each))
        for each in parts
    )


def _list_regions(task: TaskSpec) -> Sequence[str]:
    return [name for each in place_in_regions(task).resources.choices for name in each.regions]


def list_possible_places(task: TaskSpec) -> tuple[str, ...]:
    """Return the names of the places in which a replica of the service may run. For a service that
    may run in any region, the result contains all areas and countries.
    """
    needs = [each.regions for each in place_in_regions(task).resources.choices]
    if not all(needs):
        return tuple(sorted(list_known_places()))
    found = [list_places_within(region) for regions in needs for region in regions]
    return tuple(sorted(frozenset().union(*found)))
