"""Passes the calls in the queue of a service to the gateway, and stores their results. Adds the
calls that cron lines trigger, and those of webhook requests of other systems. Handles users'
requests about queues: submit, read, retry and purge calls.

The server that holds the lease of a service sends the service's calls. A call is sent again if the
server ends before it has stored the result, so a replica may get a call more than once. The result
is stored only once: the write fails if the call's row has changed since it was read.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta

from cavvy.capabilities.serving.call_rows import calls_of
from cavvy.capabilities.serving.control.front import ServiceFront, ServingParts
from cavvy.capabilities.serving.control.reconciler import service_key
from cavvy.capabilities.serving.decide.queued_calls import (
    call_at,
    call_for_objects,
    count_at_once,
    find_last,
    find_next,
    find_timeout,
    make_anchor,
    make_object_event,
    revive,
    settle,
)
from cavvy.capabilities.serving.decide.webhook_calls import (
    calls_for_request,
    find_challenge,
    verify,
)
from cavvy.capabilities.serving.queued_calls import (
    MOST_BYTES,
    CallAnswer,
    CallState,
    QueuedCall,
    StoredObject,
)
from cavvy.capabilities.serving.service_rows import services_of
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.control.agents.transfers import Transfers
from cavvy.control.clock import ControlClock
from cavvy.control.worklist import calls_key
from cavvy.domain.services import CronTrigger, EventTrigger, WebhookTrigger
from cavvy.domain.values import Struct, replace
from cavvy.store.base import RowNotFound, StaleVersion, StoreError
from cavvy.store.leases import FENCE
from cavvy.store.objects.base import ObjectError, ObjectSigner
from cavvy.store.objects.threads import in_thread
from cavvy.store.sql import Store

_MOST_PAGES = 100  # maximum pages of one listing, of 1,000 objects each
_ADDED_AT_ONCE = 500  # maximum calls in one transaction
_SIGNED_S = 3600  # how long the URL of an object in an event is valid
_STOPPED = timedelta(minutes=1)  # interval for checking a service that a budget has stopped
_FIRST = timedelta(seconds=2)  # pause while the gateway starts
_log = logging.getLogger(__name__)

_NEVER = timedelta(days=1)  # pause before the next check of a trigger whose line matches no day
# The last time of a line causes a call only if that time is not longer ago than this. The value is
# shorter than `IDS_KEPT`, so that the ID of an earlier call for the same time is still known.
_MADE_UP = timedelta(days=30)


_Times = tuple[datetime, datetime]


class CallQueue:
    """Reconciles the queues of services. If `front` is None, no calls are sent."""

    def __init__(self, parts: ServingParts, data: Transfers) -> None:
        self._store, self._clock, self._front = parts.store, parts.clock, parts.front
        self._hint, self._owns, self._data = parts.hint, parts.owns, data
        self._ticks = CronTicks(parts.store, parts.clock)
        self._sent: dict[str, set[str]] = {}  # IDs of the calls at the gateway, by key
        # when each bucket was last listed, by key
        self._listed: dict[str, dict[EventTrigger, datetime]] = {}
        self._listing: set[tuple[str, EventTrigger]] = set()  # the listings that run
        self._tasks: set[asyncio.Task[None]] = set()

    def list_sent(self, key: str) -> frozenset[str] | None:
        """Return the IDs of a queue's calls that are at the gateway now, or None if another server
        sends these calls.
        """
        return frozenset(self._sent.get(key, ())) if self._owns(key) else None

    async def run(self) -> None:
        """Wait until this coroutine is cancelled, then cancel the running calls and listings."""
        try:
            await asyncio.Event().wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def reconcile(self, key: str) -> timedelta | None:
        project, _, name = key.rpartition(":")[2].partition("/")
        try:
            service = await services_of(self._store).get(project, name)
        except RowNotFound:
            self._listed.pop(key, None)
            self._ticks.forget(project, name)
            return None  # the calls wait for a service with this name
        if self._front is None or not service.wanted:
            return None
        after = self._start_listings(key, service)
        if service.stopped_by:
            return min([*after, _STOPPED])
        if (upcoming := await self._ticks.add_due(service)) is not None:
            after.append(upcoming)
        if not self._front.locate(service):
            return min([*after, _FIRST])
        again = await self._send(key, service, self._front)
        return min([*after, again]) if again is not None else min(after, default=None)

    async def _send(
        self, key: str, service: StoredService, front: ServiceFront
    ) -> timedelta | None:
        """Send the calls that are due. Return the time until the next call is due, or None if a
        finished call or a new call will wake the queue.
        """
        sent = frozenset(self._sent.get(key, ()))
        free = count_at_once(service.spec) - len(sent)
        if free <= 0:
            return None
        now = self._clock.now()
        for call in await calls_of(self._store).due(service.project, service.name, free, sent):
            if call.due_at > now:
                return call.due_at - now
            self._sent.setdefault(key, set()).add(call.id)
            task = asyncio.create_task(self._call(key, service, call, front))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return None

    async def _call(
        self, key: str, service: StoredService, call: QueuedCall, front: ServiceFront
    ) -> None:
        """Send a call and store its result."""
        FENCE.set(None)  # the result is stored even if another server has the lease by then
        try:
            answer = await self._ask(service, call, front)
            ended = settle(call, answer, service.spec.queue, self._clock.now())
            kept = answer.body if ended.state is not CallState.WAITING else b""
            with suppress(StaleVersion):  # another server has stored a result
                await calls_of(self._store).put(ended, kept if len(kept) <= MOST_BYTES else b"")
        except StoreError as error:  # the call is sent again
            extra = {"service": service.name, "call": call.id}
            _log.warning("the result of a call was not stored: %s", error, extra=extra)
            await self._clock.sleep_until(self._clock.now() + _FIRST)
        finally:
            self._sent[key].discard(call.id)
            if not self._sent[key]:
                del self._sent[key]
            self._hint(key)

    async def _ask(
        self, service: StoredService, call: QueuedCall, front: ServiceFront
    ) -> CallAnswer:
        try:
            if call.object is None:
                body = (await calls_of(self._store).bodies(call))[0]
            else:
                body = make_object_event(call, await self._sign(call))
        except ObjectError as error:
            return CallAnswer(problem=str(error))
        return await front.call(service, call, body, find_timeout(service.spec))

    async def _sign(self, call: QueuedCall) -> str:
        """Return a URL at which the object of a call can be read. Raises ObjectError."""
        assert call.object is not None
        place = (await self._data.open_url(call.project, call.object.url)).place
        if not isinstance(place, ObjectSigner):
            return ""
        signed = await in_thread(place.sign_get, call.object.key, _SIGNED_S)
        return "" if signed is None else signed.url

    def _start_listings(self, key: str, service: StoredService) -> list[timedelta]:
        """Start the bucket listings that are due. The listings run concurrently with the calls,
        because a bucket may be slow. Return the times until the next listings; a finished listing
        wakes the queue.
        """
        now, listed = self._clock.now(), self._listed.get(key, {})
        self._listed[key] = {each: listed[each] for each in service.spec.events if each in listed}
        after = []
        for each in service.spec.events:
            if (key, each) in self._listing:
                continue
            wait = listed[each] + each.every - now if each in listed else timedelta(0)
            if wait > timedelta(0):
                after.append(wait)
                continue
            self._listed[key][each] = now
            self._listing.add((key, each))
            task = asyncio.create_task(self._list(key, service, each))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if not self._listed[key]:
            del self._listed[key]
        return after

    async def _list(self, key: str, service: StoredService, trigger: EventTrigger) -> None:
        """Add the calls for new objects in the trigger's bucket. If the method fails, the next
        listing finds the same objects again.
        """
        FENCE.set(None)  # another server that has the lease by then adds the same calls
        extra = {"service": service.name, "bucket": trigger.bucket}
        try:
            calls = await self._find_calls(service, trigger, self._clock.now())
            for start in range(0, len(calls), _ADDED_AT_ONCE):
                most = service.spec.queue.waiting
                if await calls_of(self._store).has_waiting(service.project, service.name, most):
                    break  # the next listing finds the objects again
                part = calls[start : start + _ADDED_AT_ONCE]
                await calls_of(self._store).add([(each, b"") for each in part])
        except (ObjectError, StoreError) as error:
            _log.warning("the objects of a bucket were not listed: %s", error, extra=extra)
        finally:
            self._listing.discard((key, trigger))
            self._hint(key)

    async def _find_calls(
        self, service: StoredService, trigger: EventTrigger, now: datetime
    ) -> Sequence[QueuedCall]:
        """Return the calls for all objects of a bucket. Raises ObjectError."""
        opened = await self._data.open_url(service.project, trigger.bucket)
        bucket = "/".join(trigger.bucket.split("/", 3)[:3])
        calls: list[QueuedCall] = []
        after = ""
        for _ in range(_MOST_PAGES):
            objects, after = await in_thread(opened.place.list, opened.key, after)
            found = [
                StoredObject(
                    url=bucket,
                    key=each.key,
                    size=each.size,
                    tag=each.tag,
                    changed_at=each.changed_at,
                )
                for each in objects
            ]
            calls += call_for_objects(service, trigger, found, now)
            if not after:
                return calls
        extra = {"service": service.name, "bucket": trigger.bucket}
        _log.warning("only the first %s objects cause calls", len(calls), extra=extra)
        return calls


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
            await calls_of(self._store).add([(call, body)])
        return due or since, find_next(trigger, now) or now + _NEVER

    async def _find_since(self, service: StoredService, trigger: CronTrigger) -> datetime:
        """Return the time after which the trigger causes calls."""
        calls, anchor = calls_of(self._store), make_anchor(service, trigger, self._clock.now())
        if not await calls.add([(anchor, b"")]):
            anchor = await calls.get(anchor.project, anchor.service, anchor.id)
        known = max(anchor.submitted_at, service.created_at)
        return max(known, self._clock.now() - _MADE_UP)


_PAGE = 500

# reads a secret of a project; None if there is none
ReadSecret = Callable[[str, str], Awaitable[str | None]]


class CallReused(Exception):
    """Raised if another call already has the ID of the new call."""


class QueueFull(Exception):
    """Raised if the queue is full: `most` calls wait, which is the maximum for the service."""

    def __init__(self, service: str, most: int) -> None:
        super().__init__(f"the queue of service {service} is full: {most} calls already wait")


class QueuedCallRequests:
    """Handles users' requests about queued calls. `list_sent` returns the IDs of a queue's
    calls that are at the gateway, or None if another server sends these calls.
    """

    def __init__(
        self, parts: ServingParts, list_sent: Callable[[str], frozenset[str] | None]
    ) -> None:
        self._list_sent = list_sent
        self._store, self._calls = parts.store, calls_of(parts.store)
        self._clock, self._jobs, self._hint = parts.clock, parts.jobs, parts.hint

    async def submit(self, asked: QueuedCall, body: bytes) -> tuple[QueuedCall, bool]:
        """Add a call to the queue of its service. Return the call, and whether it is new. A call
        without an ID gets a new ID. Raises RowNotFound, CallReused, QueueFull.
        """
        service = await services_of(self._store).get(asked.project, asked.service)
        call = replace(asked, id=asked.id or self._jobs.make_id())
        most = service.spec.queue.waiting
        if await self._calls.has_waiting(call.project, call.service, most):
            known = await self._find(call) if asked.id else None
            if known is None:
                raise QueueFull(call.service, most)
        elif await self._calls.add([(call, body)]):
            self._wake(call.project, call.service)
            return replace(call, version=1), True
        else:
            known = await self._calls.get(call.project, call.service, call.id)
        same = (known.method, known.path, known.headers) == (call.method, call.path, call.headers)
        if not same or (await self._calls.bodies(known))[0] != body:
            raise CallReused(f"the queue of {call.service} has another call with the ID {call.id}")
        return known, False

    async def _find(self, call: QueuedCall) -> QueuedCall | None:
        with suppress(RowNotFound):
            return await self._calls.get(call.project, call.service, call.id)
        return None

    def list_running(self, project: str, service: str) -> frozenset[str] | None:
        """Return the IDs of the calls that are at the gateway now, or None if another server sends
        the calls of this service."""
        return self._list_sent(calls_key(service_key(project, service)))

    async def count(self, project: str, service: str) -> Mapping[CallState, int]:
        """Return the number of calls in each state."""
        return await self._calls.count(project, service)

    async def get(self, project: str, service: str, call_id: str) -> tuple[QueuedCall, bytes]:
        """Return a call and the body of its result. Raises RowNotFound."""
        call = await self._get_stored(project, service, call_id)
        return call, (await self._calls.bodies(call))[1]

    async def _get_stored(self, project: str, service: str, call_id: str) -> QueuedCall:
        """Return a call that is still stored in full: its row contains more than the call's ID.
        Raises RowNotFound.
        """
        try:
            call = await self._calls.get(project, service, call_id)
        except RowNotFound:
            await self._count_known(project, service)
            raise
        if call.state is CallState.FORGOTTEN:
            raise RowNotFound(f"call {call_id} is no longer stored")
        return call

    async def list(
        self, project: str, service: str, state: CallState | None, after: str, limit: int
    ) -> tuple[Sequence[QueuedCall], Mapping[CallState, int]]:
        """Return calls by ID, and the number of calls in each state. Calls outlive their service.
        Raises RowNotFound if neither the service nor a call exists.
        """
        found = await self._calls.list(project, service, state, after=after, limit=limit)
        return found, await self._count_known(project, service)

    async def _count_known(self, project: str, service: str) -> Mapping[CallState, int]:
        """Return the number of calls in each state. Raises RowNotFound if neither the service nor a
        call exists.
        """
        counts = await self._calls.count(project, service)
        if not any(counts.values()):
            await services_of(self._store).get(project, service)
        return counts

    async def retry(self, project: str, service: str, call_id: str | None) -> int:
        """Queue one dead call or all dead calls of a service again. Return their number. Raises
        RowNotFound.
        """
        if call_id is not None:
            found: Sequence[QueuedCall] = [await self._get_stored(project, service, call_id)]
            return await self._revive(found)
        await self._count_known(project, service)
        count, after = 0, ""
        while found := await self._calls.list(
            project, service, CallState.DEAD, after=after, limit=_PAGE
        ):
            count, after = count + await self._revive(found), found[-1].id
        return count

    async def _revive(self, calls: Sequence[QueuedCall]) -> int:
        count = 0
        for call in calls:
            if call.state is CallState.DEAD:
                with suppress(StaleVersion):  # another request has revived it
                    await self._calls.put(revive(call, self._clock.now()))
                    count += 1
        for call in calls[:1]:
            self._wake(call.project, call.service)
        return count

    async def purge(self, project: str, service: str, state: CallState) -> int:
        """Delete the calls in one state, and return their number. Raises RowNotFound if neither the
        service nor a call exists.
        """
        await self._count_known(project, service)
        return await self._calls.purge(project, service, state, self._clock.now())

    def _wake(self, project: str, service: str) -> None:
        self._hint(calls_key(service_key(project, service)))


class UnsignedDelivery(Exception):
    """Raised if a request is not signed with the secret of its webhook, or if the webhook does not
    exist.
    """


class AcceptedDelivery(Struct, frozen=True, kw_only=True):
    """The number of calls that a request has caused, and how many of them are new. A request that
    only checks the webhook's URL causes no calls and must be answered with `challenge`.
    """

    calls: int = 0
    new: int = 0
    challenge: str | None = None


class WebhookDeliveries:
    """Accepts requests to webhooks. When `accept` returns, the rows of the calls are stored."""

    def __init__(self, parts: ServingParts) -> None:
        self._store, self._clock, self._hint = parts.store, parts.clock, parts.hint

    async def accept(
        self,
        place: tuple[str, str, str],
        headers: Mapping[str, str],
        body: bytes,
        read_secret: ReadSecret,
    ) -> AcceptedDelivery:
        """Queue the calls that a request to a webhook causes. `place` names the project, the
        service and the webhook. Header names in `headers` are in lower case. Raises
        UnsignedDelivery, InvalidEvent, QueueFull.
        """
        project, name, hook = place
        found = await self._find(project, name, hook)
        secret = await read_secret(project, found[1].secret) if found else None
        if found is None or secret is None:
            raise UnsignedDelivery
        service, trigger = found
        now = self._clock.now()
        delivery = verify(trigger.signature, secret, headers, body, now)
        if delivery is None:
            raise UnsignedDelivery
        if (challenge := find_challenge(trigger, body)) is not None:
            return AcceptedDelivery(challenge=challenge)
        made = calls_for_request(service, trigger, delivery.id, headers, body, now)
        most = service.spec.queue.waiting
        if await calls_of(self._store).has_waiting(project, name, most):
            await self._check_known(made.once or made.calls[0][0], most)
            return AcceptedDelivery(calls=len(made.calls))
        new = await calls_of(self._store).add(made.calls, made.once)
        self._hint(calls_key(service_key(project, name)))
        return AcceptedDelivery(calls=len(made.calls), new=len(new))

    async def _check_known(self, call: QueuedCall, most: int) -> None:
        """Raise QueueFull unless the call or the delivery is already stored."""
        try:
            await calls_of(self._store).get(call.project, call.service, call.id)
        except RowNotFound:
            raise QueueFull(call.service, most) from None

    async def _find(
        self, project: str, name: str, hook: str
    ) -> tuple[StoredService, WebhookTrigger] | None:
        with suppress(RowNotFound):
            service = await services_of(self._store).get(project, name)
            for each in service.spec.webhooks if service.wanted else ():
                if each.name == hook:
                    return service, each
        return None
