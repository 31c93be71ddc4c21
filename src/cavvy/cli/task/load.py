"""Reads a task file and its --param options. Problems are reported with line and column."""

import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from cavvy.cli.view.failure import CommandFailure, note_out

if TYPE_CHECKING:
    from cavvy.domain.tasks import TaskSpec, Workdir
    from cavvy.task_files import LoadedTask, ReadOptions, Translation


task_argument = click.argument("file", metavar="TASK.YAML", type=click.Path(dir_okay=False))
param_option = click.option(
    "--param", multiple=True, metavar="NAME=VALUE", help="Override a parameter of the task."
)
yes_option = click.option(
    "-y", "--yes", is_flag=True, help="Agree to pay for offers that cost money."
)


def read_params(
    pairs: tuple[str, ...], option: str = "--param", example: str = "lr=0.1"
) -> dict[str, str]:
    """Read --param options, or those of another name: `("lr=0.1",)` becomes `{"lr": "0.1"}`. Raises
    CommandFailure.
    """
    params = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise CommandFailure(
                f"{option} {pair}: expected NAME=VALUE", f"for example {option} {example}", 2
            )
        params[name] = value
    return params


def read_task(
    file: str,
    params: Mapping[str, str],
    options: "ReadOptions | None" = None,
    *,
    tells: bool = False,
) -> "LoadedTask":
    """Return the only task in `file`; see `read_tasks`."""
    found = read_tasks(file, params, options, tells=tells)
    if len(found) > 1:
        hint = "`cavvy run` submits them together"
        raise CommandFailure(f"{file}: the file has {len(found)} tasks", hint, exit_code=2)
    return found[0]


def read_tasks(
    file: str,
    params: Mapping[str, str],
    options: "ReadOptions | None" = None,
    *,
    tells: bool = False,
) -> "Sequence[LoadedTask]":
    """Return the tasks in `file` with these parameters. If a task is invalid, raises a
    CommandFailure with all problems. If `tells` is true, prints which tool's file was read, and the
    notes on its translation.
    """
    from cavvy.cli.task.problems import check_task
    from cavvy.spec import SpecError
    from cavvy.task_files import ReadOptions, load_tasks

    options, now = options or ReadOptions(), datetime.now(UTC)
    try:
        found = load_tasks(file, params, now=now, options=options)
        if tells and found[0].source.guess:
            note_out(found[0].source.guess)
            if file != "-":
                line = f"cavvy convert {shlex.quote(file)}"
                note_out(f"`{line}` writes it as a Cavvy file")
        for loaded in found:
            for each in loaded.source.kept if tells else ():
                note_out(str(each))
            for each in loaded.source.kept:
                if each.until_submitted and each.key.startswith("file_mounts"):
                    hint = "for example --env NAME=VALUE"
                    raise CommandFailure(f"{file}: {each}", hint, exit_code=2)
            notes = check_task(file, loaded.source, loaded.folder, text=options.text)
            for note in notes if tells else ():
                note_out(note)
        workdir = _find_unnamed(found)
        if workdir is None:
            return found
        if len(found) > 1:
            hint = "write the full hash of a commit"
            message = f"{file}: {workdir.commit or 'HEAD'} of {workdir.git} is not a commit"
            raise CommandFailure(message, hint, exit_code=2)
        options = _name_commit(options, workdir.git or "", workdir.commit or "HEAD")
        return load_tasks(file, params, now=now, options=options)
    except SpecError as error:
        raise CommandFailure(str(error), exit_code=2) from error


def _find_unnamed(tasks: "Sequence[LoadedTask]") -> "Workdir | None":
    """Return a working folder that is a branch or tag instead of a commit, or None."""
    from cavvy.spec.fields.workdir import is_commit

    folders = [each.task.workdir for each in tasks]
    return next(
        (each for each in folders if each and each.git and not is_commit(each.commit or "")), None
    )


def _name_commit(options: "ReadOptions", url: str, ref: str) -> "ReadOptions":
    """Return the options with `ref` (a branch or tag in a file of another tool) replaced by its
    current commit. Raises CommandFailure.
    """
    import json

    import yaml

    from cavvy.domain.values import replace
    from cavvy.spec.repository import run_apart

    done = run_apart("ls-remote", "--", url, ref, f"{ref}^{{}}")
    if done is None:
        rows, reason = [], "git is not installed, or it got no answer"
    else:
        rows = [line.split("\t") for line in done.stdout.decode(errors="replace").splitlines()]
        said = done.stderr.decode(errors="replace").strip()
        reason = said or "the repository does not have this branch or tag"
    if not rows:
        raise CommandFailure(f"cannot find {ref} of {url}: {reason}", exit_code=2)
    # If `ref` is an annotated tag, the line that ends with ^{} has its commit.
    commit = max(rows, key=lambda row: row[1].endswith("^{}"))[0]
    note_out(f"{ref} of {url} is commit {commit[:12]} now; every attempt runs this commit")
    changes = {
        **(yaml.safe_load(options.overrides or "{}")),
        "workdir": {"git": url, "commit": commit},
    }
    return replace(options, overrides=json.dumps(changes))


def read_any_task(
    file: str, params: Mapping[str, str], options: "ReadOptions | None" = None
) -> "TaskSpec":
    """Read the only task of a file; see `read_any_tasks`."""
    found = _read_any(file, params, options)
    if found.task is None:
        count = f"{len(found.tasks)} tasks" if found.tasks else "nothing that runs"
        raise CommandFailure(
            f"{file} is a {found.kind} {found.what} with {count}; expected exactly one task"
        )
    return found.task


def read_any_tasks(
    file: str, params: Mapping[str, str], options: "ReadOptions | None" = None
) -> "Sequence[TaskSpec]":
    """Read the tasks from a task file or from a file of another tool. A file of another tool is
    read even if `cavvy run` would refuse it. Prints notes on how the file was translated to tasks.
    Raises CommandFailure.
    """
    found = _read_any(file, params, options)
    if not found.tasks:
        message = f"{file} is a {found.kind} {found.what} with nothing that runs"
        raise CommandFailure(message, "expected a task")
    return found.tasks


def _read_any(file: str, params: Mapping[str, str], options: "ReadOptions | None") -> "Translation":
    from cavvy.spec import SpecError
    from cavvy.task_files import ReadOptions, load_file

    try:
        found = load_file(file, params, now=datetime.now(UTC), options=options or ReadOptions())
    except SpecError as error:
        raise CommandFailure(str(error), exit_code=2) from error
    if found.guess:
        note_out(found.guess)
    for each in found.kept:
        note_out(str(each), "not supported" if each.refused else "note")
    for note in found.notes:
        note_out(note)
    return found
