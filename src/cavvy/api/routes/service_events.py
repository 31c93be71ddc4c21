"""Describes the webhooks, cron lines and queue of a service in the form in which the API returns
them.
"""

from datetime import datetime

from cavvy.api.app_state import AppState
from cavvy.api.wire import view
from cavvy.client.addresses import name_host
from cavvy.client.service_wire import CronView, QueueView, WebhookView
from cavvy.client.state import host_name
from cavvy.control.decide.ticks import find_next
from cavvy.domain.queued_calls import CallState
from cavvy.domain.stored_services import StoredService


def view_webhooks(app_state: AppState, service: StoredService) -> list[WebhookView]:
    """Return the webhooks of a service, with their URLs at this server."""
    listen = app_state.listen
    base = name_host(listen, host_name()) if listen else ""
    where = f"{base}/hooks/v1/{service.project}/{service.name}"
    return [
        view(WebhookView, each, url=f"{where}/{each.name}", signature=str(each.signature))
        for each in service.spec.webhooks
    ]


def view_crons(service: StoredService, now: datetime) -> list[CronView]:
    """Return the cron lines of a service, and the time at which each line next applies."""
    return [
        view(CronView, each, next_at=find_next(each, now) if service.wanted else None)
        for each in service.spec.crons
    ]


async def view_queue(app_state: AppState, service: StoredService) -> QueueView:
    """Return the number of calls in the queue of a service."""
    calls = app_state.control_plane.services.calls
    counts = await calls.count(service.project, service.name)
    running = calls.list_running(service.project, service.name)
    return QueueView(
        waiting=counts.get(CallState.WAITING, 0),
        running=None if running is None else len(running),
        done=counts.get(CallState.DONE, 0),
        dead=counts.get(CallState.DEAD, 0),
    )
