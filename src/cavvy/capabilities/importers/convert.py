"""`cavvy convert`: writes the file of another tool as Cavvy's task file."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cavvy.cli.task.load import param_option, read_params
from cavvy.cli.task.options import TaskCommand, task_options
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.output_file import replace_option, write_draft
from cavvy.named_files import read_named_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cavvy.domain.tasks import TaskSpec
    from cavvy.task_files import LoadedTask, ReadOptions


@click.command("convert", cls=TaskCommand)
@task_options
@param_option
@click.option(
    "--to",
    "target",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write to FILE instead of standard output.",
)
@replace_option
def command(
    file: str,
    options: "ReadOptions",
    param: tuple[str, ...],
    target: str | None,
    replaces: bool,
) -> None:
    """Write a file of another tool as Cavvy's task file.

    `cavvy run` does the same with the written file as with the one of the other tool: a batch
    script of Slurm, a file of SkyPilot, dstack or Kubernetes, or a script. Options such as --gpu
    override values. What the written file would lack is an error. A Cavvy file is written as it is.
    """
    from cavvy.task_files import ReadOptions

    params = read_params(param)
    tasks = _read(file, params, options)
    source = tasks[0].source
    if (
        source.kind == "Cavvy"
        and not source.guess
        and options == ReadOptions(dialect=options.dialect)
    ):
        text = read_named_text(file) if not params else _write(file, tasks, target)
    else:
        text = _write(file, tasks, target)
    if target is None:
        click.echo(text.rstrip("\n"))
        return
    write_draft(Path(target), text, replaces=replaces)
    click.echo(f"wrote {target}", err=True)


def _write(file: str, tasks: "Sequence[LoadedTask]", target: str | None) -> str:
    """Return the text of a task file with these tasks. Raises CommandFailure if it would not mean
    the same.
    """
    from cavvy.sdk.values import write_text
    from cavvy.spec.writing import make_keys, write_head

    texts = []
    for loaded in tasks:
        place = loaded.folder if target is None else Path(target).resolve().parent
        task = _move_folder(loaded, place)
        text = write_text(make_keys(task))
        _check(file, task, text)
        texts.append(text)
    source = tasks[0].source
    if source.kind == "Cavvy" and not source.guess:
        return "---\n".join(texts)
    left_out = [f"{each.key}: {each.reason}" for each in source.kept]
    remarks = [*left_out, *source.notes]
    kind, what = source.kind, source.what
    if kind == "Cavvy":  # the text of a Compose file is a Cavvy file already
        kind, what = "Docker Compose", "services"
    return write_head(kind, what, Path(file).name, remarks) + "---\n".join(texts)


def _move_folder(loaded: "LoadedTask", place: Path) -> "TaskSpec":
    """Return the task with its working folder as a path from the folder of the written file."""
    from cavvy.domain.values import replace

    task = loaded.task
    if task.workdir is None or task.workdir.path is None or place == loaded.folder:
        return task
    folder = loaded.folder / Path(task.workdir.path).expanduser()
    return replace(task, workdir=replace(task.workdir, path=os.path.relpath(folder, place)))


def _read(file: str, params: dict[str, str], options: "ReadOptions") -> "list[LoadedTask]":
    from cavvy.domain.values import replace
    from cavvy.spec import SpecError
    from cavvy.task_files import load_file, load_tasks

    try:
        found = load_file(file, params, options=options)
        serves = any(task.service is not None for task in found.tasks)
        tasks = load_tasks(file, params, options=replace(options, serves=serves))
    except SpecError as error:
        raise CommandFailure(str(error), exit_code=2) from error
    unset = [each for loaded in tasks for each in loaded.source.kept if each.until_submitted]
    if unset:
        message = f"{file}: {unset[0]}"
        hint = "for example --env NAME=VALUE" if unset[0].key.startswith("file_mounts") else ""
        raise CommandFailure(message, hint, exit_code=2)
    if local := [each.source for loaded in tasks for each in loaded.source.local]:
        hint = "copy it into the folder of the file, and name it there"
        message = f"a Cavvy file cannot name {local[0]}, which is submitted beside the folder"
        raise CommandFailure(f"{file}: {message}", hint, exit_code=2)
    return list(tasks)


def _check(file: str, task: "TaskSpec", text: str) -> None:
    """Refuse to write a file that would not mean the same."""
    from cavvy.spec import SpecError
    from cavvy.spec.writing import list_differences
    from cavvy.task_files import ReadOptions, parse_task

    verb = "run" if task.service is None else "serve"
    hint = f"`cavvy {verb} {file}` runs the file as it is"
    if task.replica_groups:
        message = f"{file}: groups of replicas cannot be written as a Cavvy file yet"
        raise CommandFailure(message, hint, exit_code=2)
    serves = ReadOptions(dialect="cavvy", serves=task.service is not None)
    try:
        written = parse_task(text, file=file, options=serves)
    except SpecError as error:
        raise CommandFailure(f"a Cavvy file cannot say this: {error}", exit_code=2) from error
    if lost := list_differences(task, written):
        message = f"{file}: a Cavvy file cannot say this part of the task: {', '.join(lost)}"
        raise CommandFailure(message, hint, exit_code=2)
