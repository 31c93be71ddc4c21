"""Reading a task file for a command: every problem is said at its place, and the command ends with 2."""

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from remuda.spec import LoadedTask


def read_task(file: str, params: Mapping[str, str]) -> "LoadedTask":
    """The task in `file` with these parameters; exits with 2 after saying all that is wrong with it."""
    from remuda.spec import SpecError, load_task

    try:
        return load_task(file, params, now=datetime.now(UTC))
    except SpecError as error:
        click.echo(str(error), err=True)
        sys.exit(2)
