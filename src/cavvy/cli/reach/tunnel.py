"""Shared code of the commands that connect to nodes: parses NAME:RANK, opens the tunnel, and
reports errors of the tunnel.
"""

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import click

from cavvy.cli.reach.session import NO_SERVER, named, session
from cavvy.cli.view.failure import CommandFailure

if TYPE_CHECKING:
    from cavvy.client.tunnel.mux import NodeTunnel, TunnelChannel

_T = TypeVar("_T")
_RECONNECT_S = 600.0  # seconds for which a lost tunnel is opened again
_AGAIN_S = 0.5


class LatestTunnel:
    """The tunnel that is open now, for connections that outlive a tunnel."""

    def __init__(self) -> None:
        self.tunnel: NodeTunnel | None = None

    async def connect(self, host: str, port: int) -> "TunnelChannel":
        """See `NodeTunnel.connect`."""
        from cavvy.client.tunnel.mux import TunnelLost

        if self.tunnel is None:
            raise TunnelLost("the connection to the node is being opened again")
        return await self.tunnel.connect(host, port)


def read_target(target: str) -> tuple[str, int]:
    """Split NAME or NAME:RANK; the default rank is 0. Raises CommandFailure."""
    from cavvy.domain.units import is_whole

    name, colon, rank = target.partition(":")
    if not name or (colon and not is_whole(rank)):
        raise CommandFailure(
            f"{target}: expected NAME or NAME:RANK", "for example digits:1", exit_code=2
        )
    return name, int(rank or 0)


def with_tunnel(
    project: str, target: str, act: Callable[["NodeTunnel"], Awaitable[_T]], *, lost_code: int = 1
) -> _T:
    """Call `act` with a tunnel to the node, and return the result. Raises CommandFailure, with the
    exit code `lost_code` if the node cannot be reached or no longer answers.
    """
    import asyncio

    from cavvy.client.tunnel.mux import NodeTunnel, RemoteError, TunnelLost, open_by_api

    name, rank = read_target(target)
    context = click.get_current_context(silent=True)
    program = "" if context is None else context.info_name or ""

    async def run() -> _T:
        async with NodeTunnel(open_by_api(client, project, name, rank, program)) as tunnel:
            return await act(tunnel)

    with session() as client:
        try:
            return asyncio.run(run())
        except TunnelLost as error:
            raise CommandFailure(
                f"{target}: {error}",
                f"`cavvy status {named(project, name)}` shows the job's state",
                lost_code,
            ) from error
        except RemoteError as error:
            where = f"{target}:{error.filename}" if error.filename else target
            raise CommandFailure(f"{where}: {error.strerror}") from error


async def wait_lost(tunnel: "NodeTunnel") -> None:
    """Wait until the tunnel is lost. Raises TunnelLost."""
    from cavvy.client.tunnel.mux import TunnelLost

    await tunnel.lost.wait()
    raise TunnelLost(tunnel.problem or "the connection was closed")


def with_kept_tunnel(
    project: str,
    target: str,
    act: Callable[["NodeTunnel", LatestTunnel], Awaitable[_T]],
) -> _T:
    """Call `act` with a tunnel to the node, as `with_tunnel` does. When the tunnel is lost, for
    example because the server was restarted, open another and call `act` again. Raises
    CommandFailure if this fails for ten minutes, or if the job has ended.
    """
    import asyncio

    from cavvy.client.tunnel.mux import NodeTunnel, RemoteError, TunnelLost, open_by_api

    name, rank = read_target(target)
    context = click.get_current_context(silent=True)
    program = "" if context is None else context.info_name or ""

    async def run() -> _T:
        latest, until = LatestTunnel(), 0.0
        while True:
            try:
                with session() as client:
                    carrier = open_by_api(client, project, name, rank, program)
                    async with NodeTunnel(carrier) as tunnel:
                        latest.tunnel = tunnel
                        if until:
                            click.echo("connected again", err=True)
                        until = 0.0
                        return await act(tunnel, latest)
            except TunnelLost as error:
                problem = CommandFailure(
                    f"{target}: {error}",
                    f"`cavvy status {named(project, name)}` shows the job's state",
                )
            except RemoteError as error:
                raise CommandFailure(f"{target}: {error.strerror}") from error
            except CommandFailure as failure:
                if failure.exit_code != NO_SERVER:
                    raise
                problem = failure
            if not until:
                click.echo(f"{problem.message}; connecting again, Ctrl-C gives up", err=True)
            until = until or time.monotonic() + _RECONNECT_S
            if time.monotonic() > until:
                raise problem
            await asyncio.sleep(_AGAIN_S)

    return asyncio.run(run())
