"""The argument TRAIN.PY of commands that run a training script, which can be a module."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from cavvy.capabilities.estimates import MODULE
from cavvy.cli.view.failure import CommandFailure

CommandFunction = TypeVar("CommandFunction", bound=Callable[..., Any])


def script_argument(
    *, required: bool = True, explain: Callable[[str], str] | None = None
) -> Callable[[CommandFunction], CommandFunction]:
    """Return a decorator that adds the argument `script` and the option `-m`. With `-m`, the value
    of `script` is `-m package.module`. `explain` returns a hint for a value that is no file, or "".
    """

    def read(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
        is_module = bool(context.params.get("is_module"))
        if explain and value and not is_module and not os.path.exists(value):
            hint = "" if value.endswith(".py") else explain(value)
            if hint:
                raise CommandFailure(f"there is no file {value!r}", hint, exit_code=2)
        return _read(context, parameter, value)

    def add(command: CommandFunction) -> CommandFunction:
        metavar = "TRAIN.PY" if required else "[TRAIN.PY]"
        command = click.argument(
            "script",
            required=required,
            metavar=metavar,
            type=click.Path(),
            callback=read,
        )(command)
        return click.option(
            "-m",
            "is_module",
            is_flag=True,
            is_eager=True,
            help="TRAIN.PY is a module, such as package.train, and runs as `python -m` runs it.",
        )(command)

    return add


def _read(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return the script, and check that it exists. Importing a module's package may have effects,
    so only the first part of a module's name is checked.
    """
    is_module = context.params.pop("is_module", False)
    if value is None:
        if is_module:
            raise click.UsageError("-m needs the name of a module, such as package.train", context)
        return None
    if not is_module:
        path = str(click.Path(dir_okay=False, exists=True).convert(value, parameter, context))
        if not os.path.isfile(path):  # Python reads a script several times
            raise click.BadParameter(f"'{path}' is a pipe or a device", context, parameter)
        return path
    first = value.partition(".")[0]
    if not first.isidentifier() or not _can_import(first):
        raise click.BadParameter(
            f"there is no module {first!r} in the current folder or among the installed packages",
            context,
            parameter,
        )
    return MODULE + value


def list_words(script: str) -> list[str]:
    """Return the words with which a shell passes a script to `python`."""
    return ["-m", script.removeprefix(MODULE)] if script.startswith(MODULE) else [script]


def explain_relative_import(command: str, error: str) -> str:
    """Return a hint if a script failed because it imports modules relative to its package."""
    if "attempted relative import with no known parent package" not in error:
        return ""
    return (
        "in the folder that contains the script's package, name the script as a module: "
        f"`cavvy {command} -m package.train`"
    )


def _can_import(name: str) -> bool:
    import sys
    from importlib.machinery import PathFinder

    return PathFinder.find_spec(name, [os.getcwd(), *sys.path]) is not None
