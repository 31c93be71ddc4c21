"""The nodes that run or are billed now, own hosts, named machines, and machines that joined."""

from datetime import datetime

from starlette.requests import Request

from cavvy.client import ApiClient
from cavvy.client.maintenance_wire import list_hosts
from cavvy.console.pages.page import Page, try_part


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    nodes = client.nodes()
    return Page(
        "Machines",
        "machines.html",
        {
            "nodes": nodes,
            "rate_micros": sum(each.rate_micros_per_hour for each in nodes),
            "machines": try_part(client.machines).value or [],
            "hosts": try_part(lambda: list_hosts(client)).value or [],
            "joined": try_part(client.joined).value or [],
        },
    )
