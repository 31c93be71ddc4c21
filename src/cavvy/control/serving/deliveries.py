"""Accepts requests of other systems to the webhooks of services, and queues the resulting calls."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from cavvy.control.decide.webhook_calls import calls_for_request, find_challenge, verify
from cavvy.control.serving.call_requests import QueueFull
from cavvy.control.serving.front import ServingParts
from cavvy.control.serving.reconciler import service_key
from cavvy.control.worklist import calls_key
from cavvy.domain.queued_calls import QueuedCall
from cavvy.domain.services import WebhookTrigger
from cavvy.domain.stored_services import StoredService
from cavvy.domain.values import Struct
from cavvy.store.base import RowNotFound

# reads a secret of a project; None if there is none
ReadSecret = Callable[[str, str], Awaitable[str | None]]


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
