"""`cavvy call` and `queue`: send a request to a service, and show, retry and delete its queued
calls."""

import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from cavvy.capabilities.serving.reach import (
    answer_timeout_option,
    ask_service,
    find_serving,
    service_argument,
    service_key_option,
    show_key,
    tell_state,
)
from cavvy.cli.reach.session import NO_SERVER, project_option, session
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.job_output import JobOutput
from cavvy.cli.view.numbers import count_option
from cavvy.cli.view.output import TableColumn, output_option, pairs_out, rows_out

if TYPE_CHECKING:
    from http.client import HTTPResponse

    from cavvy.capabilities.serving.call_wire import QueuedCallView


_PART = 65536
_PATH_MARKS = "/?=&%:;,@+$!*'()~[]#-._"  # characters that a path and a query may contain
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # RFC 9110, section 5.6.2


def _read_method(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None and not re.fullmatch(_TOKEN, value):
        raise click.BadParameter(f"expected a method such as GET or PUT, not {value!r}")
    return value


def _read_headers(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    found = {}
    for each in values:
        name, colon, value = each.partition(":")
        value = value.strip()
        if not colon or not re.fullmatch(_TOKEN, name) or not value.isprintable():
            raise click.BadParameter(f"expected NAME: VALUE such as 'Prefer: wait=5', not {each!r}")
        found[name] = value
    return found


@click.command("call")
@service_argument
@click.argument("path", default="/")
@project_option
@click.option("-d", "--data", default=None, help="The body; - reads it from standard input.")
@click.option(
    "-X",
    "--method",
    default=None,
    callback=_read_method,
    help="The HTTP method; the default is GET, or POST with a body.",
)
@click.option(
    "-H",
    "--header",
    "headers",
    multiple=True,
    metavar="NAME: VALUE",
    callback=_read_headers,
    help="A header.",
)
@click.option(
    "--queue",
    is_flag=True,
    help="Add the request to the service's queue and print its ID; see `cavvy services queue`.",
)
@click.option(
    "--id",
    "call_id",
    default="",
    metavar="ID",
    help="With --queue or --json: your own ID for the call. If a call with this ID exists, no call "
    "is added.",
)
@click.option(
    "--json",
    "arguments",
    default=None,
    metavar="JSON",
    help="Call a function of a deployed app instead, `cavvy call APP FUNCTION --json '{...}'`: its "
    "arguments by name; - reads them from standard input.",
)
@service_key_option
@answer_timeout_option
def command(
    name: str,
    path: str,
    project: str,
    arguments: str | None,
    data: str | None,
    method: str | None,
    headers: dict[str, str],
    queue: bool,
    call_id: str,
    key: str | None,
    timeout: float,
) -> None:
    """Send a request to a service and print the answer's body. The exit code is 1 if the status is
    400 or higher.

    The gateway holds the request until the service has a replica. With --queue, the server sends
    the request, repeats the request after a failure, and stores the result.
    """
    from urllib.parse import quote

    if arguments is not None:
        _call_function(project, name, path, arguments, call_id)
        return
    body = sys.stdin.buffer.read() if data == "-" else None if data is None else data.encode()
    if queue:
        _add(project, name, path, method or "POST", headers, body or b"", call_id)
        return
    if call_id:
        raise click.UsageError("--id needs --queue or --json")
    try:
        found = find_serving(project, name)
    except CommandFailure as error:
        if path.isidentifier() and error.exit_code != NO_SERVER:
            hint = f"for a function of a deployed app: cavvy call {name} {path} --json '{{}}'"
            error.hint = "; ".join(filter(None, (error.hint, hint)))
        raise
    asked = ask_service(
        found.url,
        quote(path if path.startswith("/") else f"/{path}", safe=_PATH_MARKS),
        method or ("GET" if body is None else "POST"),
        body,
        {**show_key(key), **headers},
        timeout,
    )
    with ExitStack() as stack:
        with tell_state(project, name):
            answer = stack.enter_context(asked)
        _print(answer)
        status = answer.status
    if status >= 400:
        click.echo(f"cavvy: the answer has the status {status}", err=True)
        sys.exit(1)


def _call_function(project: str, name: str, function: str, arguments: str, key: str) -> None:
    """Let a capability call what it knows by this name. Raises CommandFailure."""
    from cavvy.frame.discover import load_all

    if function == "/":
        raise click.UsageError("--json needs the name of a function: cavvy call APP FUNCTION")
    for _, call in load_all(lambda each: each.callers):
        call(project, name, function, arguments, key)
        return
    raise CommandFailure("this installation has no functions to call with --json")


def _add(
    project: str,
    name: str,
    path: str,
    method: str,
    headers: dict[str, str],
    body: bytes,
    call_id: str,
) -> None:
    from cavvy.capabilities.serving.call_wire import QueuedCallAsk, submit_call

    path = path if path.startswith("/") else f"/{path}"
    ask = QueuedCallAsk(id=call_id, method=method, path=path, headers=headers, body=body)
    with session() as client:
        call = submit_call(client, project, name, ask)
    click.echo(call.id)


def _print(answer: "HTTPResponse") -> None:
    output, last = JobOutput(), b"\n"
    while part := answer.read1(_PART):
        output.write(part)
        last = part[-1:]
    if last != b"\n" and sys.stdout.isatty():
        click.echo()  # the prompt or the next message begins a new line


_STATES = ("waiting", "done", "dead")
_PLATFORMS = ("aws-lambda", "azure-function", "google-function")


@click.group("queue", cls=CommandGroup)
def queue_command() -> None:
    """Show, retry and delete the queued calls of a service.

    `cavvy call NAME --queue` adds a call to the queue of a service. If the section `service` of a
    service's file has the key `events`, each event adds a call automatically. The server sends the
    calls and stores the results.
    """


@queue_command.command("list")
@service_argument
@project_option
@click.option("--state", type=click.Choice(_STATES), help="Only the calls in this state.")
@count_option("--limit", most=1000, default=100, help="The maximum number of calls.")
@output_option
def list_calls(name: str, project: str, state: str | None, limit: int, output: str) -> None:
    """List the calls of a service by ID, with the number of calls in each state."""
    from msgspec.structs import replace

    from cavvy.capabilities.serving import call_wire
    from cavvy.cli.view import formatting

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
        found = call_wire.list_calls(client, project, name, state=state or "", limit=limit)
    calls: Sequence[object] = found.calls
    if output == "table":
        calls = [replace(each, state=_show_state(each)) for each in found.calls]
    counts = ", ".join(f"{number} {each}" for each, number in sorted(found.counts.items()))
    empty = f"no calls; `cavvy call {name} --queue` adds a call"
    rows_out(columns, calls, output, title=counts or None, empty=empty)


def _show_state(call: "QueuedCallView") -> str:
    return "running" if call.running else call.state


@queue_command.command("show")
@service_argument
@click.argument("call_id", metavar="ID")
@project_option
def show_call(name: str, call_id: str, project: str) -> None:
    """Show one call: its state, its tries and the reason for the last failure."""
    from cavvy.capabilities.serving import call_wire
    from cavvy.cli.view import formatting

    with session() as client:
        call = call_wire.find_call(client, project, name, call_id).call
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


@queue_command.command("result")
@service_argument
@click.argument("call_id", metavar="ID")
@project_option
def show_result(name: str, call_id: str, project: str) -> None:
    """Print the body of the result of a call. The exit code is 1 if the call has no result yet or
    has failed.
    """
    from cavvy.capabilities.serving import call_wire

    with session() as client:
        found = call_wire.find_call(client, project, name, call_id)
    JobOutput().write(found.body)
    if found.call.state != "done":
        text = f"call {call_id} is {found.call.state}"
        text += f": {found.call.problem}" if found.call.problem else ""
        raise CommandFailure(text, f"`cavvy services queue show {name} {call_id}` shows the call")


@queue_command.command("retry")
@service_argument
@click.argument("call_id", metavar="[ID]", required=False)
@project_option
def retry_calls(name: str, call_id: str | None, project: str) -> None:
    """Send one dead call, or all dead calls, of a service again."""
    from cavvy.capabilities.serving import call_wire

    with session() as client:
        count = call_wire.retry_calls(client, project, name, call_id)
        if call_id and not count:
            state = call_wire.find_call(client, project, name, call_id).call.state
            raise CommandFailure(
                f"call {call_id} is {state}; only dead calls can be sent again",
                f"`cavvy services queue show {name} {call_id}` shows the call",
            )
    click.echo(f"{count} {'call' if count == 1 else 'calls'} of {name} will be sent again")


@queue_command.command("trigger")
@click.argument("platform", type=click.Choice(_PLATFORMS))
def print_trigger(platform: str) -> None:
    """Print the code of a cloud function that forwards its events to a webhook.

    The function needs only Python. Set the function's variable CAVVY_HOOK_URL to the webhook's URL
    and CAVVY_HOOK_SECRET to the webhook's secret. The webhook must have the signature `standard`.
    The handler is `lambda_handler` (aws-lambda), `main` (azure-function) or `forward_event`
    (google-function).
    """
    from cavvy.cloud_functions import read_function

    click.echo(read_function(platform).rstrip("\n"))


@queue_command.command("purge")
@service_argument
@project_option
@click.option(
    "--state", type=click.Choice(_STATES), required=True, help="Delete the calls in this state."
)
def purge_calls(name: str, project: str, state: str) -> None:
    """Delete the calls in one state, with their results. If an event has added a call and `purge`
    has deleted the call, the same event does not add the call again.
    """
    from cavvy.capabilities.serving import call_wire

    with session() as client:
        count = call_wire.purge_calls(client, project, name, state)
    click.echo(f"{count} {state} {'call' if count == 1 else 'calls'} of {name} deleted")
