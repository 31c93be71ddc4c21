"""`cavvy validate`: checks task files and explains what they mean, or lists all of their
problems.
"""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cavvy.cli.task.load import param_option, read_params
from cavvy.cli.task.options import as_option
from cavvy.cli.view.failure import CommandFailure, note_out
from cavvy.cli.view.output import json_option

if TYPE_CHECKING:
    from cavvy.spec import SpecError
    from cavvy.task_files import Translation


@click.command("validate")
@click.argument("files", nargs=-1, metavar="FILE...")
@param_option
@as_option
@click.option(
    "-p", "--project", default=None, help="The project; the default is the project in the file."
)
@json_option
@click.option(
    "--schema",
    is_flag=True,
    help="Print only the JSON Schema of task files, for editors.",
)
def command(
    files: tuple[str, ...],
    param: tuple[str, ...],
    dialect: str | None,
    project: str | None,
    output: str,
    schema: bool,
) -> None:
    """Check task files and explain them.

    For a valid file, the command explains the task in plain words. For an invalid file, the command
    prints every problem with line, column and a suggested fix, and exits with 2. Unknown regions
    and providers, files that cannot be submitted, and resources or limits that no offer meets are
    problems, too; in a file of another tool, such resources are a note. Files of other tools are
    also supported. If `cavvy run` would refuse fields of such a file, the command lists these
    fields and exits with 1. If the server is running, the command also asks the server, and exits
    with 1 if `cavvy run` would refuse the task, for example because the project lacks one of the
    task's secrets.
    """
    if schema:
        from cavvy.cli.view.output import json_out
        from cavvy.spec.fields.task import make_schema

        json_out(make_schema())
        return
    if not files:
        raise click.UsageError("expected a file, such as `cavvy validate task.yaml`")
    sys.exit(_validate(files, read_params(param), dialect or "", project, output))


def _validate(
    files: tuple[str, ...], params: dict[str, str], dialect: str, project: str | None, output: str
) -> int:
    from cavvy.cli.task.options import read_script_task
    from cavvy.cli.task.problems import check_task, find_refusal
    from cavvy.domain.values import replace
    from cavvy.spec import SpecError
    from cavvy.task_files import ReadOptions, load_file

    results: list[object] = []
    code = 0
    for number, file in enumerate(files):
        if number and output == "table":
            click.echo()
        try:
            text = sys.stdin.read() if file == "-" else None
            options = ReadOptions(dialect=dialect, text=text)
            beside = str(Path(file).absolute().parent)
            if not dialect and (script := read_script_task(file, None, {}, beside)):
                options = ReadOptions(dialect="cavvy", text=script, takes_folder=True)
            found = load_file(file, params, now=datetime.now(UTC), options=options)
            folder = Path(file).absolute().parent
            notes = check_task(file, found, folder, whole=True, text=options.text)
            found = replace(found, notes=(*found.notes, *notes))
        except SpecError as error:
            code = 2
            if output == "json":
                results.append(_wrong(file, error))
            else:
                CommandFailure(str(error)).show()
            continue
        refusal = find_refusal(file, params, options, project, files=False)
        code = max(code, 1 if found.refused or refusal is not None else 0)
        if output == "json":
            results.append(_right(file, found, refusal))
        else:
            _explain(file, found)
            if refusal is not None:
                click.echo(f"`cavvy run` would refuse this task: {refusal}")
                if refusal.hint:
                    note_out(refusal.hint, "hint", err=False)
    if output == "json":
        from cavvy.cli.view.output import json_out

        json_out(results)
    return code


def _explain(file: str, found: "Translation") -> None:
    from cavvy.cli.view.output import pairs_out
    from cavvy.spec.describe import describe_task

    own = found.kind == "Cavvy"
    click.echo(f"{file} is valid." if own else f"{file} is a valid {found.kind} {found.what}.")
    if found.guess:
        note_out(found.guess, err=False)
    for number, task in enumerate(found.tasks):
        if number:
            click.echo()
        pairs_out(describe_task(task))
    for each in found.kept:
        note_out(str(each), "not supported" if each.refused else "note", err=False)
    for note in found.notes:
        note_out(note, err=False)
    if _serves(found) and found.refused:
        click.echo("`cavvy serve` would refuse this file.")
    elif _serves(found):
        note_out("`cavvy serve` starts this service; `cavvy run` would refuse the file.", err=False)
    elif found.refused:
        plans = "" if found.task is None else "; `cavvy plan` works with it"
        click.echo(f"`cavvy run` would refuse this file{plans}.")


def _right(file: str, found: "Translation", refusal: CommandFailure | None) -> object:
    """Return the result for a valid file. `task` is None if the file describes no task or several
    tasks. `runs` is true if `cavvy run` would accept the file. `refusal` is the server's reason to
    refuse the task.
    """
    from msgspec import to_builtins

    return {
        "file": file,
        "valid": True,
        "kind": found.kind,
        "what": found.what,
        "task": to_builtins(found.task),
        "tasks": to_builtins(found.tasks),
        "runs": not found.refused and not _serves(found) and refusal is None,
        "refusal": None if refusal is None else str(refusal),
        "kept": to_builtins(found.kept),
        "notes": list(found.notes),
        "problems": [],
    }


def _serves(found: "Translation") -> bool:
    return any(task.service is not None for task in found.tasks)


def _wrong(file: str, error: "SpecError") -> object:
    problems = [
        {
            "file": problem.file,
            "line": problem.line,
            "column": problem.column,
            "message": problem.message,
            "expected": problem.expected,
            "suggestion": problem.suggestion,
        }
        for problem in error.problems
    ]
    return {"file": file, "valid": False, "task": None, "problems": problems}
