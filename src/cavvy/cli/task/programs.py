"""Finds Python files that a capability runs itself, instead of submitting them as scripts."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click

from cavvy.cli.task.options import COMMAND_WORDS, TaskCommand
from cavvy.cli.view.failure import CommandFailure

_PROGRAM = "cavvy.program"  # what a command does with such a file
_KEPT = ("file", "project", "yes")  # arguments of the command that such a file may have


class Program(NamedTuple):
    """What the commands do with such a file: with the words of the command line, its project, or
    None, and whether the user agrees to what it costs.
    """

    run: Callable[[Path, Sequence[str], str | None, bool], None]
    deploy: Callable[[Path, str | None, bool], None]
    # runs the file again whenever its folder changes, until the user ends it
    dev: Callable[[Path, Sequence[str], str | None, bool], None]


class ProgramCommand(TaskCommand):
    """A command for task files that also takes such Python files; the words after -- are theirs."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        file = next((each for each in args if each.endswith(".py")), "")
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if not file or find_program(file) is None:
                raise
            hint = f"options of the program itself stand behind --: {ctx.command_path} {file} -- "
            hint += f"{error.option_name} VALUE"
            raise CommandFailure(f"there is no option {error.option_name}", hint, 2) from error

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
        agrees = bool(ctx.params.get("yes"))
        program.run(Path(file), words, ctx.params.get("project"), agrees)
        return None


class DeployCommand(click.Command):
    """A command that also deploys such a file: `cavvy deploy FILE.py --yes`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        file = args[0] if args and args[0].endswith(".py") else ""
        program = find_program(file) if file else None
        if program is None:
            _refuse_script(file)
            return super().parse_args(ctx, args)
        given = _read_kept(self, ctx, args)
        ctx.meta[_PROGRAM] = partial(program.deploy, Path(file), *given)
        return []

    def invoke(self, ctx: click.Context) -> object:
        deploy = ctx.meta.get(_PROGRAM)
        return super().invoke(ctx) if deploy is None else deploy()


class DevProgramCommand(TaskCommand):
    """A command that also runs such a file again and again: `cavvy dev FILE.py -- WORDS`."""

    def takes(self, ctx: click.Context, args: list[str]) -> bool:
        """Return whether the words name such a file, which `invoke` runs then."""
        file = args[0] if args and args[0].endswith(".py") else ""
        program = find_program(file) if file else None
        if program is None:
            _refuse_script(file)
            return False
        words: list[str] = []
        if "--" in args:
            at = args.index("--")
            args, words = args[:at], args[at + 1 :]
        given = _read_kept(self, ctx, args)
        ctx.meta[_PROGRAM] = partial(program.dev, Path(file), words, *given)
        return True

    def invoke(self, ctx: click.Context) -> object:
        dev = ctx.meta.get(_PROGRAM)
        return super().invoke(ctx) if dev is None else dev()


def _refuse_script(file: str) -> None:
    """Raise CommandFailure if this is a Python file: one that makes no app, or it would be run."""
    if file and Path(file).is_file():
        hint = 'such a file has a line like `app = cavvy.App("embed")`'
        raise CommandFailure(f"{file} makes no app", hint, exit_code=2)


def _read_kept(
    command: click.Command, ctx: click.Context, args: list[str]
) -> tuple[str | None, bool]:
    """Return the project of a command's words behind the file, and whether the user agrees to what
    it costs."""
    kept = [each for each in command.params if each.name in _KEPT and each.name != "file"]
    own = click.Command(
        ctx.info_name, params=kept, callback=lambda **given: given, help=command.help
    )
    given = own.main(args[1:], ctx.command_path, standalone_mode=False)
    if not isinstance(given, dict):  # it has shown its help
        ctx.exit()
    return given.get("project"), bool(given.get("yes"))


def find_program(file: str) -> Program | None:
    """Return what runs this Python file, or None if it is a script as others are."""
    from cavvy.frame.discover import load_all

    if not Path(file).is_file():  # a pipe is read once, as a task file
        return None
    try:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for _, find in load_all(lambda each: each.programs):
        if (found := find(text)) is not None:
            program: Program = found
            return program
    return None
