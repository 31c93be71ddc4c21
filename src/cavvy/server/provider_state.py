"""Stores the documents of providers as rows of the store."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cavvy.domain.provider_state import ProviderDocument
from cavvy.domain.values import Struct
from cavvy.providers.base import TryAgain
from cavvy.store.base import StoreError
from cavvy.store.sql import Store


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
