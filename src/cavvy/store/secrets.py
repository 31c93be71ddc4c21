"""Encrypts secrets, so that no database receives the plain text.

An encrypted value consists of a version, the ID of the key that encrypted its data key, the
encrypted data key, a nonce, and the ciphertext with its tag. Version 1 had no data key: the key
itself encrypted the value.
"""

import secrets
from collections.abc import Sequence

from cavvy.domain.credentials import CredentialBook, SealedCredential
from cavvy.domain.values import Struct
from cavvy.store.accounts import list_used_projects
from cavvy.store.base import KeyUnusable, RowNotFound, StoreUnusable
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.keys import KEY_BYTES, NONCE_BYTES, AesKey, KeyRing
from cavvy.store.rows import RowCodec

_VERSION_1 = b"\x01"
_VERSION = b"\x02"


class SecretSealer:
    """Encrypts values with AES-256-GCM and the keys of a ring. An encrypted value can be decrypted
    only for the project and name that it was encrypted for.
    """

    def __init__(self, keys: KeyRing) -> None:
        self.keys = keys

    def seal(self, project: str, name: str, plain: str) -> bytes:
        """Encrypt a value. Raises StoreUnusable if the key cannot be used, and StoreFull if the key
        cannot be created.
        """
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        key, data_key = self.keys.current(), secrets.token_bytes(KEY_BYTES)
        wrapped, key_id = key.wrap(data_key), key.id.encode("ascii")
        head = (
            _VERSION
            + len(key_id).to_bytes(1, "big")
            + key_id
            + len(wrapped).to_bytes(2, "big")
            + wrapped
        )
        nonce = secrets.token_bytes(NONCE_BYTES)
        bound = head + _bound_to(project, name)
        return head + nonce + AESGCM(data_key).encrypt(nonce, plain.encode(), bound)

    def unseal(self, project: str, name: str, sealed: bytes) -> str:
        """Decrypt a value. Raises KeyUnusable if the value's key cannot be used, or if
        the value was encrypted for another project or name.
        """
        try:
            return self.open(project, name, sealed)
        except StoreUnusable as error:
            raise KeyUnusable(
                f"the secret {name} of project {project} cannot be read: {error}; if the cause "
                f"cannot be fixed, set the secret again: cavvy secret set {name}"
            ) from error

    def open(self, project: str, name: str, sealed: bytes) -> str:
        """Decrypt a value of any kind. Unlike the errors of `unseal`, the errors of this method do
        not refer to a user's secret.
        """
        if sealed[:1] == _VERSION_1:
            return self._unseal_version_1(project, name, sealed)
        parts = _split(sealed)
        data_key = self.keys.find(parts.key_id).unwrap(parts.wrapped)
        return _decrypt(data_key, parts.body, parts.head + _bound_to(project, name))

    def _unseal_version_1(self, project: str, name: str, sealed: bytes) -> str:
        for key in self.keys.all():
            if isinstance(key, AesKey):
                try:
                    return _decrypt(key.material, sealed[1:], _bound_to(project, name))
                except StoreUnusable:
                    pass  # the value was encrypted with another key
        raise StoreUnusable(
            "none of the server's keys fits the value; restore the key that encrypted the value"
        )


def find_key_id(sealed: bytes) -> str:
    """Return the ID of the key that encrypted a value's data key, or an empty ID for values of
    version 1 and for damaged values.
    """
    try:
        return _split(sealed).key_id
    except StoreUnusable:
        return ""


class _SealedParts(Struct, frozen=True):
    """The parts of an encrypted value. `head` contains all bytes before the nonce."""

    key_id: str
    wrapped: bytes
    head: bytes
    body: bytes


def _split(sealed: bytes) -> _SealedParts:
    """Raises StoreUnusable."""
    if sealed[:1] != _VERSION or len(sealed) < 2:
        raise StoreUnusable("the encrypted value is damaged")
    key_end = 2 + sealed[1]
    end = key_end + 2 + int.from_bytes(sealed[key_end : key_end + 2], "big")
    return _SealedParts(
        key_id=sealed[2:key_end].decode("ascii", "replace"),
        wrapped=sealed[key_end + 2 : end],
        head=sealed[:end],
        body=sealed[end:],
    )


def _decrypt(key: bytes, body: bytes, bound_to: bytes) -> str:
    """Raises StoreUnusable."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(body[:NONCE_BYTES], body[NONCE_BYTES:], bound_to).decode()
    except (InvalidTag, ValueError) as error:
        raise StoreUnusable("the value is damaged, or belongs to another secret") from error


def _bound_to(project: str, name: str) -> bytes:
    """Return the additional authenticated data that ties an encrypted value to its project and
    name. The data includes the length of the project's name, so that project "a" with name "bc"
    differs from project "ab" with name "c".
    """
    return f"{len(project)}:{project}/{name}".encode()


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
