"""Adds the calls of services that are due by a cron line to their queues."""

from datetime import datetime, timedelta

from cavvy.control.clock import ControlClock
from cavvy.control.decide.ticks import call_at, find_last, find_next, make_anchor
from cavvy.domain.services import CronTrigger
from cavvy.domain.stored_services import StoredService
from cavvy.store.base import Store

_NEVER = timedelta(days=1)  # until a trigger is looked at again whose line matches no day
# The last time of a line causes a call only if it has passed within this time: it must be shorter
# than `IDS_KEPT`, so that the ID of a time is known as long as the time may cause a call.
_MADE_UP = timedelta(days=30)


class CronTicks:
    """Adds the calls of cron lines. The due times follow from rows of the queue, so that a server
    that takes over adds no call twice. This object only caches them.
    """

    def __init__(self, store: Store, clock: ControlClock) -> None:
        self._store, self._clock = store, clock
        # by the ID of the service: the last time that was found, and the next one
        self._found: dict[tuple[str, CronTrigger], tuple[datetime, datetime]] = {}

    async def add_due(self, service: StoredService) -> timedelta | None:
        """Add the calls that are due. Return the time until the next one; None without triggers."""
        after = [await self._add(service, each) for each in service.spec.crons]
        return min(after, default=None)

    async def _add(self, service: StoredService, trigger: CronTrigger) -> timedelta:
        now, key = self._clock.now(), (service.id, trigger)
        since, upcoming = self._found.get(key) or (await self._find_since(service, trigger), None)
        if upcoming is None or upcoming <= now:
            if due := find_last(trigger, since, now):
                call, body = call_at(service, trigger, due), trigger.body.encode()
                await self._store.queued_calls.add([(call, body)])
            upcoming = find_next(trigger, now) or now + _NEVER
            self._found[key] = due or since, upcoming
        return upcoming - now

    async def _find_since(self, service: StoredService, trigger: CronTrigger) -> datetime:
        """Return the time after which the trigger causes calls."""
        calls, anchor = self._store.queued_calls, make_anchor(service, trigger, self._clock.now())
        if not await calls.add([(anchor, b"")]):
            anchor = await calls.get(anchor.project, anchor.service, anchor.id)
        known = max(anchor.submitted_at, service.created_at)
        return max(known, self._clock.now() - _MADE_UP)
