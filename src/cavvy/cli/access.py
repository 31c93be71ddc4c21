"""`cavvy exec`, `ssh`, `cp` and `forward`: run commands, open shells, copy files and forward ports
on a job's nodes. `cavvy ssh` also connects plain `ssh`, `scp`, `sftp` and editors to a node.
"""

import errno
import os
import shlex
import stat
import struct
import sys
from contextlib import closing
from secrets import token_bytes
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import (
    JOBS_LISTING,
    complete_copies,
    complete_jobs,
    job_argument,
    replace_option,
)
from cavvy.cli.reach.names import find_running
from cavvy.cli.reach.session import ended_by_signals, project_option, rank_option, session
from cavvy.cli.reach.tunnel import read_target, with_tunnel
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.groups import NameArgument
from cavvy.cli.view.job_output import JobOutput

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from cavvy.cli.reach.tunnel import LatestTunnel
    from cavvy.client import ApiClient
    from cavvy.client.client import ExecChunk
    from cavvy.client.tunnel import Fields, NodeTunnel, TunnelChannel


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
    A terminal gets only the colours of the output, and no other escape sequences. NAME:RANK selects
    a node; the default is the first node. The command gets no input: use `cavvy
    ssh` for a command that needs input or a terminal.
    """
    exit_code, told, output = 0, _warn_of_input(name), JobOutput()
    name, wanted = read_target(name)
    rank = rank or wanted
    is_line = len(arguments) == 1 and shlex.quote(arguments[0]) != arguments[0]
    words = ["sh", "-c", *arguments] if is_line else list(arguments)
    with (
        ended_by_signals(),
        session() as client,
        closing(_exec(client, project, name, words, rank)) as chunks,
    ):
        for chunk in chunks:
            output.write(chunk.data)
            if chunk.exit_code is not None:
                exit_code = chunk.exit_code
    if not told:
        _warn_of_input(name)
    sys.exit(exit_code)


def _exec(
    client: "ApiClient", project: str, name: str, words: list[str], rank: int
) -> "Generator[ExecChunk]":
    from cavvy.client import ApiError

    try:
        yield from client.exec(project, name, words, rank=rank)
    except ApiError as error:
        name = find_running(client, project, name, error)
        yield from client.exec(project, name, words, rank=rank)


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
@click.option(
    "--checkpoint",
    is_flag=True,
    help="Copy the newest checkpoint of the job SOURCE to a new folder, also after the job's end. "
    "NAME:PATH is one file or folder of it.",
)
@replace_option
def cp_command(
    source: str, target: str, project: str, quiet: bool, checkpoint: bool, replace: bool
) -> None:
    """Copy a file or folder to or from a job's node. The path on the node is NAME[:RANK]:PATH.

    cavvy cp digits:out/weights.pt . · cavvy cp data/ digits:1:/tmp/data

    What an ended job saved in its checkpoint folder is copied by its name alone, or a part of it:

    cavvy cp --checkpoint digits weights · cavvy cp --checkpoint digits:best.pt .

    A relative path on a node starts in the job's folder. Files from a node are written only below
    TARGET: names outside TARGET are refused, links that lead out of the folder are skipped, a .git
    that exists here is not changed, and setuid bits are dropped. A file gets its final name when it
    is complete; an interrupted copy resumes if the part that was copied is unchanged.

    A folder arrives without a question where only copied files are: in a new or empty folder, or
    in one that was copied before, where a file that you have changed is not replaced. Elsewhere,
    the names and differences are shown first, and you are asked.
    """
    from cavvy.cli.reach.copying import copy, copy_checkpoint

    if checkpoint:
        copy_checkpoint(source, target, project, quiet)
        return
    copy(source, target, project, quiet, replace=replace)


_LAST_PORT = 65535
_GREETING_S = 5.0  # maximum seconds until a connection from the node has reached this machine
_LOOPBACK = {"127.0.0.1", "localhost"}


@click.command("forward")
@click.argument(
    "target",
    metavar="NAME[:RANK]",
    cls=NameArgument,
    listing=JOBS_LISTING,
    shell_complete=complete_jobs,
)
@click.argument("ports", nargs=-1, required=True, metavar="PORT[:REMOTE]...")
@project_option
@click.option(
    "--host",
    default="127.0.0.1",
    help="The host to connect to: as the node sees it or, with --reverse, as this machine sees it.",
)
@click.option("--bind", default="127.0.0.1", help="The address to listen on.")
@click.option(
    "-R", "--reverse", is_flag=True, help="Listen on the node and connect to this machine."
)
def forward_command(
    target: str, ports: tuple[str, ...], project: str, host: str, bind: str, reverse: bool
) -> None:
    """Forward TCP ports until Ctrl-C. After `cavvy forward digits 8888`, connections to port 8888
    of this machine reach port 8888 of the node.

    8888:80 listens on port 8888 here and connects to port 80 on the node. Port 0 picks a free port.
    """
    pairs = [_read_ports(each) for each in ports]

    async def act(tunnel: "NodeTunnel") -> None:
        same = [there for here, there in pairs if here == there] if _overlap(bind, host) else []
        if same and await _is_here(tunnel):
            raise _same_port(target, host, same[0], reverse)
        for here, there in pairs:
            if reverse:
                listened = await _listen_there(tunnel, bind, there, host, here)
                click.echo(f"port {listened} of {target} leads to {host}:{here} on this machine")
            else:
                listened = await listen_here(tunnel, bind, here, host, there)
                click.echo(f"{bind}:{listened} leads to port {there} of {target}")
        await tunnel.lost.wait()
        if tunnel.problem:
            raise CommandFailure(f"{target}: {tunnel.problem}")

    try:
        with_tunnel(project, target, act)
    except KeyboardInterrupt:
        click.echo()


def _read_ports(text: str) -> tuple[int, int]:
    from cavvy.domain.units import is_whole

    here, colon, there = text.partition(":")
    numbers = [here, there] if colon else [here]
    if not all(is_whole(each) and int(each) <= _LAST_PORT for each in numbers) or not int(
        there or here
    ):
        expected = f"expected PORT or PORT:REMOTE, each at most {_LAST_PORT}"
        raise CommandFailure(f"{text}: {expected}", "for example 8888 or 8888:80", exit_code=2)
    return int(here), int(there or here)


def _overlap(bind: str, host: str) -> bool:
    """Return whether the two addresses overlap: a server that listens on one of them can be reached
    at the other.
    """
    return bind in ("", "0.0.0.0", host) or {bind, host} <= _LOOPBACK


async def _is_here(tunnel: "NodeTunnel") -> bool:
    """Return whether the node uses this machine's network, so that `localhost` on the node is this
    machine.

    On a node that uses this machine's network, a port could be forwarded to itself. A tunnel from a
    port to itself would loop forever and would occupy the port on which the job's server must
    listen.
    """
    import asyncio

    from cavvy.client.tunnel import RemoteError

    word, met = token_bytes(16), asyncio.Event()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_GREETING_S):
                if await reader.readexactly(len(word)) == word:
                    met.set()
        except (OSError, EOFError):  # includes TimeoutError
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    try:
        channel = await tunnel.connect("127.0.0.1", server.sockets[0].getsockname()[1])
        try:
            await channel.write(word)
            async with asyncio.timeout(_GREETING_S):
                await met.wait()
        finally:
            channel.close()
    except (RemoteError, TimeoutError):  # The port is closed, or another program uses it.
        return False
    finally:
        server.close()
    return True


def _same_port(target: str, host: str, port: int, reverse: bool) -> CommandFailure:
    other = (
        f"{port}:PORT forwards another port of the node"
        if reverse
        else f"0:{port} forwards a free port of this machine"
    )
    return CommandFailure(
        f"port {port} of {target} is the same as port {port} of this machine, because the job uses "
        "this machine's "
        "network",
        f"use {host}:{port} without `cavvy forward`; {other}",
    )


async def listen_latest(
    tunnel: "NodeTunnel", latest: "LatestTunnel", ports: "Sequence[int]"
) -> None:
    """Forward ports of the node to the same ports of this machine, or to free ports if these are
    used, and print the addresses.
    """
    if not ports:
        return
    same = await _is_here(tunnel)
    for port in ports:
        if same:
            click.echo(f"port {port} of the session: 127.0.0.1:{port}", err=True)
            continue
        try:
            here = await listen_here(latest, "127.0.0.1", port, "127.0.0.1", port)
        except CommandFailure:
            here = await listen_here(latest, "127.0.0.1", 0, "127.0.0.1", port)
        click.echo(f"port {port} of the session: 127.0.0.1:{here}", err=True)


async def listen_here(
    tunnel: "NodeTunnel | LatestTunnel", bind: str, here: int, host: str, there: int
) -> int:
    """Forward port `here` of this machine to port `there` of the node. Returns the local port;
    if `here` is 0, a free port is chosen. Raises CommandFailure.
    """
    import asyncio

    from cavvy.client.tunnel import RemoteError, TunnelLost, join
    from cavvy.server.addresses import explain_reason

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            channel = await tunnel.connect(host, there)
        except (RemoteError, TunnelLost) as error:
            reason = getattr(error, "strerror", None) or error
            click.echo(f"port {there} of the node: {reason}{_doubt(error)}", err=True)
            writer.close()
            return
        await join(channel, reader, writer)

    try:
        server = await asyncio.start_server(carry, bind, here)
    except OSError as error:
        raise CommandFailure(
            f"cannot listen on {bind}:{here}: {explain_reason(error)}",
            "choose another port; 0:REMOTE picks a free one",
        ) from error
    port: int = server.sockets[0].getsockname()[1]
    return port


def _doubt(error: Exception) -> str:
    refused = getattr(error, "errno", 0) == errno.ECONNREFUSED
    return (
        "; the program on the node may not have started yet, or may listen on another address "
        "(--host)"
        if refused
        else ""
    )


async def _listen_there(tunnel: "NodeTunnel", bind: str, there: int, host: str, here: int) -> int:
    import asyncio

    from cavvy.client.tunnel import join

    async def accepted(channel: "TunnelChannel", said: "Fields") -> None:
        try:
            reader, writer = await asyncio.open_connection(host, here)
        except OSError as error:
            click.echo(f"port {here}: {error.strerror}", err=True)
            channel.close()
            return
        await join(channel, reader, writer)

    _, port = await tunnel.listen(bind, there, accepted)
    return port
