"""Shows data from the server once, or repeatedly until Ctrl-C."""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import click

from cavvy.cli.reach.session import FOLLOW_PATIENCE_S, PATIENCE_S, session
from cavvy.cli.view.failure import CommandFailure

if TYPE_CHECKING:
    from cavvy.client import ApiClient

_T = TypeVar("_T")
_REFRESH_S = 2.0

watch_option = click.option(
    "-w", "--watch", is_flag=True, help="Refresh the output until you press Ctrl-C."
)


def show_repeatedly(
    read: "Callable[[ApiClient], _T]", show: Callable[[_T], None], watch: bool, output: str
) -> None:
    """Call `read` and pass its result to `show`. If `watch` is set, clear the terminal and call
    both functions repeatedly.
    """
    if watch and (output != "table" or not sys.stdout.isatty()):
        raise CommandFailure(
            "--watch can only refresh a table on a terminal",
            "in scripts, `cavvy wait NAME` waits for a job",
            2,
        )
    with session(patience_s=FOLLOW_PATIENCE_S if watch else PATIENCE_S) as client:
        while True:
            found = read(client)
            if watch:
                click.clear()
            show(found)
            if not watch:
                return
            time.sleep(_REFRESH_S)
