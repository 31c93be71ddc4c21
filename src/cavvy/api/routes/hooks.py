"""The route to which other systems send signed requests: the webhooks of services."""

import asyncio
from typing import Annotated

from fastapi import Path
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.app_state import AppState
from cavvy.api.audit import note_reading, note_refusal
from cavvy.api.errors import ApiProblem, RetryLater
from cavvy.api.hook_limits import TooManyDeliveries
from cavvy.api.routes.service_calls import FULL_S
from cavvy.api.routes.services import ServicePath
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import OPEN
from cavvy.api.wire import read_bytes, reply
from cavvy.client.queue_wire import DeliveryView
from cavvy.control.decide.webhook_calls import ALLOWED_ORIGIN, ALLOWED_RATE, grant
from cavvy.control.serving.call_queue import QueueFull, UnsignedDelivery
from cavvy.domain.cloud_events import InvalidEvent
from cavvy.domain.queued_calls import MOST_BYTES

router = RouteGroup("services", prefix="/hooks/v1")
OwnerPath = Annotated[
    str, Path(max_length=63, pattern="^[a-z0-9-]+$", description="The project of the service.")
]
HookPath = Annotated[
    str, Path(max_length=63, pattern="^[a-z0-9-]+$", description="The webhook's name.")
]


@router.post(
    "/{owner}/{name}/{hook}",
    rule=OPEN,
    answer=DeliveryView,
    status=202,
    errors=("signature-wrong", "too-many-deliveries", "queue-full", "too-large", "too-slow"),
    sends=True,
)
async def deliver(
    request: Request, app_state: AppState, owner: OwnerPath, name: ServicePath, hook: HookPath
) -> Response:
    """Accept a request that another system has signed with the secret of a webhook, and add its
    calls to the queue of the service.
    """
    note_reading(request)  # the queued calls are the record
    address = request.client.host if request.client else ""
    webhook = f"{owner}/{name}/{hook}"
    try:
        with app_state.hook_limits.enter(address, webhook, app_state.now()):
            return await _accept(request, app_state, (owner, name, hook))
    except TooManyDeliveries as error:
        raise RetryLater("too-many-deliveries", str(error), after_s=error.after_s) from error
    except QueueFull as error:
        raise RetryLater("queue-full", str(error), after_s=FULL_S) from error
    except UnsignedDelivery as error:
        app_state.hook_limits.count_wrong(address, webhook)
        note_refusal(request.scope, "signature-wrong")
        message = (
            "the webhook does not exist, or the request is not signed with the webhook's secret"
        )
        raise ApiProblem("signature-wrong", message) from error
    except InvalidEvent as error:
        raise ApiProblem("invalid-request", f"the request is not a CloudEvent 1.0: {error}") from (
            error
        )


@router.options(
    "/{owner}/{name}/{hook}",
    rule=OPEN,
    errors=("too-many-deliveries",),
    headers=("Allow", ALLOWED_ORIGIN, ALLOWED_RATE),
)
async def permit(
    request: Request, app_state: AppState, owner: OwnerPath, name: ServicePath, hook: HookPath
) -> Response:
    """Permit a sender of CloudEvents to send to a webhook, if the sender asks for permission first.
    Existing and missing webhooks give the same answer; only signed requests are accepted.
    """
    note_reading(request)
    address = request.client.host if request.client else ""
    try:
        with app_state.hook_limits.enter(address, f"{owner}/{name}/{hook}", app_state.now()):
            return Response(headers={"Allow": "OPTIONS, POST", **grant(request.headers)})
    except TooManyDeliveries as error:
        raise RetryLater("too-many-deliveries", str(error), after_s=error.after_s) from error


async def _accept(request: Request, app_state: AppState, place: tuple[str, str, str]) -> Response:
    body = await read_bytes(request, MOST_BYTES)
    headers = {name.lower(): value for name, value in request.headers.items()}

    async def read_secret(project: str, name: str) -> str | None:
        secrets = await app_state.store.secrets(project)
        sealed = next((each.sealed for each in secrets if each.name == name), None)
        if sealed is None:
            return None
        return await asyncio.to_thread(app_state.sealer.unseal, project, name, sealed)

    deliveries = app_state.control_plane.services.deliveries
    found = await deliveries.accept(place, headers, body, read_secret)
    if found.challenge is not None:
        return reply({"challenge": found.challenge})
    return reply(DeliveryView(calls=found.calls, new=found.new), 202)
