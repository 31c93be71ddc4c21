"""Submits a task, or the tasks of a file with several: copies and uploads the working folder, and
asks the user to agree to costs. `cavvy run`, `rerun` and `bench` use this module.
"""

import getpass
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
from msgspec import Raw
from msgspec.json import encode

from cavvy.cli.reach.interrupts import held_interrupt, leave_if
from cavvy.cli.reach.providers import load_settings
from cavvy.cli.view.failure import CommandFailure, escape_controls, note_out
from cavvy.client import ApiClient, ApiError, make_key
from cavvy.client.addresses import list_own_path
from cavvy.client.blobs import upload
from cavvy.client.state import default_home
from cavvy.client.wire import GraphRequest, SubmitRequest
from cavvy.domain.jobs import RunOrigin
from cavvy.domain.tasks import TaskSpec, explain_missing, list_missing, list_secrets
from cavvy.domain.values import Struct
from cavvy.sdk.files import find_parts, freeze_parts, send_frozen
from cavvy.spec.workdir import FolderSnapshot, FreezeError, FrozenFile
from cavvy.task_files import LoadedTask

if TYPE_CHECKING:
    from cavvy.client.wire import Submitted


_T = TypeVar("_T")


def submit(
    client: "ApiClient",
    text: str,
    *,
    path: str,
    params: Mapping[str, str],
    project: str,
    origin: "RunOrigin",
    consent: bool,
    own_consent: bool = False,
    name: str | None = None,
    ceiling_micros: int | None = None,
) -> "Submitted":
    """Submit the task. If the user must first agree to the costs, show the price and ask for
    confirmation. With `own_consent`, what the user has agreed to for a machine or a pool does not
    count.
    """

    key = make_key()

    def ask_server(consent: bool) -> "Submitted":
        with held_interrupt() as interrupted:
            job = client.submit(
                text,
                project=project,
                path=path,
                params=params,
                origin=origin,
                name=name,
                user=getpass.getuser(),
                consent=consent,
                own_consent=own_consent,
                ceiling_micros=ceiling_micros,
                key=key,
            )
        leave_if(interrupted(), project, [job.name], job.members is not None)
        return job

    return ask_consent(consent, ask_server)


def ask_consent(
    consent: bool,
    ask_server: Callable[[bool], _T],
    hint: str = "add --yes to agree, or set limits.budget in the task",
) -> _T:
    """Send a request that may cost money. If the user must first agree to the costs, show the price
    and ask for consent. `hint` says what to do without a terminal.
    """
    try:
        return ask_server(consent)
    except ApiError as error:
        if error.code != "consent-needed":
            raise
        if not may_ask():
            raise CommandFailure(error.message, hint, exit_code=2) from error
        click.echo(error.message, err=True)  # Standard output is only for the result.
        click.confirm("run it?", abort=True, err=True)
        return ask_server(True)


def may_ask() -> bool:
    return sys.stdin.isatty()


def make_origin(
    client: "ApiClient",
    project: str,
    loaded: "LoadedTask",
    text: str,
    sent: set[str] | None = None,
) -> "RunOrigin":
    """Upload the files of the task, and return the origin of the run. `sent` are the hashes of
    snapshots that this command has uploaded, which are not uploaded and printed again. Raises
    CommandFailure. Raises ApiError `secret-missing` before the upload if the project lacks a
    secret.
    """
    from cavvy.domain.values import replace
    from cavvy.spec.repository import capture

    for note in loaded.source.notes:
        note_out(note)
    parts = _local_parts(loaded)
    origin = capture(parts.get("", loaded.folder), task_text=text)
    if parts:
        _check_secrets(client, project, loaded.task)
        snapshot = upload_files(client, project, loaded.task, parts, loaded, sent)
        origin = replace(origin, snapshot=snapshot)
    return replace(
        origin,
        dialect=loaded.source.kind,
        overrides=loaded.overrides,
        path=list_own_path(client.address),
    )


def _check_secrets(client: "ApiClient", project: str, task: TaskSpec) -> None:
    """Raise ApiError if the project lacks a secret of the task. The server also checks the secrets,
    but only after the folder has been uploaded.
    """
    if not list_secrets(task):
        return
    try:
        known = {each.name for each in client.secrets(project)}
    except ApiError:  # the user may not list secrets; the server tells which one is missing
        return
    if missing := list_missing(task, known):
        message, hint = explain_missing(project, missing)
        raise ApiError("secret-missing", message, hint, 422)


def freeze_files(loaded: "LoadedTask") -> None:
    """Check the files that would be submitted with the task, and print notes about them. Raises
    CommandFailure.
    """
    if parts := _local_parts(loaded):
        for note in _freeze(loaded.task, parts).notes:
            note_out(note)


def _local_parts(loaded: "LoadedTask") -> dict[str, Path]:
    try:
        return find_parts(loaded.task, loaded.source, loaded.folder)
    except FreezeError as error:
        raise CommandFailure(str(error), exit_code=2) from error


def upload_files(
    client: "ApiClient",
    project: str,
    task: TaskSpec,
    parts: Mapping[str, Path],
    loaded: "LoadedTask | None" = None,
    uploaded: set[str] | None = None,
) -> str:
    """Take a snapshot of the working folder and of the task's local files outside this folder, and
    upload the files that the server lacks. The user is asked about folders that the file of
    `loaded` may have chosen against the user. Returns the hash of the snapshot. Raises
    CommandFailure.
    """
    from cavvy.cli.view.formatting import show_size

    agreed = set[Path]()
    before = set() if uploaded is None else uploaded

    def send(snapshot: FolderSnapshot) -> int:
        if loaded is not None:
            _agree_to_folders(loaded, parts, snapshot, agreed)
        if snapshot.hash in before:
            return 0
        for note in snapshot.notes:
            note_out(note)
        return _upload(client, project, snapshot.blobs())

    snapshot, sent = send_frozen(lambda: _freeze(task, parts), send)
    if snapshot.hash in before:
        return snapshot.hash
    before.add(snapshot.hash)
    files = sum(entry.link is None for entry in snapshot.entries)
    click.echo(
        f"working folder {snapshot.hash[:12]}: {show_size(snapshot.size)} in {files} "
        f"file{'' if files == 1 else 's'}, {show_size(sent)} sent",
        err=True,
    )
    return snapshot.hash


def _agree_to_folders(
    loaded: "LoadedTask", parts: Mapping[str, Path], snapshot: FolderSnapshot, agreed: set[Path]
) -> None:
    """Ask about each folder that the task file may have chosen against the user, and add it to
    `agreed`. What the command line names, with --workdir or --send, was the user's choice. --yes
    agrees to costs only. Raises CommandFailure without a terminal."""
    from cavvy.cli.task.options import SENT
    from cavvy.cli.view.formatting import show_size
    from cavvy.domain.units import format_count
    from cavvy.spec.sent_folders import find_doubtful, is_named

    own = loaded.source.own_folder
    named = is_named(loaded.overrides, own)
    found = find_doubtful(parts, loaded.folder, snapshot, named=named, own=bool(own))
    context = click.get_current_context(silent=True)
    agreed.update([] if context is None else context.meta.get(SENT, ()))
    for each in found:
        if each.real in agreed:
            continue
        what = "working folder" if each.is_workdir else "task's file or folder"
        told = (
            f"the {what} {each.real} ({show_size(each.size)} in "
            f"{format_count(each.files, 'file')}) {each.why}"
        )
        if not may_ask():
            hint = (
                f"if you want to send it, name it: --workdir {shlex.quote(str(each.real))}; --yes "
                "does not agree to it"
                if each.is_workdir
                else "save credentials with `cavvy secret set`; if you want to send this, name it: "
                f"--send {shlex.quote(str(each.real))}; --yes does not agree to it"
            )
            raise CommandFailure(f"{told}; nothing was sent", hint, exit_code=2)
        click.echo(escape_controls(told), err=True)
        click.confirm("send it?", abort=True, err=True)
        agreed.add(each.real)


def _freeze(task: TaskSpec, parts: Mapping[str, Path]) -> "FolderSnapshot":
    limit_mib = load_settings().whole("server.blob_mib")
    try:
        return freeze_parts(task, parts, Path(default_home()), limit_mib)
    except FreezeError as error:
        raise CommandFailure(str(error), exit_code=2) from error


def _upload(client: "ApiClient", project: str, blobs: Mapping[str, bytes | FrozenFile]) -> int:
    """Upload blobs, with a progress bar on a terminal. Returns the number of bytes sent."""
    if not sys.stderr.isatty():
        return upload(client, project, blobs)
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("uploading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("uploading", total=None)
        return upload(
            client, project, blobs, lambda done, of: bar.update(task, completed=done, total=of)
        )


def submit_loaded(
    client: ApiClient,
    loaded: LoadedTask,
    file: str,
    params: dict[str, str],
    project: str,
    name: str | None,
    yes: bool,
) -> "Submitted":
    """Submit a task that was read from a file, after the user has agreed to its costs. Raises
    CommandFailure, ApiError."""
    from cavvy.cli.task.profiles import text_with_rates

    task = loaded.task
    origin = make_origin(client, project, loaded, loaded.text)
    try:
        return submit(
            client,
            text_with_rates(loaded.text, task, loaded.folder),
            path=file,
            params=params,
            project=project,
            origin=origin,
            name=name,
            # Without a terminal, a budget in the file counts as consent. On a terminal, the user is
            # always asked.
            consent=yes or (task.limits.budget is not None and not sys.stdin.isatty()),
        )
    except ApiError as error:
        if error.code != "no-offer":
            raise
        from cavvy.cli.task.available import suggest_offer

        is_file = Path(file).is_file()
        raise CommandFailure(error.message, suggest_offer(task, file, is_file=is_file)) from error


class GraphFile(Struct, frozen=True, kw_only=True):
    """The tasks of a file, and the project that their jobs belong to."""

    tasks: "Sequence[LoadedTask]"
    file: str
    params: Mapping[str, str]
    project: str

    def requests(self, origins: "Sequence[RunOrigin]", *, consent: bool) -> list[SubmitRequest]:
        from cavvy.cli.task.profiles import text_with_rates

        own = self.params.items()
        return [
            SubmitRequest(
                text=text_with_rates(each.text, each.task, each.folder),
                path=self.file,
                params={name: value for name, value in own if name in each.task.params},
                origin=Raw(encode(origin)),
                name=each.task.name,
                user=getpass.getuser(),
                consent=consent,
            )
            for each, origin in zip(self.tasks, origins, strict=True)
        ]


def submit_graph(client: "ApiClient", graph: GraphFile, *, yes: bool) -> "list[Submitted]":
    """Upload the files of all tasks, and queue the jobs of all tasks or of none. If the user must
    first agree to the costs, show the prices and ask. Raises ApiError, CommandFailure.
    """
    origins = [make_origin(client, graph.project, each, each.text) for each in graph.tasks]
    budgeted = all(each.task.limits.budget is not None for each in graph.tasks)
    keys = [make_key() for _ in graph.tasks]

    def ask_server(consent: bool) -> "list[Submitted]":
        asks = graph.requests(origins, consent=consent)
        with held_interrupt() as interrupted:
            jobs = client.submit_graph(graph.project, GraphRequest(tasks=asks, keys=keys))
        leave_if(interrupted(), graph.project, [job.name for job in jobs])
        return jobs

    return ask_consent(yes or (budgeted and not sys.stdin.isatty()), ask_server)


def check_graph(client: "ApiClient", graph: GraphFile) -> str:
    """Let the server apply the checks of a submission. Return the price to which the user must
    first agree, or "". Raises ApiError."""
    from cavvy.domain.jobs import RunOrigin

    origins = [
        RunOrigin(task_text=each.text, dialect=each.source.kind, overrides=each.overrides)
        for each in graph.tasks
    ]
    keys = [make_key() for _ in graph.tasks]
    asks = graph.requests(origins, consent=False)
    found = client.check_graph(graph.project, GraphRequest(tasks=asks, keys=keys))
    return "\n".join(each.consent_needed for each in found if each.consent_needed)
