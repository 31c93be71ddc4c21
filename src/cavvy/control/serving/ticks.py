"""Adds the calls that cron lines trigger to the queues of their services."""

from datetime import datetime, timedelta

from cavvy.control.clock import ControlClock
from cavvy.control.decide.ticks import call_at, find_last, find_next, make_anchor
from cavvy.domain.services import CronTrigger
from cavvy.domain.stored_services import StoredService
from cavvy.store.sql import Store

_NEVER = timedelta(days=1)  # pause before the next check of a trigger whose line matches no day
# The last time of a line causes a call only if that time is not longer ago than this. The value is
# shorter than `IDS_KEPT`, so that the ID of an earlier call for the same time is still known.
_MADE_UP = timedelta(days=30)


_Times = tuple[datetime, datetime]


class CronTicks:
    """Queues a call of a service at each time of the service's cron lines. The due times are
    computed from the queue's rows, so that a server that takes over adds no call twice. An object
    of this class only caches the due times.
    """

    def __init__(self, store: Store, clock: ControlClock) -> None:
        self._store, self._clock = store, clock
        # by project and name of the service, and by its ID and trigger: the last time that was
        # found, and the next one
        self._found: dict[tuple[str, str], dict[tuple[str, CronTrigger], _Times]] = {}

    async def add_due(self, service: StoredService) -> timedelta | None:
        """Add the calls that are due. Return the time until the next call, or None if there are no
        triggers.
        """
        place = service.project, service.name
        known = self._found.pop(place, {})
        found = {}
        for each in service.spec.crons:
            key = service.id, each
            found[key] = await self._add(service, each, known.get(key))
        if not found:
            return None
        self._found[place] = found
        now = self._clock.now()
        return max(min(upcoming for _, upcoming in found.values()) - now, timedelta(0))

    def forget(self, project: str, name: str) -> None:
        """Forget a service that no longer exists."""
        self._found.pop((project, name), None)

    async def _add(
        self, service: StoredService, trigger: CronTrigger, known: _Times | None
    ) -> _Times:
        """Add the call of a trigger if one is due. Return the times of the trigger's last and next
        calls.
        """
        now = self._clock.now()
        since, upcoming = known or (await self._find_since(service, trigger), None)
        if upcoming is not None and upcoming > now:
            return since, upcoming
        if due := find_last(trigger, since, now):
            call, body = call_at(service, trigger, due), trigger.body.encode()
            await self._store.queued_calls.add([(call, body)])
        return due or since, find_next(trigger, now) or now + _NEVER

    async def _find_since(self, service: StoredService, trigger: CronTrigger) -> datetime:
        """Return the time after which the trigger causes calls."""
        calls, anchor = self._store.queued_calls, make_anchor(service, trigger, self._clock.now())
        if not await calls.add([(anchor, b"")]):
            anchor = await calls.get(anchor.project, anchor.service, anchor.id)
        known = max(anchor.submitted_at, service.created_at)
        return max(known, self._clock.now() - _MADE_UP)
