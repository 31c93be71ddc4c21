"""Reads offers from the catalog in use, for commands that need nothing else of the catalog and for
providers whose APIs report no prices.
"""

import logging
from collections.abc import Sequence

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import ResourceSpec, SpotPolicy
from cavvy.store.snapshot.layout import SnapshotError
from cavvy.store.snapshot.reader import CatalogSnapshot

_log = logging.getLogger(__name__)


def find_offers(need: ResourceSpec, limit: int | None = None) -> Sequence[Offer]:
    """Return the catalog's offers that fit, the cheapest first. Raises SnapshotError."""
    with CatalogSnapshot.open() as snapshot:
        return snapshot.match(need, limit=limit, misses=0).offers


def list_prices(provider: str) -> Sequence[Offer]:
    """Return the on-demand and spot offers of a provider from the catalog. The result is empty if
    there is no catalog.
    """
    return _list_prices(provider, None)


def list_instance(provider: str, instance: str) -> Sequence[Offer]:
    """Return the on-demand and spot offers of an instance type in the catalog. The result is empty
    if there is no catalog.
    """
    return _list_prices(provider, instance)


def _list_prices(provider: str, instance: str | None) -> Sequence[Offer]:
    need = ResourceSpec(providers=(provider,), instance=instance, spot=SpotPolicy.AUTO)
    try:
        return find_offers(need)
    except SnapshotError as error:
        _log.warning("no catalog: prices of %s are unknown", provider, exc_info=error)
        return ()
