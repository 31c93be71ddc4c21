"""What the server does for its providers: it stores their documents as rows of the store, and sends
their requests to the same provider on another server of the database.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime

from cavvy.api.auth import NODES
from cavvy.api.peers import PeerServers
from cavvy.control.share import WorkShare
from cavvy.domain.gangs import ProviderDocument
from cavvy.domain.values import Struct
from cavvy.providers.base import TryAgain
from cavvy.store.base import StoreError
from cavvy.store.sql import Store

_TOLD = 400  # maximum bytes of another server's refusal that are reported


class StoredProviderState(Struct, frozen=True, kw_only=True):
    """The documents of one provider."""

    store: Store
    provider: str

    async def read(self, collection: str, name: str | None = None) -> Sequence[ProviderDocument]:
        """See `ProviderState.read`."""
        with _as_try_again():
            return await self.store.provider_documents(self.provider, collection, name)

    async def swap(self, document: ProviderDocument, *, delete: bool = False) -> bool:
        """See `ProviderState.swap`."""
        with _as_try_again():
            return await self.store.swap_provider_document(self.provider, document, delete=delete)


@contextmanager
def _as_try_again() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        raise TryAgain(f"the provider's records are not available: {error}") from error


class ProviderPeers:
    """Implements `OtherServers`."""

    def __init__(self, share: WorkShare, peers: PeerServers, now: Callable[[], datetime]) -> None:
        self._share, self._peers, self._now = share, peers, now

    @property
    def me(self) -> str:
        return self._share.me.id

    @property
    def addresses(self) -> Sequence[str]:
        return [each.peer for each in self._share.servers if each.peer]

    def is_alive(self, server: str) -> bool:
        return server != self.me and self._share.find_server(server) is not None

    async def ask(self, server: str, provider: str, call: str, body: bytes) -> bytes:
        found = self._share.find_server(server)
        if found is None:
            raise OSError("that server has ended")
        try:
            answer = await self._peers.send(found, f"{NODES}{provider}/{call}", body, self._now())
        except ValueError as error:
            raise OSError(str(error)) from error
        if answer.status_code != 200:
            told = bytes(answer.body[:_TOLD]).decode("utf-8", "replace")
            raise OSError(f"status {answer.status_code}: {told}")
        return bytes(answer.body)
