"""`cavvy forward`: forwards ports to or from a job's node."""

import errno
from secrets import token_bytes
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import JOBS_LISTING, complete_jobs
from cavvy.cli.reach.session import project_option
from cavvy.cli.reach.tunnel import with_tunnel
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.groups import NameArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cavvy.cli.reach.tunnel import LatestTunnel
    from cavvy.client.tunnel import Fields, NodeTunnel, TunnelChannel

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
def command(
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
    from cavvy.gateway.addresses import explain_reason

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
