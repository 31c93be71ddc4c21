"""Asks before a command follows a link that leads out of its repository: its author may be another
person, or the user, who has put a folder elsewhere.
"""

import sys
from pathlib import Path

import click

from cavvy.cli.view.failure import CommandFailure, escape_controls

_AGREED = set[tuple[Path, Path]]()  # the links to which the user has agreed, and where they led


def agree_to_exit(path: Path, question: str, refused: str, hint: str) -> None:
    """Ask whether `path` may lead out of its repository by a link, if it does; --yes does not agree
    to it. Raises CommandFailure with `refused` and the hint without a terminal.
    """
    from cavvy.spec.sent_folders import find_exit

    link = find_exit(path)
    if link is None or (link, link.resolve()) in _AGREED:
        return
    told = f"{link} is a link that leads out of its repository, to {link.resolve()}"
    if not sys.stdin.isatty():
        raise CommandFailure(f"{told}; {refused}", hint, exit_code=2)
    click.echo(escape_controls(told), err=True)
    click.confirm(question, abort=True, err=True)
    _AGREED.add((link, link.resolve()))
