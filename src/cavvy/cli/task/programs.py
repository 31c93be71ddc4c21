"""Finds Python files that a capability runs itself, instead of submitting them as scripts."""

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from cavvy.cli.task.options import COMMAND_WORDS, TaskCommand
from cavvy.cli.view.failure import CommandFailure

Program = Callable[[Path, Sequence[str], str | None], None]
_KEPT = ("file", "project")  # arguments of the command that such a file may have


class ProgramCommand(TaskCommand):
    """A command for task files that also takes such Python files; the words after -- are theirs."""

    def invoke(self, ctx: click.Context) -> object:
        file = str(ctx.params.get("file") or "")
        program = find_program(file) if file.endswith(".py") else None
        if program is None:
            return super().invoke(ctx)
        given = click.core.ParameterSource.COMMANDLINE
        for each in self.params:
            name = each.name or ""
            if name not in _KEPT and ctx.get_parameter_source(name) is given:
                raise CommandFailure(
                    f"{each.opts[0]} is an option for task files, and {file} makes an app",
                    "write what functions need into the file, such as @app.function(gpu='A100')",
                    exit_code=2,
                )
        words = ctx.meta.get(COMMAND_WORDS) or []
        program(Path(file), words, ctx.params.get("project"))
        return None


def find_program(file: str) -> Program | None:
    """Return the function that runs this Python file, or None if it is a script as others are."""
    from cavvy.frame.discover import load_all

    try:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for _, find in load_all(lambda each: each.programs):
        if (found := find(text)) is not None:
            program: Program = found
            return program
    return None
