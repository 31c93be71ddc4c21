"""`cavvy queue`: shows, retries and deletes the queued calls of a service."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import service_argument
from cavvy.cli.reach.session import project_option, session
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.numbers import count_option
from cavvy.cli.view.output import TableColumn, output_option, pairs_out, rows_out

if TYPE_CHECKING:
    from cavvy.client.queue_wire import QueuedCallView

_STATES = ("waiting", "done", "dead")
_PLATFORMS = ("aws-lambda", "azure-function", "google-function")


@click.group("queue", cls=CommandGroup)
def command() -> None:
    """Show, retry and delete the queued calls of a service.

    `cavvy call NAME --queue` adds a call to the queue of a service. If the section `service` of a
    service's file has the key `events`, each event adds a call automatically. The server sends the
    calls and stores the results.
    """


@command.command("list")
@service_argument
@project_option
@click.option("--state", type=click.Choice(_STATES), help="Only the calls in this state.")
@count_option("--limit", most=1000, default=100, help="The maximum number of calls.")
@output_option
def list_calls(name: str, project: str, state: str | None, limit: int, output: str) -> None:
    """List the calls of a service by ID, with the number of calls in each state."""
    from msgspec.structs import replace

    from cavvy.cli.view import formatting
    from cavvy.client import queue_wire

    columns = [
        TableColumn("id"),
        TableColumn("state"),
        TableColumn("tries"),
        TableColumn("status", drop=2),
        TableColumn("submitted_at", "SUBMITTED", formatting.show_ago, drop=3),
        TableColumn("object", wrap=True, drop=4),
        TableColumn("problem", wrap=True, drop=1),
        TableColumn("path", hidden=True),
        TableColumn("running", hidden=True),
        TableColumn("due_at", "DUE", formatting.show_time, hidden=True),
        TableColumn("ended_at", "ENDED", formatting.show_time, hidden=True),
    ]
    with session() as client:
        found = queue_wire.list_calls(client, project, name, state=state or "", limit=limit)
    calls: Sequence[object] = found.calls
    if output == "table":
        calls = [replace(each, state=_show_state(each)) for each in found.calls]
    counts = ", ".join(f"{number} {each}" for each, number in sorted(found.counts.items()))
    empty = f"no calls; `cavvy call {name} --queue` adds a call"
    rows_out(columns, calls, output, title=counts or None, empty=empty)


def _show_state(call: "QueuedCallView") -> str:
    return "running" if call.running else call.state


@command.command("show")
@service_argument
@click.argument("call_id", metavar="ID")
@project_option
def show(name: str, call_id: str, project: str) -> None:
    """Show one call: its state, its tries and the reason for the last failure."""
    from cavvy.cli.view import formatting
    from cavvy.client import queue_wire

    with session() as client:
        call = queue_wire.find_call(client, project, name, call_id).call
    next_try = ""
    if call.state == "waiting" and not call.running:
        next_try = formatting.show_time(call.due_at)
    pairs_out(
        [
            ("call", f"{call.id} of {name}: {call.method} {call.path}"),
            ("state", _show_state(call)),
            ("object", call.object),
            ("submitted", formatting.show_time(call.submitted_at)),
            ("tries", str(call.tries)),
            ("last failure", call.problem),
            ("next try", next_try),
            ("status", "" if call.status is None else str(call.status)),
            ("ended", formatting.show_time(call.ended_at) if call.ended_at else ""),
        ]
    )


@command.command("result")
@service_argument
@click.argument("call_id", metavar="ID")
@project_option
def result(name: str, call_id: str, project: str) -> None:
    """Print the body of the result of a call. The exit code is 1 if the call has no result yet or
    has failed.
    """
    from cavvy.client import queue_wire

    with session() as client:
        found = queue_wire.find_call(client, project, name, call_id)
    sys.stdout.buffer.write(found.body)
    sys.stdout.buffer.flush()
    if found.call.state != "done":
        text = f"call {call_id} is {found.call.state}"
        text += f": {found.call.problem}" if found.call.problem else ""
        raise CommandFailure(text, f"`cavvy queue show {name} {call_id}` shows the call")


@command.command("retry")
@service_argument
@click.argument("call_id", metavar="[ID]", required=False)
@project_option
def retry(name: str, call_id: str | None, project: str) -> None:
    """Send one dead call, or all dead calls, of a service again."""
    from cavvy.client import queue_wire

    with session() as client:
        count = queue_wire.retry_calls(client, project, name, call_id)
        if call_id and not count:
            state = queue_wire.find_call(client, project, name, call_id).call.state
            raise CommandFailure(
                f"call {call_id} is {state}; only dead calls can be sent again",
                f"`cavvy queue show {name} {call_id}` shows the call",
            )
    click.echo(f"{count} {'call' if count == 1 else 'calls'} of {name} will be sent again")


@command.command("trigger")
@click.argument("platform", type=click.Choice(_PLATFORMS))
def trigger(platform: str) -> None:
    """Print the code of a cloud function that forwards its events to a webhook.

    The function needs only Python. Set the function's variable CAVVY_HOOK_URL to the webhook's URL
    and CAVVY_HOOK_SECRET to the webhook's secret. The webhook must have the signature `standard`.
    The handler is `lambda_handler` (aws-lambda), `main` (azure-function) or `forward_event`
    (google-function).
    """
    from cavvy.cloud_functions import read_function

    click.echo(read_function(platform).rstrip("\n"))


@command.command("purge")
@service_argument
@project_option
@click.option(
    "--state", type=click.Choice(_STATES), required=True, help="Delete the calls in this state."
)
def purge(name: str, project: str, state: str) -> None:
    """Delete the calls in one state, with their results. If an event has added a call and `purge`
    has deleted the call, the same event does not add the call again.
    """
    from cavvy.client import queue_wire

    with session() as client:
        count = queue_wire.purge_calls(client, project, name, state)
    click.echo(f"{count} {state} {'call' if count == 1 else 'calls'} of {name} deleted")
