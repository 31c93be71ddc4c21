"""Requests to a service at the gateway, for `cavvy call` and `cavvy chat`, and what to do with a
service that has started."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import complete, name_argument
from cavvy.cli.reach.services import await_url
from cavvy.cli.reach.session import USUAL_PROJECT, named, session
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.numbers import positive_option

if TYPE_CHECKING:
    from http.client import HTTPResponse

    from cavvy.client.service_wire import NamedService

_SILENT_S = 5.0  # seconds between two checks of the state of a service that has not answered yet

answer_timeout_option = positive_option(
    "--timeout",
    default=600.0,
    show_default=True,
    help="Give up after this many seconds without an answer.",
)


def list_advice(found: "NamedService") -> list[str]:
    """Return lines that say how to call and end the service."""
    there = named(found.project, found.name)
    call = f'cavvy chat {there} "Hello"' if found.models else f"cavvy call {there} /"
    lines = [f"call the service: {call}    end the service: cavvy stop {there}"]
    if found.models:
        lines.append(f"OpenAI's clients: base_url {find_base_url(found)}, model {found.models[0]}")
    return lines


def find_base_url(found: "NamedService") -> str:
    """Return the base URL of OpenAI's clients for the models of the service."""
    path = f"/{found.project}/{found.name}"
    if not found.url.endswith(path):  # the service has a host name
        return f"{found.url}/v1"
    gateway = found.url.removesuffix(path)
    return f"{gateway}/v1" if found.project == USUAL_PROJECT else f"{gateway}/{found.project}/v1"


def find_serving(project: str, name: str) -> "NamedService":
    """Wait until the service's gateway listens, and return the service. Raises CommandFailure."""
    from cavvy.client.service_wire import find_named_service

    with session() as client:
        return await_url(client, project, name, find_named_service)


@contextmanager
def tell_state(project: str, name: str) -> Iterator[None]:
    """While the block waits for an answer, print to standard error why the service has no
    replica."""
    answered = threading.Event()

    def look() -> None:
        from cavvy.client.service_wire import find_named_service

        with suppress(CommandFailure), session() as client:
            for text in list_waits(
                lambda: find_named_service(client, project, name), lambda: answered.wait(_SILENT_S)
            ):
                click.echo(f"cavvy: {text}", err=True)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        answered.set()


def list_waits(find: Callable[[], "NamedService"], wait: Callable[[], bool]) -> Iterator[str]:
    """Yield each new reason why a request still waits for a replica. `wait` pauses, and returns
    whether the request was answered.
    """
    said = ""
    while not wait():
        text = _why_waiting(find())
        if text and text != said:
            yield text
        said = text


def _why_waiting(found: "NamedService") -> str:
    if found.ready:
        return ""
    text = f"still waiting; service {found.name} is {found.state}"
    if found.state == "failing":
        return f"{text}: {found.problem}"
    for each in found.replicas:
        if each.ended_at is None and each.reason and "prepare" not in each.start_s:
            return f"{text}; replica {each.number} {each.reason}"
        if each.ready_at is None and each.ended_at is None and "prepare" in each.start_s:
            text += f"; the program of replica {each.number} runs, but does not answer on port "
            return f"{text}{each.port} (PORT); see `cavvy logs {each.job}`"
    return text


@contextmanager
def ask_service(
    url: str,
    path: str,
    method: str,
    body: bytes | None,
    headers: Mapping[str, str],
    timeout_s: float,
) -> "Iterator[HTTPResponse]":
    """Yield the response before its body is read. Raises CommandFailure."""
    from cavvy.capabilities.serving.answers import ServiceSilent, open_answer

    try:
        with open_answer(url, path, method, body, headers, timeout_s) as answer:
            yield answer
    except ServiceSilent as error:
        raise CommandFailure(str(error), "`cavvy services` shows the service") from error


def complete_services(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return names of the project's services, or none if no server runs."""
    from cavvy.client.service_wire import list_named_services

    return complete(ctx, list_named_services, incomplete)


service_argument = name_argument("`cavvy services` lists services", complete_services)


service_key_option = click.option(
    "--key", envvar="CAVVY_SERVICE_KEY", help="A key of the service; see `cavvy services key`."
)


def show_key(key: str | None) -> dict[str, str]:
    """Return the HTTP header with a service's key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}
