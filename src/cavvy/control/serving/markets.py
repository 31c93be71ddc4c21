"""Finds the markets in which replicas of a service may run, from the offers of all providers."""

from datetime import datetime, timedelta

from cavvy.control.decide.placement import list_usable
from cavvy.control.decide.replica_markets import (
    list_markets,
    merge_markets,
    place_in_regions,
    uses_spot,
)
from cavvy.control.provider_pool import ProviderPool
from cavvy.domain.jobs import JobRecord
from cavvy.domain.stored_services import StoredService
from cavvy.domain.values import replace

_AGE = timedelta(minutes=1)  # maximum age of a service's markets


class ServiceMarkets:
    """The markets of services that may use spot capacity. Services that may not use spot capacity
    have no markets: the planner places their replicas like ordinary jobs.
    """

    def __init__(self, pool: ProviderPool) -> None:
        self._pool = pool
        self._read: dict[str, tuple[int, datetime]] = {}  # ID of a service -> revision, time

    async def update(self, service: StoredService, now: datetime) -> StoredService:
        """Return the service with the markets that its replicas may use now."""
        if not uses_spot(service.task):  # an older revision may have used this market
            return replace(service, markets=(), placement={}) if service.markets else service
        revision, at = self._read.get(service.id, (0, now))
        if service.markets and revision == service.revision and now - at < _AGE:
            return service
        snapshot = await self._pool.market(_AGE)
        job = JobRecord(
            id=service.id,
            project=service.project,
            name=service.name,
            task=place_in_regions(service.task),
            submitted_at=now,
            since=now,
            consented=service.consented,
        )
        offers = list_usable(job, snapshot, self._pool.objections)
        self._read[service.id] = (service.revision, now)
        return merge_markets(service, list_markets(offers))
