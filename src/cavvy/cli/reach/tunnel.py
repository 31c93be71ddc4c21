"""Shared code of the commands that connect to nodes: parses NAME:RANK, opens the tunnel, and
reports errors of the tunnel.
"""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import click

from cavvy.cli.reach.session import named, session
from cavvy.cli.view.failure import CommandFailure

if TYPE_CHECKING:
    from cavvy.client.tunnel.mux import NodeTunnel

_T = TypeVar("_T")


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
