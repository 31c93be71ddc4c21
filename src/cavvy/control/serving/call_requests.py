"""Handles users' requests about the queues of services: submit, read, retry and purge calls.

Accepts requests of other systems to the webhooks of services, and queues the resulting calls.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from cavvy.control.decide.queued_calls import revive
from cavvy.control.decide.webhook_calls import calls_for_request, find_challenge, verify
from cavvy.control.serving.front import ServingParts
from cavvy.control.serving.reconciler import service_key
from cavvy.control.worklist import calls_key
from cavvy.domain.queued_calls import CallState, QueuedCall
from cavvy.domain.services import WebhookTrigger
from cavvy.domain.stored_services import StoredService
from cavvy.domain.values import Struct, replace
from cavvy.store.base import RowNotFound, StaleVersion

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
        self._store, self._calls = parts.store, parts.store.queued_calls
        self._clock, self._jobs, self._hint = parts.clock, parts.jobs, parts.hint

    async def submit(self, asked: QueuedCall, body: bytes) -> tuple[QueuedCall, bool]:
        """Add a call to the queue of its service. Return the call, and whether it is new. A call
        without an ID gets a new ID. Raises RowNotFound, CallReused, QueueFull.
        """
        service = await self._store.services.get(asked.project, asked.service)
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
            await self._store.services.get(project, service)
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
        if await self._store.queued_calls.has_waiting(project, name, most):
            await self._check_known(made.once or made.calls[0][0], most)
            return AcceptedDelivery(calls=len(made.calls))
        new = await self._store.queued_calls.add(made.calls, made.once)
        self._hint(calls_key(service_key(project, name)))
        return AcceptedDelivery(calls=len(made.calls), new=len(new))

    async def _check_known(self, call: QueuedCall, most: int) -> None:
        """Raise QueueFull unless the call or the delivery is already stored."""
        try:
            await self._store.queued_calls.get(call.project, call.service, call.id)
        except RowNotFound:
            raise QueueFull(call.service, most) from None

    async def _find(
        self, project: str, name: str, hook: str
    ) -> tuple[StoredService, WebhookTrigger] | None:
        with suppress(RowNotFound):
            service = await self._store.services.get(project, name)
            for each in service.spec.webhooks if service.wanted else ():
                if each.name == hook:
                    return service, each
        return None
