"""`cavvy exec`: runs a command in the environment of a running job."""

import os
import shlex
import stat
import struct
import sys
from contextlib import closing

import click

from cavvy.cli.reach.arguments import job_argument
from cavvy.cli.reach.session import ended_by_signals, project_option, rank_option, session
from cavvy.cli.reach.tunnel import read_target


@click.command("exec", context_settings={"ignore_unknown_options": True})
@job_argument
@click.argument(
    "arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND..."
)
@project_option
@rank_option
def command(name: str, arguments: tuple[str, ...], project: str, rank: int) -> None:
    """Run a command in the folder and environment of a running job, while the job continues.
    `cavvy exec` exits with the command's exit code. Ctrl-C or a closed pipe ends the command.

    cavvy exec digits -- nvidia-smi

    A single word with characters of the shell, such as 'ls | wc', is a command line for the shell.
    NAME:RANK selects a node; the default is the first node. The command gets no input: use `cavvy
    ssh` for a command that needs input or a terminal.
    """
    exit_code, told = 0, _warn_of_input(name)
    name, wanted = read_target(name)
    rank = rank or wanted
    is_line = len(arguments) == 1 and shlex.quote(arguments[0]) != arguments[0]
    words = ["sh", "-c", *arguments] if is_line else list(arguments)
    with (
        ended_by_signals(),
        session() as client,
        closing(client.exec(project, name, words, rank=rank)) as chunks,
    ):
        for chunk in chunks:
            sys.stdout.buffer.write(chunk.data)
            sys.stdout.buffer.flush()
            if chunk.exit_code is not None:
                exit_code = chunk.exit_code
    if not told:
        _warn_of_input(name)
    sys.exit(exit_code)


def _warn_of_input(name: str) -> bool:
    """If standard input has data, say that the command does not get it. Return whether it has."""
    try:
        found = has_input(sys.stdin.fileno())
    except (AttributeError, OSError, ValueError):  # there is no such file
        return False
    if found:
        text = "warning: the command does not get what is piped into `cavvy exec`"
        click.echo(f"{text}; use `cavvy ssh {name} COMMAND`, which passes input on", err=True)
    return found


def has_input(file: int) -> bool:
    """Return whether a pipe, socket or regular file has unread data. Nothing is read. Raises
    OSError.
    """
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode):
        return status.st_size > os.lseek(file, 0, os.SEEK_CUR)
    if not (stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode)):
        return False
    from fcntl import ioctl
    from termios import FIONREAD

    (count,) = struct.unpack("i", ioctl(file, FIONREAD, bytes(4)))
    return bool(count > 0)
