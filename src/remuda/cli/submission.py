"""Submitting a task: freeze the folder, upload what is missing, ask for consent; used by run and rerun."""

import getpass
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from remuda.cli.session import Failure

if TYPE_CHECKING:
    from remuda.client import Client
    from remuda.client.wire import Submitted
    from remuda.domain.jobs import Origin


def submit(
    client: "Client",
    text: str,
    *,
    path: str,
    params: Mapping[str, str],
    project: str,
    origin: "Origin",
    consent: bool,
    name: str | None = None,
    ceiling_micros: int | None = None,
) -> "Submitted":
    """Queue the task. Where it would cost money and nobody has consented yet, show the price and ask."""
    import os

    from remuda.client import ApiError

    key = os.urandom(16).hex()

    def ask_server(consent: bool) -> "Submitted":
        return client.submit(
            text,
            project=project,
            path=path,
            params=params,
            origin=origin,
            name=name,
            user=getpass.getuser(),
            consent=consent,
            ceiling_micros=ceiling_micros,
            key=key,
        )

    try:
        return ask_server(consent)
    except ApiError as error:
        if error.code != "consent-needed":
            raise
        if not sys.stdin.isatty():
            raise Failure(error.message, "add --yes to consent, or limits.budget to the task", exit_code=2) from error
        click.echo(error.message)
        click.confirm("run it there?", abort=True)
        return ask_server(True)


def upload_folder(client: "Client", project: str, folder: Path) -> str:
    """Freeze a folder by content and send what the server lacks; return the snapshot's hash."""
    raise NotImplementedError
