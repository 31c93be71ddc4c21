"""The list of services, and one service: its replicas, traffic and service level."""

from datetime import datetime

from starlette.requests import Request

from cavvy.client import ApiClient
from cavvy.client.service_wire import find_service, list_services
from cavvy.console.pages.page import Page


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    return Page("Services", "services.html", {"services": list_services(client)})


def make_one(client: ApiClient, request: Request, now: datetime) -> Page:
    """Raises ApiError `service-not-found`."""
    found = find_service(client, request.path_params["project"], request.path_params["name"])
    return Page(found.name, "service.html", {"service": found})
