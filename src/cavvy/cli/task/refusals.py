"""Asks the server whether it would accept a task, without a submission. `cavvy run --dry-run`,
`plan` and `validate` use these checks, so that they refuse what `cavvy run` refuses.
"""

import getpass
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.session import make_failure, make_patience
from cavvy.cli.view.failure import CommandFailure
from cavvy.client import ApiError

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.client.wire import SubmissionCheck
    from cavvy.task_files import LoadedTask, ReadOptions

_PATIENCE_S = 5.0  # how long `plan` and `validate` repeat a request that no server answers


def ask_server(
    client: "ApiClient",
    loaded: "LoadedTask",
    file: str,
    params: Mapping[str, str],
    project: str | None,
    name: str | None = None,
) -> "SubmissionCheck":
    """Let the server apply the checks of a submission. Raises ApiError, CommandFailure."""
    from cavvy.cli.task.profiles import text_with_rates
    from cavvy.domain.jobs import RunOrigin

    return client.check_submission(
        text_with_rates(loaded.text, loaded.task, loaded.folder),
        project=project or loaded.task.project,
        path=file,
        params=params,
        origin=RunOrigin(
            task_text=loaded.text, dialect=loaded.source.kind, overrides=loaded.overrides
        ),
        name=name,
        user=getpass.getuser(),
    )


def find_refusal(
    file: str,
    params: Mapping[str, str],
    options: "ReadOptions",
    project: str | None,
    *,
    files: bool,
) -> CommandFailure | None:
    """Return why `cavvy run` would refuse the task although its file is valid. The server is asked
    if it is running. The local files are checked if `files` is set.

    Returns None if `cavvy run` would accept the task, and for files that the caller explains: files
    of services, and files with keys that `cavvy run` refuses. Prints a note if the server was not
    asked about something that only the server knows.
    """
    from cavvy.spec import SpecError
    from cavvy.task_files import load_tasks

    try:
        tasks = load_tasks(file, params, now=datetime.now(UTC), options=options)
    except SpecError:
        return None
    loaded = tasks[0]
    if files:
        from cavvy.cli.task.problems import object_to_files

        for each in tasks:
            if why := object_to_files(each.task, each.source, each.folder, sizes=True):
                return CommandFailure(why, exit_code=2)
    try:
        with _running_server() as client:
            if client is None:
                _note_unknown(loaded, "no server is running")
                return None
            price = _find_price(client, tasks, file, params, project)
    except ApiError as error:
        if error.code == "no-offer":  # a matter of the configured providers, not of the task
            click.echo(f"note: `cavvy run` would refuse this task now: {error.message}", err=True)
            return None
        if error.passing or error.code == "not-found":  # a server of an older version
            _note_unknown(loaded, error.message)
            return None
        return make_failure(error)
    if price:
        click.echo(f"note: `cavvy run` asks for your consent first: {price}", err=True)
    return None


def _find_price(
    client: "ApiClient",
    tasks: "Sequence[LoadedTask]",
    file: str,
    params: Mapping[str, str],
    project: str | None,
) -> str:
    """Let the server check the tasks. Return the price to which the user must first agree."""
    if len(tasks) == 1:
        return ask_server(client, tasks[0], file, params, project).consent_needed
    from cavvy.cli.task.submission import GraphFile, check_graph

    project = project or tasks[0].task.project
    return check_graph(client, GraphFile(tasks=tasks, file=file, params=params, project=project))


@contextmanager
def _running_server() -> Iterator["ApiClient | None"]:
    """Yield a client of the server, or None if no server is running on this machine."""
    from cavvy.client import Unreachable, connect

    try:
        client = connect(start=False, patience=make_patience(_PATIENCE_S))
    except Unreachable:
        yield None
        return
    with client:
        yield client


def _note_unknown(loaded: "LoadedTask", why: str) -> None:
    from cavvy.domain.tasks import list_secrets

    task = loaded.task
    asked = ["secrets"] * bool(list_secrets(task)) + ["machine"] * (task.machine is not None)
    asked += ["pool"] * (task.pool is not None)
    if asked:
        what = " and its ".join(asked)
        click.echo(
            f"note: whether the task's {what} exist was not checked: {why}; "
            "`cavvy run --dry-run` starts the server and checks this",
            err=True,
        )
