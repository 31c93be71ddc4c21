"""Writes the files that a user names for a command's output; all commands use it for them.

The folder may be a cloned repository, whose author chooses where its links lead: the user is asked
before a file is written where such a link leads out of the repository. `new_file.py` writes files
that must be complete, and `client/landing.py` those whose names others choose.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import click

from cavvy.cli.view.failure import CommandFailure, confirm

replace_option = click.option(
    "-y", "--yes", "replaces", is_flag=True, help="Replace FILE without asking, if it exists."
)


def check_output(path: Path) -> None:
    """Ask whether `path` may lead out of its repository by a link, if it does. What a library
    writes itself is checked so before. Raises CommandFailure.
    """
    from cavvy.cli.view.links import agree_to_exit

    hint = f"if you want to write there, name it: {path.resolve()}"
    agree_to_exit(path, "write there?", "nothing was written", hint)


@contextmanager
def open_output(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write, and replace what is in it. Raises CommandFailure."""
    check_output(path)
    try:
        with path.open("wb") as file:
            yield file
    except OSError as error:
        raise CommandFailure(f"{path} cannot be written: {error.strerror}") from error


def write_text(path: Path, text: str) -> None:
    """Write a text as the content of a file. Raises CommandFailure."""
    with open_output(path) as file:
        file.write(text.encode())


def write_draft(path: Path, text: str, *, replaces: bool) -> None:
    """Write a text that the user goes on with. Unless `replaces` is set, ask before another text is
    replaced. Raises CommandFailure.
    """
    same = False
    with suppress(OSError):
        same = path.is_file() and path.read_bytes() == text.encode()
    if not replaces and not same and path.is_file():
        confirm(f"{path} exists, with another content. Replace it?")
    write_text(path, text)


def make_folder(path: Path) -> None:
    """Make a folder for output, with those above it, unless it exists. Raises CommandFailure."""
    check_output(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        told = f"{path} cannot be made: {error.strerror}"
        raise CommandFailure(told, "choose another folder") from error
