"""Shared code of the commands that use the server: the connection, the project, and the project's
jobs.

Lets a command clean up when SIGTERM or SIGHUP ends it.
"""

import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Concatenate, NoReturn, ParamSpec, TypeVar

import click

from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.numbers import count_option

if TYPE_CHECKING:
    from cavvy.client import ApiClient, ApiError, Patience
    from cavvy.client.wire import JobListing
    from cavvy.domain.tasks import TaskSpec


_P = ParamSpec("_P")
_T = TypeVar("_T")
_PAGE = 200
USUAL_PROJECT = "default"  # as in `client.usual_project`, whose import would slow down commands
PATIENCE_S = 120.0  # maximum seconds for which a command repeats a request if no server answers
FOLLOW_PATIENCE_S = 600.0  # the same limit in seconds, for commands that follow a job
# exit code (EX_UNAVAILABLE) if no server answered, so that the job's state is unknown
NO_SERVER = 69


@contextmanager
def session(*, patience_s: float = PATIENCE_S) -> Iterator["ApiClient"]:
    """Yield a client of the server, which is started if it is not running. An ApiError becomes a
    CommandFailure.
    """
    from cavvy.client import connect

    with failures(), connect(patience=make_patience(patience_s)) as client:
        client.before_change = _say_project
        yield client


def call_server(
    request: "Callable[Concatenate[ApiClient, _P], _T]", *args: _P.args, **kwargs: _P.kwargs
) -> _T:
    """Make one request in a session of its own, and return the answer. Raises CommandFailure."""
    with session() as client:
        return request(client, *args, **kwargs)


def make_patience(limit_s: float = PATIENCE_S) -> "Patience":
    """Return the time limit for repeating a request if no server answers. Waiting is reported on
    standard error.
    """
    from cavvy.client import Patience

    def report(text: str) -> None:
        # rich replaces `sys.stderr` while a live line is shown; `click.echo` would bypass that and
        # write into the live line
        print(f"cavvy: {text}", file=sys.stderr, flush=True)

    return Patience(limit_s, report)


@contextmanager
def failures() -> Iterator[None]:
    """Turn an ApiError into a CommandFailure."""
    from cavvy.client import ApiError

    try:
        yield
    except ApiError as error:
        raise make_failure(error) from error


def make_failure(error: "ApiError") -> CommandFailure:
    """Return the failure of a command, with the exit code EX_UNAVAILABLE if no server answered."""
    from cavvy.client import StartFailed, Unreachable
    from cavvy.client.errors import FOR_PROGRAMS

    if error.code in ("invalid-request", "not-found"):
        own = error.code == "invalid-request" and error.hint not in ("", FOR_PROGRAMS)
        hint = error.hint if own else f"`{_command()} --help` shows the arguments"
        return CommandFailure(error.message, hint, 2)
    if not isinstance(error, Unreachable | StartFailed):
        return CommandFailure(error.message, error.hint)
    hint = error.hint or "`cavvy server status` shows the server"
    message = f"no answer from the server: {error.message}" if error.passing else error.message
    return CommandFailure(message, hint, NO_SERVER)


def _command() -> str:
    """Return the command as the user calls it, such as `cavvy secret set`."""
    context = click.get_current_context(silent=True)
    return context.command_path if context is not None else "cavvy"


_FOUND = f"{__name__}.project"  # the key in a command's `meta`
_SAID = f"{__name__}.said"  # set once the project of a command need not be named any more
_ASKING_S = 15.0


def default_project() -> str:
    """Return the project of a command that names none; see `client.usual_project`. Raises
    CommandFailure if the account has several projects and none was chosen.
    """
    context = click.get_current_context(silent=True)
    meta = {} if context is None else context.meta
    if _FOUND not in meta:
        with failures():
            meta[_FOUND] = _find_project()
    return str(meta[_FOUND])


def _find_project() -> str:
    from cavvy.client.contexts import chosen_context
    from cavvy.client.state import default_home
    from cavvy.client.usual_project import find_chosen, find_own

    if named := find_chosen(default_home()):
        return named
    context = chosen_context(default_home())
    if context is None:
        return USUAL_PROJECT
    from cavvy.client.connection import open_context
    from cavvy.client.errors import ApiError

    try:
        with open_context(context, timeout_s=_ASKING_S) as client:
            return find_own(client)
    except ApiError as error:
        if error.code == "project-not-chosen":
            raise
        return USUAL_PROJECT  # the command itself reports that the server does not answer


def _say_project() -> None:
    """Name the project before the first change of a command that does not name it."""
    context = click.get_current_context(silent=True)
    found = None if context is None else context.meta.get(_FOUND)
    if context is None or found in (None, USUAL_PROJECT) or _SAID in context.meta:
        return
    context.meta[_SAID] = True
    if context.params.get("project") in (None, found):
        print(f"project {found}", file=sys.stderr, flush=True)


def task_project(project: str | None, task: "TaskSpec") -> str:
    """Return the project of a task's job: the one that was given, or that the task names, or the
    default project."""
    if project or task.project != USUAL_PROJECT:
        return project or task.project
    return default_project()


project_option = click.option(
    "-p",
    "--project",
    default=default_project,
    show_default="CAVVY_PROJECT, or that of `cavvy project use`, or your only one",
    help="The project.",
)


any_project_option = click.option(
    "-p", "--project", help="Show only this project; the default is all projects."
)


detach_option = click.option("-d", "--detach", is_flag=True, help="Do not follow the log.")


rank_option = count_option(
    "--rank", least=0, default=0, help="The rank of the job's node; 0 is the first."
)


def named(project: str, name: str) -> str:
    """Return the arguments that name the job in a command line: the name, and -p if its project is
    not the default project.
    """
    try:
        usual = default_project()
    except CommandFailure:
        usual = ""
    return name if project == usual else f"{name} -p {project}"


def find_project_note(client: "ApiClient", project: str | None, undo: str) -> str:
    """Return a note if no such project was created, because its name may be wrong, or "". `undo` is
    the end of the note, such as "`COMMAND` removes it".
    """
    from cavvy.client.account_wire import AccountClient

    if not project or project == USUAL_PROJECT:
        return ""
    if project in {each.name for each in AccountClient(client).projects()}:
        return ""
    return (
        f"{project} was not created as a project; `cavvy project create {project}` creates the "
        f"project, and {undo}"
    )


def list_jobs(
    client: "ApiClient",
    project: str | None,
    phases: Collection[str] = (),
    limit: int | None = None,
    *,
    arrays: bool = False,
    user: str = "",
) -> "tuple[list[JobListing], bool]":
    """Return at most `limit` jobs, newest first, and whether more jobs exist. If `arrays` is set,
    each array is one row. With `user`, only the jobs that this user has submitted, and with
    `arrays`, each service is one row, too.
    """
    if user:
        return _list_of_user(client, project, phases, limit, user, arrays=arrays)
    rows: list[JobListing] = []
    cursor = None
    while True:
        size = _PAGE if limit is None else min(_PAGE, limit - len(rows))
        page = client.jobs(project, phases=phases, cursor=cursor, limit=size, arrays=arrays)
        rows += page.jobs
        cursor = page.cursor
        if cursor is None or (limit is not None and len(rows) >= limit):
            return rows, cursor is not None


def _list_of_user(
    client: "ApiClient",
    project: str | None,
    phases: Collection[str],
    limit: int | None,
    user: str,
    *,
    arrays: bool,
) -> "tuple[list[JobListing], bool]":
    rows: dict[str, JobListing] = {}  # by ID: a job that is submitted meanwhile moves the pages
    offset = 0
    while True:
        size = _PAGE if limit is None else min(_PAGE, limit - len(rows))
        wanted = {"project": project, "phase": phases, "user": user, "arrays": arrays}
        page = client.search_jobs(**wanted, offset=offset, limit=size)
        rows |= {row.id: row for row in page.jobs}
        offset += len(page.jobs)
        more = offset < page.total and bool(page.jobs)
        if not more or (limit is not None and len(rows) >= limit):
            return list(rows.values()), more


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """On SIGHUP and SIGTERM, raise SystemExit instead of ending at once, so that a command ends
    what it has started and deletes its temporary files.
    """
    numbers = (signal.SIGHUP, signal.SIGTERM)
    handlers = {number: signal.getsignal(number) for number in numbers}
    # `nohup` ignores SIGHUP; a handler that is None belongs to a C library
    heard = {n: each for n, each in handlers.items() if each not in (signal.SIG_IGN, None)}
    for number in heard:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number, handler in heard.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
