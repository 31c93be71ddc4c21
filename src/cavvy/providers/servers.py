"""The other servers of an installation, as providers reach them (`ProviderContext.servers`). If a
machine is connected to another server, a provider reaches it through that other server.
"""

from collections.abc import Sequence
from typing import Protocol


class OtherServers(Protocol):
    """The servers that share this installation's database, by server ID."""

    @property
    def me(self) -> str:
        """The ID of this server."""

    @property
    def addresses(self) -> Sequence[str]:
        """The addresses at which nodes reach the live servers, including this server. For
        a server behind a load balancer, the address is the server's own, not the load balancer's.
        """

    def is_alive(self, server: str) -> bool:
        """Return whether another server with this ID is alive."""

    async def ask(self, server: str, provider: str, call: str, body: bytes) -> bytes:
        """Ask the instance of `provider` that runs on another server, and return the answer
        (`ServesNodes.answer_server`). Raises OSError if the other server does not answer; the other
        server may nevertheless have executed the request. The other server can take up to a minute
        to answer.
        """
