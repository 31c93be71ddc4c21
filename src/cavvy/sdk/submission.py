"""Submits a task: takes a snapshot of its files, uploads them, and queues the job."""

import getpass
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING

from cavvy import settings
from cavvy.client import make_key
from cavvy.client.addresses import list_own_path
from cavvy.client.blobs import upload
from cavvy.client.state import default_home
from cavvy.client.usual_project import USUAL_PROJECT
from cavvy.domain.arrays import is_array
from cavvy.domain.units import UnitError, parse_usd
from cavvy.domain.values import replace
from cavvy.sdk.errors import InvalidArgument, InvalidTask
from cavvy.sdk.files import find_parts, freeze_parts, send_frozen
from cavvy.sdk.values import check_type
from cavvy.spec.repository import capture
from cavvy.spec.workdir import FolderSnapshot, FreezeError

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.client.wire import Submitted
    from cavvy.domain.jobs import RunOrigin
    from cavvy.domain.tasks import Scalar, TaskSpec
    from cavvy.sdk.task import Task
    from cavvy.task_files import LoadedTask


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOptions:
    """The options with which a task is submitted; see `Client.submit`."""

    params: Mapping[str, object] | None = None
    name: str | None = None
    project: str | None = None
    consent: bool = False
    max_cost: str | float | Decimal | None = None
    array: bool = False  # whether the task must be an array of jobs, or must not be one
    serves: bool = False  # whether the task must be a service, or must not be one
    # files to send with the working folder, by their path in it
    files: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentTask:
    """A task whose files are at the server. `notes` are remarks about the working folder, for
    example about files that were left out.
    """

    text: str
    project: str
    path: str
    params: "Mapping[str, Scalar]"
    origin: "RunOrigin"
    notes: tuple[str, ...]
    budget: bool  # whether the task limits its cost, which counts as consent


def submit_task(
    connection: "ApiClient",
    task: "Task",
    options: SubmitOptions,
    home: str | None,
    find_project: Callable[[], str],
) -> "tuple[Submitted, tuple[str, ...]]":
    """Queue the task. Returns the job, and remarks about the working folder, for example about
    files that were left out. Raises InvalidTask, ApiError, FreezeError, SettingsError.
    """
    ceiling_micros = _read_ceiling(options.max_cost)
    prepared = prepare_task(connection, task, options, home, find_project)
    made = connection.submit(
        prepared.text,
        project=prepared.project,
        path=prepared.path,
        params=prepared.params,
        origin=prepared.origin,
        name=options.name,
        user=getpass.getuser(),
        # a budget in the task counts as consent, as it does for a command without a terminal
        consent=options.consent or ceiling_micros is not None or prepared.budget,
        ceiling_micros=ceiling_micros,
        key=make_key(),
    )
    return made, prepared.notes


def prepare_task(
    connection: "ApiClient",
    task: "Task",
    options: SubmitOptions,
    home: str | None,
    find_project: Callable[[], str],
) -> SentTask:
    """Check the task and upload its files. Raises what `submit_task` raises."""
    loaded = task._load(options.params, now=datetime.now(UTC), serves=options.serves)
    _check(loaded)
    _check_array(loaded.task, wanted=options.array)
    named = options.project or loaded.task.project
    project = find_project() if named == USUAL_PROJECT and not options.project else named
    origin, notes = _make_origin(
        connection, project, loaded, home, sent=task.sent, files=options.files
    )
    return SentTask(
        text=loaded.text,
        project=project,
        path=task.path,
        params=task._join_params(options.params),
        origin=origin,
        notes=notes,
        budget=loaded.task.limits.budget is not None,
    )


def _check(loaded: "LoadedTask") -> None:
    """Raise InvalidTask if only the command `cavvy run` can submit the task."""
    from cavvy.spec.fields.workdir import is_commit

    task = loaded.task
    if task.work is not None and task.work.profile is not None:
        raise InvalidTask(
            "work.profile: only `cavvy run` reads work profiles",
            "write the rates of the profile as work.rates",
        )
    workdir = task.workdir
    if workdir is not None and workdir.git is not None and not is_commit(workdir.commit or ""):
        raise InvalidTask(
            f"workdir names no commit of {workdir.git}; only `cavvy run` can look up the newest "
            "commit of a branch or tag",
            "name the commit in workdir",
        )


def _check_array(task: "TaskSpec", *, wanted: bool) -> None:
    if is_array(task) and not wanted:
        raise InvalidTask("the task is an array of jobs", "submit it with `submit_array`")
    if wanted and not is_array(task):
        hint = 'pass array="0-99", or sweep={"NAME": [VALUE, VALUE]}'
        raise InvalidTask("the task is one job, not an array", hint)


def _read_ceiling(max_cost: str | float | Decimal | None) -> int | None:
    if max_cost is None:
        return None
    check_type(max_cost, (Real, str, Decimal), "max_cost")
    try:
        return parse_usd(max_cost).micros
    except UnitError as error:
        raise InvalidArgument(f"max_cost: {error}") from error


def _make_origin(
    connection: "ApiClient",
    project: str,
    loaded: "LoadedTask",
    home: str | None,
    *,
    sent: set[Path] | None,
    files: Mapping[str, Path],
) -> "tuple[RunOrigin, tuple[str, ...]]":
    """Upload the task's files. Returns the origin of the run, and remarks about the files."""
    parts = find_parts(loaded.task, loaded.source, loaded.folder) | dict(files)
    origin = capture(parts.get("", loaded.folder), task_text=loaded.text)
    notes = loaded.source.notes

    def send(snapshot: FolderSnapshot) -> int:
        if sent is not None:
            _check_folders(loaded, parts, snapshot, sent)
        return upload(connection, project, snapshot.blobs())

    if parts:
        limit_mib = settings.load().whole("server.blob_mib")
        folder = Path(home or default_home())
        snapshot, _ = send_frozen(
            lambda: freeze_parts(loaded.task, parts, folder, limit_mib),
            send,
        )
        origin, notes = replace(origin, snapshot=snapshot.hash), (*notes, *snapshot.notes)
    path = list_own_path(connection.address, *_list_programs())
    origin = replace(origin, dialect=loaded.source.kind, overrides=loaded.overrides, path=path)
    return origin, notes


def _check_folders(
    loaded: "LoadedTask", parts: Mapping[str, Path], snapshot: FolderSnapshot, sent: set[Path]
) -> None:
    """Raise FreezeError for a folder that the task file may have chosen against the user, unless
    the program has named it (`sent`).
    """
    from cavvy.spec.sent_folders import find_doubtful, is_named

    own = loaded.source.own_folder
    named = is_named(loaded.overrides, own)
    found = find_doubtful(parts, loaded.folder, snapshot, named=named, own=bool(own))
    for each in found:
        if each.real in sent:
            continue
        raise FreezeError(
            f"the local folder {each.real} of the task ({each.files:,} files, {each.size:,} bytes) "
            f"{each.why}; nothing was sent",
            "if you want to send it, name it: task.replace(workdir=FOLDER)"
            if each.is_workdir
            else "save credentials as secrets of the project; if you want to send this, name it: "
            "Task.from_file(FILE, send=[PATH])",
        )


def _list_programs() -> list[str]:
    """Return the folder with the programs of this Python's virtual or conda environment, which may
    not be on PATH: notebooks start kernels without activating their environments.
    """
    apart = sys.prefix != sys.base_prefix or os.path.isdir(f"{sys.prefix}/conda-meta")
    return [f"{sys.prefix}/bin"] * apart
