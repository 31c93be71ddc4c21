"""Submits a task: freezes and uploads the working folder, asks for consent; used by run, rerun and
bench.
"""

import getpass
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cavvy.cli.view.failure import CommandFailure
from cavvy.client import ApiError, Client, make_key
from cavvy.client.state import default_home
from cavvy.domain.jobs import RunOrigin
from cavvy.importers import LoadedTask

if TYPE_CHECKING:
    from cavvy.client.wire import Submitted


def submit(
    client: "Client",
    text: str,
    *,
    path: str,
    params: Mapping[str, str],
    project: str,
    origin: "RunOrigin",
    consent: bool,
    name: str | None = None,
    ceiling_micros: int | None = None,
) -> "Submitted":
    """Queue the task. If it would cost money without consent, show the price and ask."""

    key = make_key()

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
        if not _may_ask():
            raise CommandFailure(
                error.message, "add --yes to agree, or set limits.budget in the task", exit_code=2
            ) from error
        click.echo(error.message, err=True)  # stdout is for the result only
        click.confirm("run it?", abort=True, err=True)
        return ask_server(True)


def _may_ask() -> bool:
    return sys.stdin.isatty()


def make_origin(client: "Client", project: str, loaded: "LoadedTask", text: str) -> "RunOrigin":
    """Upload the task's working folder and return the run's origin. Raises CommandFailure."""
    from dataclasses import replace

    from cavvy.spec.origin import capture

    workdir = loaded.task.workdir
    if workdir is None or workdir.path is None:
        origin = capture(loaded.folder, task_text=text)
    else:
        folder = loaded.folder / workdir.path
        origin = capture(folder, task_text=text, snapshot=_upload_folder(client, project, folder))
    return replace(origin, dialect=loaded.source.kind, overrides=loaded.overrides)


def _upload_folder(client: "Client", project: str, folder: Path) -> str:
    """Freeze a folder and upload what the server does not have; returns the snapshot's hash.
    Raises CommandFailure.
    """
    from cavvy.cli.view.formatting import show_size
    from cavvy.spec.workdir import FreezeError, freeze

    try:
        snapshot = freeze(
            folder, cache=Path(default_home()) / "cache" / "frozen", state=Path(default_home())
        )
    except FreezeError as error:
        raise CommandFailure(str(error), exit_code=2) from error
    for note in snapshot.notes:
        click.echo(f"note: {note}", err=True)
    sent = _upload(client, project, snapshot.blobs())
    files = sum(entry.link is None for entry in snapshot.entries)
    click.echo(
        f"working folder {snapshot.hash[:12]}: {show_size(snapshot.size)} in {files} "
        f"file{'' if files == 1 else 's'}, {show_size(sent)} sent",
        err=True,
    )
    return snapshot.hash


def _upload(client: "Client", project: str, blobs: Mapping[str, bytes | Path]) -> int:
    """Upload blobs, with a progress bar on a terminal; returns the bytes sent."""
    if not sys.stderr.isatty():
        return client.upload(project, blobs)
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("uploading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("uploading", total=None)
        return client.upload(
            project, blobs, progress=lambda done, of: bar.update(task, completed=done, total=of)
        )
