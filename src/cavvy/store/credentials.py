"""The credentials of projects at providers: `Store.provider_credentials`."""

from collections.abc import Sequence

from cavvy.domain.credentials import CredentialBook, SealedCredential
from cavvy.store.accounts import list_used_projects
from cavvy.store.base import RowNotFound
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.rows import RowCodec

_CREDENTIALS = RowCodec(SealedCredential, "provider_credentials", key=("project", "provider"))
_SELECT = f"{_CREDENTIALS.select} ORDER BY project, provider"


class SqlCredentials:
    """The rows of credentials. The credentials are encrypted."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        self._read = read
        self._write = write

    async def book(self) -> CredentialBook:
        """Return which projects have credentials for which providers."""
        return await self._read(_read_book)

    async def list(self) -> Sequence[SealedCredential]:
        """Return the credentials of all projects, sorted by project and provider."""
        return await self._read(_list)

    async def put(self, credential: SealedCredential) -> None:
        """Insert or replace a credential."""
        values = _CREDENTIALS.values(credential)
        await self._write(lambda session: session.run(_CREDENTIALS.upsert, values))

    async def reseal(self, credential: SealedCredential, sealed: bytes) -> bool:
        """Like `Store.reseal_secret`."""
        values = (sealed, credential.project, credential.provider, credential.sealed)
        changed = self._write(lambda session: session.run(_CREDENTIALS.reseal, values).rowcount)
        return await changed > 0

    async def delete(self, project: str, provider: str) -> None:
        """Delete a credential. Raises RowNotFound."""
        missing = RowNotFound(f"project {project} has no credential for {provider}")
        values = (project, provider)
        await self._write(lambda session: session.change_or(missing, _CREDENTIALS.delete, values))


def _list(session: DatabaseSession) -> Sequence[SealedCredential]:
    return [_CREDENTIALS.make(row) for row in session.run(_SELECT).fetchall()]


def _read_book(session: DatabaseSession) -> CredentialBook:
    held = [(each.project, each.provider) for each in _list(session)]
    return CredentialBook(held, list_used_projects(session) if held else ())
