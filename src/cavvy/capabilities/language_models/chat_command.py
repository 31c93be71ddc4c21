"""`cavvy chat`: talk to the language model of a service."""

import sys
from collections.abc import Iterator
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
from cavvy.cli.reach.session import named, project_option
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.job_output import JobOutput
from cavvy.cli.view.numbers import count_option

if TYPE_CHECKING:
    from http.client import HTTPResponse

    from cavvy.client.service_wire import NamedService

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
def command(
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


def _ask_model(found: "NamedService", key: str | None, timeout_s: float) -> str:
    """Return a model of the program of a service without `models`, or else the service's name."""
    from cavvy.capabilities.serving.answers import find_model

    asked = ask_service(found.url, "/v1/models", "GET", None, show_key(key), timeout_s)
    with ExitStack() as stack:
        with tell_state(found.project, found.name):
            answer = stack.enter_context(asked)
        return find_model(answer.read()) or found.name


def _say(found: "NamedService", ask: dict[str, object], key: str | None, timeout_s: float) -> str:
    """Print the answer as it arrives, and return it."""
    from msgspec.json import encode

    from cavvy.capabilities.serving.answers import CHAT_PATH, say_problem

    headers = {"Content-Type": "application/json", **show_key(key)}
    asked = ask_service(found.url, CHAT_PATH, "POST", encode(ask), headers, timeout_s)
    with ExitStack() as stack:
        with tell_state(found.project, found.name):
            answer = stack.enter_context(asked)
        if answer.status >= 400:
            text = say_problem(answer.read())
            hint = _advise_key(found, key) if answer.status == 401 else ""
            raise CommandFailure(f"the answer has the status {answer.status}: {text}", hint)
        parts, output = list[str](), JobOutput()
        for part in _read_parts(answer):
            parts.append(part)
            output.write(part.encode(errors="replace"))
        click.echo()
    return "".join(parts)


def _advise_key(found: "NamedService", key: str | None) -> str:
    made = f"`cavvy services key create {named(found.project, found.name)}` makes one"
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
    from cavvy.capabilities.serving import answers

    try:
        return answers.find_text(data, key)
    except ValueError as error:
        message = f"the answer is not JSON: {data[:200].decode(errors='replace')}"
        hint = "the service's program must implement /v1/chat/completions of OpenAI's API"
        raise CommandFailure(message, hint) from error
