"""`remuda forward`: a port of a job's node here, or one of here there."""

import asyncio
from typing import TYPE_CHECKING

import click

from remuda.cli.reach import with_tunnel
from remuda.cli.session import Failure, project_option

if TYPE_CHECKING:
    from remuda.client.tunnel.mux import Channel, Fields, Tunnel

_LAST_PORT = 65535


@click.command("forward")
@click.argument("target", metavar="NAME[:RANK]")
@click.argument("ports", nargs=-1, required=True, metavar="PORT[:REMOTE]...")
@project_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Where the node finds the port; its own network.")
@click.option("--bind", default="127.0.0.1", show_default=True, help="Which address listens.")
@click.option("-R", "--reverse", is_flag=True, help="Ports listen on the node, and lead to this machine.")
def command(target: str, ports: tuple[str, ...], project: str, host: str, bind: str, reverse: bool) -> None:
    """Forward TCP ports until Ctrl-C: `remuda forward digits 8888` brings the node's port 8888 to this machine.

    8888:80 listens on 8888 here and connects to 80 there. Port 0 picks a free one.
    """
    pairs = [_read_ports(each) for each in ports]

    async def act(tunnel: "Tunnel") -> None:
        for here, there in pairs:
            if reverse:
                listened = await _listen_there(tunnel, bind, there, host, here)
                click.echo(f"{target} port {listened} leads to {host}:{here} here")
            else:
                listened = await _listen_here(tunnel, bind, here, host, there)
                click.echo(f"{bind}:{listened} leads to port {there} of {target}")
        await tunnel.lost.wait()
        if tunnel.problem:
            raise Failure(f"{target}: {tunnel.problem}", exit_code=255)

    try:
        with_tunnel(project, target, act)
    except KeyboardInterrupt:
        click.echo()


def _read_ports(text: str) -> tuple[int, int]:
    here, colon, there = text.partition(":")
    numbers = [here, there] if colon else [here]
    if not all(each.isdigit() and int(each) <= _LAST_PORT for each in numbers) or not int(there or here):
        expected = f"expected PORT or PORT:REMOTE, each at most {_LAST_PORT}"
        raise Failure(f"{text}: {expected}", "for example 8888 or 8888:80", exit_code=2)
    return int(here), int(there or here)


async def _listen_here(tunnel: "Tunnel", bind: str, here: int, host: str, there: int) -> int:
    from remuda.client.tunnel.mux import FarError, TunnelLost, join

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            channel = await tunnel.connect(host, there)
        except (FarError, TunnelLost) as error:
            click.echo(f"port {there} of the node: {getattr(error, 'strerror', None) or error}", err=True)
            writer.close()
            return
        await join(channel, reader, writer)

    try:
        server = await asyncio.start_server(carry, bind, here)
    except OSError as error:
        raise Failure(f"cannot listen on {bind}:{here}: {error.strerror}", "choose another port: 0:REMOTE") from error
    port: int = server.sockets[0].getsockname()[1]
    return port


async def _listen_there(tunnel: "Tunnel", bind: str, there: int, host: str, here: int) -> int:
    from remuda.client.tunnel.mux import join

    async def accepted(channel: "Channel", said: "Fields") -> None:
        try:
            reader, writer = await asyncio.open_connection(host, here)
        except OSError as error:
            click.echo(f"port {here}: {error.strerror}", err=True)
            channel.close()
            return
        await join(channel, reader, writer)

    _, port = await tunnel.listen(bind, there, accepted)
    return port
