"""What every command that talks to the server shares: the connection, the project, and how errors are said."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from remuda.client import Client

_F = TypeVar("_F", bound=Callable[..., object])


class Failure(click.ClickException):
    """An error told to a person: what went wrong, then what to do."""

    def __init__(self, message: str, hint: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.hint = hint
        self.exit_code = exit_code  # type: ignore[misc]  # click reads it from the instance

    def show(self, file: Any = None) -> None:
        click.echo(f"{click.style('error:', fg='red', bold=True)} {self.message}", err=True)
        if self.hint:
            click.echo(f"{click.style('hint:', fg='cyan')} {self.hint}", err=True)


@contextmanager
def session() -> Iterator["Client"]:
    """A client of the server, which is started where none runs; errors of the API become failures."""
    from remuda.client import ApiError, connect

    try:
        with connect() as client:
            yield client
    except ApiError as error:
        raise Failure(error.message, error.hint) from error


def project_option(function: _F) -> _F:
    """Add `-p/--project`; the value arrives as `project`, by default REMUDA_PROJECT or "default"."""
    return click.option(
        "-p",
        "--project",
        default=_default_project,
        show_default="REMUDA_PROJECT, or default",
        help="The project the job belongs to.",
    )(function)


def _default_project() -> str:
    return os.environ.get("REMUDA_PROJECT", "default")


def named(project: str, name: str) -> str:
    """A job as other commands take it: with -p where they would look into another project."""
    return name if project == _default_project() else f"{name} -p {project}"


def param_option(function: _F) -> _F:
    """Add `--param name=value`, many times; the value arrives as `param`."""
    return click.option("--param", multiple=True, metavar="NAME=VALUE", help="Override a parameter of the task.")(
        function
    )


def read_params(pairs: tuple[str, ...]) -> dict[str, str]:
    """`("lr=0.1",)` as `{"lr": "0.1"}`. Raises Failure."""
    params = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise Failure(f"--param {pair}: expected NAME=VALUE", "for example --param lr=0.1", exit_code=2)
        params[name] = value
    return params
