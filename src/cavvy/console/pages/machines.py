"""The nodes that run or are billed now, own hosts, named machines, and machines that joined."""

from datetime import datetime
from shlex import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cavvy.client import ApiClient, ApiError
from cavvy.client.maintenance_wire import list_hosts
from cavvy.client.wire import MachineView
from cavvy.console.pages.page import Page, form_of, named_in, try_part, user_of
from cavvy.domain.units import UnitError, parse_duration

_USUAL_PROJECT = "default"  # the project that commands use by default


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    """What is there now. Raises ApiError."""
    nodes = client.nodes()
    machines = try_part(client.machines).value or []
    return Page(
        "Machines",
        "machines.html",
        {
            "nodes": nodes,
            "rate_micros": sum(each.rate_micros_per_hour for each in nodes),
            "machines": [(each, _shell_of(each)) for each in machines],
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
    place = "" if machine.project == _USUAL_PROJECT else f" -p {quote(machine.project)}"
    if machine.state == "busy" and machine.job:
        return f"cavvy ssh {quote(machine.job)}{place}"
    return f"cavvy dev --machine {quote(machine.name)}{place}"
