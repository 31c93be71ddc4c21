"""A provider's persistent documents, shared by all servers of an installation.

`ProviderContext.state` contains a provider's documents; `providers.ledger` stores launches in these
documents. On a server, the documents are rows of the database (`server.provider_services`).
"""

from collections.abc import Sequence
from typing import Protocol

from cavvy.domain.gangs import ProviderDocument


class ProviderState(Protocol):
    """Documents by collection and name. The methods raise TryAgain if the database is full or does
    not respond.
    """

    async def read(self, collection: str, name: str | None = None) -> Sequence[ProviderDocument]:
        """Return the documents of a collection, or only the named document."""

    async def swap(self, document: ProviderDocument, *, delete: bool = False) -> bool:
        """Write or delete a document if its stored version is `document.version` - 1. A document
        that is not stored counts as version 0. If another server wrote first, the document is not
        changed and the result is False.
        """


class MemoryProviderState:
    """Documents that exist only in this process: for read-only commands and for tests."""

    def __init__(self) -> None:
        self._documents: dict[tuple[str, str], ProviderDocument] = {}

    async def read(self, collection: str, name: str | None = None) -> Sequence[ProviderDocument]:
        """See `ProviderState.read`."""
        return [
            document
            for key, document in sorted(self._documents.items())
            if key[0] == collection and name in (None, key[1])
        ]

    async def swap(self, document: ProviderDocument, *, delete: bool = False) -> bool:
        """See `ProviderState.swap`."""
        key = (document.collection, document.name)
        stored = self._documents.pop(key, None)
        fits = (stored.version if stored else 0) == document.version - 1
        kept = stored if not fits else None if delete else document
        if kept is not None:
            self._documents[key] = kept
        return fits
