"""The nodes that run or are billed now, own hosts, named machines, and machines that joined."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from shlex import quote
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cavvy.client import ApiClient, ApiError
from cavvy.client.maintenance_wire import list_hosts
from cavvy.client.wire import MachineView, NodeListing
from cavvy.console.pages.page import (
    USUAL_PROJECT,
    Page,
    act_on_chosen,
    form_of,
    named_in,
    sort_rows,
    try_part,
    user_of,
)
from cavvy.domain.units import UnitError, parse_duration

# what sorts the lists by their columns
_NODE_KEYS: Mapping[str, Callable[[NodeListing], Any]] = {
    "Job": lambda each: (each.project, each.job, each.rank),
    "Project": lambda each: each.project,
    "Phase": lambda each: each.phase,
    "Placement": lambda each: each.placement,
    "Price": lambda each: each.rate_micros_per_hour,
    "Since": lambda each: each.since,
}
_MACHINE_KEYS: Mapping[str, Callable[[MachineView], Any]] = {
    "Name": lambda each: (each.project, each.name),
    "State": lambda each: each.state,
    "Project": lambda each: each.project,
    "User": lambda each: each.user,
    "Price": lambda each: each.rate_micros_per_hour or 0,
    "Cost": lambda each: each.spent_micros or 0,
}


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    """What is there now. Raises ApiError, HTTPException."""
    return _show(client, request, [])


def act(client: ApiClient, request: Request, now: datetime) -> Page | str:
    """Stop the chosen machines. Raises ApiError, HTTPException."""
    problems = act_on_chosen(client, request, {"stop": client.stop_machine}, "machine")
    return _show(client, request, problems) if problems else f"/machines?{request.url.query}"


def _show(client: ApiClient, request: Request, problems: Sequence[str]) -> Page:
    nodes = sort_rows(request, client.nodes(), _NODE_KEYS, ("Job", "up"))
    machines = try_part(client.machines).value or []
    named = sort_rows(request, machines, _MACHINE_KEYS, ("Name", "up"), "named-")
    return Page(
        "Machines",
        "machines.html",
        {
            "problems": problems,
            "nodes": nodes.rows,
            "heads": nodes.heads,
            "query": nodes.query,
            "rate_micros": sum(each.rate_micros_per_hour for each in nodes.rows),
            "machines": [(each, _shell_of(each)) for each in named.rows],
            "named_heads": named.heads,
            "hosts": try_part(lambda: list_hosts(client)).value or [],
            "joined": try_part(client.joined).value or [],
        },
    )


def start(client: ApiClient, request: Request, now: datetime) -> Page | str:
    """Start a stopped machine; its price is shown first. Raises ApiError."""
    project, name = named_in(request)
    consent = form_of(request).get("do") == "agree"
    try:
        client.start_machine(project, name, user=user_of(request), consent=consent)
    except ApiError as error:
        if error.code != "consent-needed":
            raise
        values = {
            "message": error.message,
            "button": f"Agree and start {name}",
            "back": "/machines#named-title",
        }
        return Page(f"Start {name}?", "confirm.html", values)
    return "/machines#named-title"


def stop(client: ApiClient, request: Request, now: datetime) -> str:
    """Stop the machine's jobs and release its nodes. Raises ApiError."""
    client.stop_machine(*named_in(request))
    return "/machines#named-title"


def keep(client: ApiClient, request: Request, now: datetime) -> str:
    """Set how long the machine is kept without work. Raises ApiError, HTTPException."""
    try:
        length = parse_duration(form_of(request).get("keep", ""))
    except UnitError as error:
        raise HTTPException(400, f"The time to keep the machine: {error}.") from None
    client.keep_machine(*named_in(request), keep_s=length.total_seconds())
    return "/machines#named-title"


def _shell_of(machine: MachineView) -> str:
    """Return the command that opens a shell on the machine: in its job's environment or, without
    one, in a session of its own.
    """
    place = "" if machine.project == USUAL_PROJECT else f" -p {quote(machine.project)}"
    if machine.state == "busy" and machine.job:
        return f"cavvy ssh {quote(machine.job)}{place}"
    return f"cavvy dev --machine {quote(machine.name)}{place}"
