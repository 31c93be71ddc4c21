"""`cavvy exec`, `ssh` and `cp`: run commands, open shells and copy files on a job's nodes.
`cavvy ssh` also connects plain `ssh`, `scp`, `sftp` and editors to a node.
"""

import os
import shlex
import stat
import struct
import sys
from contextlib import closing

import click

from cavvy.cli.reach.arguments import complete_copies, complete_jobs, job_argument
from cavvy.cli.reach.session import ended_by_signals, project_option, rank_option, session
from cavvy.cli.reach.tunnel import read_target, with_tunnel
from cavvy.cli.view.failure import CommandFailure


@click.command("exec", context_settings={"ignore_unknown_options": True})
@job_argument
@click.argument(
    "arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND..."
)
@project_option
@rank_option
def exec_command(name: str, arguments: tuple[str, ...], project: str, rank: int) -> None:
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


_UNREACHABLE = 255  # the exit code of `ssh` if it cannot reach the machine


@click.command("ssh", context_settings={"ignore_unknown_options": True})
@click.argument("target", required=False, metavar="[NAME[:RANK]]", shell_complete=complete_jobs)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[--] [COMMAND...]")
@project_option
@click.option("-t", "--tty", is_flag=True, help="Allocate a terminal for the command.")
@click.option(
    "--setup",
    is_flag=True,
    help="Configure plain `ssh NAME` and editors for running jobs.",
)
@click.option(
    "--stdio", is_flag=True, help="Speak SSH over standard input and output, for an SSH client."
)
def ssh_command(
    target: str | None,
    arguments: tuple[str, ...],
    project: str,
    tty: bool,
    setup: bool,
    stdio: bool,
) -> None:
    """Open a shell on a job's node, or run a command there. Shells and commands start in the folder
    and environment of the job's work.

    The connection goes through the control plane, so the node needs no public address. `cavvy ssh
    --setup` writes ~/.ssh/config.d/cavvy, so that plain `ssh NAME`, scp, sftp, rsync and editors
    work as with any host.
    """
    if setup:
        from cavvy.cli.reach.ssh_config import write_config

        for message in write_config():
            click.echo(message)
        return
    if target is None:
        raise CommandFailure(
            "expected a job", "use `cavvy ssh NAME`, or `cavvy ssh --setup`", exit_code=2
        )
    if stdio:
        _speak(project, target)
        return
    from cavvy.cli.reach.ssh_config import refresh_config
    from cavvy.cli.reach.tunnel import run_here

    refresh_config()
    line = " ".join(arguments) or None
    terminal = (
        sys.stdin.isatty() and sys.stdout.isatty() if line is None else tty and sys.stdin.isatty()
    )
    code = with_tunnel(
        project,
        target,
        lambda tunnel: run_here(tunnel, argv=None, line=line, terminal=terminal),
        lost_code=_UNREACHABLE,
    )
    sys.exit(code)


def _speak(project: str, target: str) -> None:
    from cavvy.cli.reach.sshd import serve_stdio

    read_target(target)
    with_tunnel(project, target, serve_stdio, lost_code=_UNREACHABLE)


@click.command("cp")
@click.argument("source", metavar="SOURCE", shell_complete=complete_copies)
@click.argument("target", metavar="TARGET", shell_complete=complete_copies)
@project_option
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
def cp_command(source: str, target: str, project: str, quiet: bool) -> None:
    """Copy a file or folder to or from a job's node. The path on the node is NAME[:RANK]:PATH.

    cavvy cp digits:out/weights.pt . · cavvy cp data/ digits:1:/tmp/data

    A relative path on a node starts in the job's folder. Files from a node are written only below
    TARGET: names outside TARGET are refused, links that lead out of the folder are skipped, a .git
    that exists here is not changed, and setuid bits are dropped. A file gets its final name when it
    is complete; an interrupted copy resumes if the part that was copied is unchanged.
    """
    from cavvy.cli.reach.copying import copy

    copy(source, target, project, quiet)
