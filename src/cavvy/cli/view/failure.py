"""An error told to a person; every command ends with it where it cannot do what it was asked to."""

from typing import Any

import click


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
