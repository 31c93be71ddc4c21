"""`cavvy call`: sends a request to a service."""

import re
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import service_argument, service_key_option, show_key
from cavvy.cli.reach.service_call import (
    answer_timeout_option,
    ask_service,
    find_serving,
    tell_state,
)
from cavvy.cli.reach.session import project_option, session

if TYPE_CHECKING:
    from http.client import HTTPResponse

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
    help="Add the request to the service's queue and print its ID; see `cavvy queue`.",
)
@click.option(
    "--id",
    "call_id",
    default="",
    metavar="ID",
    help="With --queue: your own ID for the call. If a call with this ID exists, no call is added.",
)
@service_key_option
@answer_timeout_option
def command(
    name: str,
    path: str,
    project: str,
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

    body = sys.stdin.buffer.read() if data == "-" else None if data is None else data.encode()
    if queue:
        _add(project, name, path, method or "POST", headers, body or b"", call_id)
        return
    if call_id:
        raise click.UsageError("--id needs --queue")
    found = find_serving(project, name)
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


def _add(
    project: str,
    name: str,
    path: str,
    method: str,
    headers: dict[str, str],
    body: bytes,
    call_id: str,
) -> None:
    from cavvy.client.queue_wire import QueuedCallAsk, submit_call

    path = path if path.startswith("/") else f"/{path}"
    ask = QueuedCallAsk(id=call_id, method=method, path=path, headers=headers, body=body)
    with session() as client:
        call = submit_call(client, project, name, ask)
    click.echo(call.id)


def _print(answer: "HTTPResponse") -> None:
    out, last = sys.stdout.buffer, b"\n"
    while part := answer.read1(_PART):
        out.write(part)
        out.flush()
        last = part[-1:]
    if last != b"\n" and sys.stdout.isatty():
        click.echo()  # the prompt or the next message begins a new line
