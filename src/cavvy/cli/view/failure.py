"""An error told to a person; every command ends with it where it cannot do what it was asked to."""

from typing import Any

import click


def escape_controls(text: str, keep: str = "") -> str:
    """The text with what could move a terminal's cursor, or hide a part of it, as escapes."""
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


class CommandFailure(click.ClickException):
    """An error told to a person: what went wrong, then what to do."""

    def __init__(self, message: str, hint: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.hint = hint
        self.exit_code = exit_code  # type: ignore[misc]  # click reads it from the instance

    def show(self, file: Any = None) -> None:
        for title, colour, text in (("error:", "red", self.message), ("hint:", "cyan", self.hint)):
            if text:  # which may quote what a node said
                shown = escape_controls(text, keep="\n\t")
                click.echo(
                    f"{click.style(title, fg=colour, bold=colour == 'red')} {shown}", err=True
                )
