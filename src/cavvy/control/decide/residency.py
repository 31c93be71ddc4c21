"""Finds the places in which the replicas of a service run or may run. A request can name the place
in which it must stay.
"""

from cavvy.catalog.regions import list_known_places, list_places_within, places_of
from cavvy.control.decide.replica_markets import place_in_regions
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec


def find_places(offer: Offer) -> tuple[str, ...]:
    """Return the names of the known places in which a replica on this offer runs."""
    return tuple(sorted(places_of(offer.provider, offer.region)))


def list_possible_places(task: TaskSpec) -> tuple[str, ...]:
    """Return the names of the places in which a replica of the service may run. For a service that
    may run in any region, the result contains all areas and countries.
    """
    needs = [each.regions for each in place_in_regions(task).resources.choices]
    if not all(needs):
        return tuple(sorted(list_known_places()))
    found = [list_places_within(region) for regions in needs for region in regions]
    return tuple(sorted(frozenset().union(*found)))
