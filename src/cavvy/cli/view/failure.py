"""The error that ends a command with a message for the user."""

from typing import Any

import click


def escape_controls(text: str, keep: str = "") -> str:
    """The text with control characters escaped, so that it cannot move a terminal's cursor."""
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


class CommandFailure(click.ClickException):
    """An error message for the user: what went wrong, then what to do."""

    def __init__(self, message: str, hint: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.hint = hint
        self.exit_code = exit_code  # type: ignore[misc]  # click reads it from the instance

    def show(self, file: Any = None) -> None:
        for title, colour, text in (("error:", "red", self.message), ("hint:", "cyan", self.hint)):
            if text:  # the text may quote what a node sent
                shown = escape_controls(text, keep="\n\t")
                click.echo(
                    f"{click.style(title, fg=colour, bold=colour == 'red')} {shown}", err=True
                )
