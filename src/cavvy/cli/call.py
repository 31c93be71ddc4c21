"""`cavvy call` and `cavvy chat`: send a request to a service, and talk to its language model."""

import re
import sys
from collections.abc import Iterator
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
from cavvy.cli.reach.session import named, project_option, session
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.numbers import count_option

if TYPE_CHECKING:
    from http.client import HTTPResponse

    from cavvy.client.service_wire import ServedView


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


_DATA = b"data:"


@click.command("chat")
@service_argument
@click.argument("message", required=False)
@project_option
@service_key_option
@click.option(
    "--model",
    default=None,
    help="The model; the default is the service's first model, or else the program's.",
)
@click.option(
    "--system",
    default=None,
    help="The system message, which the model receives before the conversation.",
)
@count_option("--max-tokens", help="The maximum number of tokens in an answer.")
@answer_timeout_option
def chat_command(
    name: str,
    message: str | None,
    project: str,
    key: str | None,
    model: str | None,
    system: str | None,
    max_tokens: int | None,
    timeout: float,
) -> None:
    """Talk to the language model of a service. Without MESSAGE, each line of standard input is a
    message of one conversation.

    The service's program must implement /v1/chat/completions of OpenAI's API. The first message
    waits while the service has no replica.
    """
    found = find_serving(project, name)
    talk: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    model = model or next(iter(found.models), "") or _ask_model(found, key, timeout)
    ask: dict[str, object] = {"model": model, "stream": True}
    if max_tokens is not None:
        ask["max_tokens"] = max_tokens
    for each in _read_lines(message):
        talk.append({"role": "user", "content": each})
        answer = _say(found, {**ask, "messages": talk}, key, timeout)
        talk.append({"role": "assistant", "content": answer})


def _read_lines(message: str | None) -> Iterator[str]:
    if message is not None:
        yield message
        return
    while True:
        if sys.stdin.isatty():
            click.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _ask_model(found: "ServedView", key: str | None, timeout_s: float) -> str:
    """Return a model of the program of a service without `models`, or else the service's name."""
    from cavvy.client.service_calls import find_model

    asked = ask_service(found.url, "/v1/models", "GET", None, show_key(key), timeout_s)
    with ExitStack() as stack:
        with tell_state(found.project, found.name):
            answer = stack.enter_context(asked)
        return find_model(answer.read()) or found.name


def _say(found: "ServedView", ask: dict[str, object], key: str | None, timeout_s: float) -> str:
    """Print the answer as it arrives, and return it."""
    from msgspec.json import encode

    from cavvy.client.service_calls import CHAT_PATH, say_problem

    headers = {"Content-Type": "application/json", **show_key(key)}
    asked = ask_service(found.url, CHAT_PATH, "POST", encode(ask), headers, timeout_s)
    with ExitStack() as stack:
        with tell_state(found.project, found.name):
            answer = stack.enter_context(asked)
        if answer.status >= 400:
            text = say_problem(answer.read())
            hint = _advise_key(found, key) if answer.status == 401 else ""
            raise CommandFailure(f"the answer has the status {answer.status}: {text}", hint)
        parts = []
        for part in _read_parts(answer):
            parts.append(part)
            click.echo(part, nl=False)
        click.echo()
    return "".join(parts)


def _advise_key(found: "ServedView", key: str | None) -> str:
    made = f"`cavvy key create {named(found.project, found.name)}` makes one"
    if key is None:
        return f"pass a key with --key or in the variable CAVVY_SERVICE_KEY; {made}"
    return f"the key was revoked, has expired, or belongs to another service; {made}"


def _read_parts(answer: "HTTPResponse") -> Iterator[str]:
    """Yield the pieces of text in server-sent events, or the text of a whole answer."""
    if "text/event-stream" not in (answer.getheader("Content-Type") or ""):
        yield find_text(answer.read(), "message")
        return
    for line in answer:
        data = line.removeprefix(_DATA).strip()
        if line.startswith(_DATA) and data != b"[DONE]":
            yield find_text(data, "delta")


def find_text(data: bytes, key: str) -> str:
    """Return the text of a whole answer or of one event. Raises CommandFailure."""
    from cavvy.client import service_calls

    try:
        return service_calls.find_text(data, key)
    except ValueError as error:
        message = f"the answer is not JSON: {data[:200].decode(errors='replace')}"
        hint = "the service's program must implement /v1/chat/completions of OpenAI's API"
        raise CommandFailure(message, hint) from error
