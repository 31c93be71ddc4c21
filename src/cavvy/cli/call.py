"""`cavvy call`: sends a request to a service."""

import sys
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import service_argument, service_key_option, show_key
from cavvy.cli.reach.service_call import ask_service
from cavvy.cli.reach.session import project_option, session
from cavvy.cli.view.failure import CommandFailure

if TYPE_CHECKING:
    from http.client import HTTPResponse

_PART = 65536


@click.command("call")
@service_argument
@click.argument("path", default="/")
@project_option
@click.option("-d", "--data", default=None, help="The body; - reads it from standard input.")
@click.option("-X", "--method", default=None, help="The method; GET, or POST with a body.")
@click.option("-H", "--header", "headers", multiple=True, metavar="NAME: VALUE", help="A header.")
@service_key_option
@click.option("--timeout", default=600.0, show_default=True, help="Seconds without an answer.")
def command(
    name: str,
    path: str,
    project: str,
    data: str | None,
    method: str | None,
    headers: tuple[str, ...],
    key: str | None,
    timeout: float,
) -> None:
    """Send a request to a service and print the answer's body. The exit code is 1 if the status is
    400 or higher.

    The request waits while the service has no replica.
    """
    from cavvy.client.service_wire import find_service

    with session() as client:
        found = find_service(client, project, name)
    if not found.url:
        raise CommandFailure(f"the gateway of service {name} is starting", "call it again")
    body = sys.stdin.buffer.read() if data == "-" else None if data is None else data.encode()
    with ask_service(
        found.url,
        path if path.startswith("/") else f"/{path}",
        method or ("GET" if body is None else "POST"),
        body,
        {**show_key(key), **dict(_read_header(each) for each in headers)},
        timeout,
    ) as answer:
        _print(answer)
        status = answer.status
    if status >= 400:
        click.echo(f"cavvy: the answer has the status {status}", err=True)
        sys.exit(1)


def _read_header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise CommandFailure(f"-H {text}: expected NAME: VALUE", "for example -H 'Prefer: wait=5'")
    return name.strip(), value.strip()


def _print(answer: "HTTPResponse") -> None:
    out = sys.stdout.buffer
    while part := answer.read1(_PART):
        out.write(part)
        out.flush()
