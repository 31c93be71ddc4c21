"""Changes the key that protects the secrets."""

from asyncio import to_thread
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from cavvy.domain.values import Struct
from cavvy.frame.discover import load
from cavvy.store.base import SealedSecret, StoreUnusable
from cavvy.store.encrypted_files.data_keys import FileKeys
from cavvy.store.keys import WrappingKey
from cavvy.store.own_tables import list_own_migrations
from cavvy.store.secrets import SecretSealer, find_key_id
from cavvy.store.sql import Store


class SealedValue(Protocol):
    """An encrypted value. `bound_name` is the name that its encryption includes."""

    @property
    def project(self) -> str: ...
    @property
    def bound_name(self) -> str: ...
    @property
    def sealed(self) -> bytes: ...


class SealedValues(Protocol):
    """The encrypted values of a capability, made from the functions of `Store.database`."""

    async def list_sealed(self) -> Sequence[SealedValue]: ...

    async def reseal(self, value: Any, sealed: bytes) -> bool:
        """Replace a value unless it has changed meanwhile; return whether it was replaced."""
        ...


class KeyUse(Struct, frozen=True, kw_only=True):
    """The number of secrets and of files' data keys that a key protects. `current` states whether
    new secrets or new data keys are encrypted with the key. `place` is None if the server does not
    have the key.
    """

    id: str
    place: str | None
    current: bool
    secrets: int
    files: int = 0


class KeyRotation(Struct, frozen=True, kw_only=True):
    """The result of `rotate_key`. `files` counts the data keys (the keys that encrypt files) that
    were encrypted again. `unreadable` lists the secrets that could not be decrypted, each with its
    project, its name and the error. The rotation does not change them.
    """

    key: WrappingKey
    encrypted: int
    files: int = 0
    unreadable: Sequence[tuple[str, str, str]]


async def list_keys(
    store: Store, sealer: SecretSealer, file_keys: FileKeys | None = None
) -> list[KeyUse]:
    """Return the use of each key: first the keys that the server has (the current key of secrets
    first), then the keys that the server lacks. Values of version 1 are counted under the empty ID,
    because no key ID is stored with them. Raises StoreUnusable.
    """
    keys, current = await to_thread(_find_keys, sealer, file_keys)
    await _refuse_left_out(store)
    sealed = [each.sealed for each in await store.all_secrets()]
    sealed += [each.sealed for each in await store.provider_credentials.list()]
    for own in _list_own(store):
        sealed += [each.sealed for each in await own.list_sealed()]
    used = Counter(map(find_key_id, sealed))
    files = await to_thread(
        lambda: Counter(each.key_id for each in file_keys.uses()) if file_keys else Counter()
    )
    found: dict[str, KeyUse] = {}
    for key in keys:
        found.setdefault(
            key.id,
            KeyUse(
                id=key.id,
                place=key.place,
                current=key.id in current,
                secrets=used.get(key.id, 0),
                files=files.get(key.id, 0),
            ),
        )
    missing = [
        KeyUse(id=key_id, place=None, current=False, secrets=used[key_id], files=files[key_id])
        for key_id in sorted({*used, *files} - {*found})
    ]
    return [*found.values(), *missing]


def _find_keys(
    sealer: SecretSealer, file_keys: FileKeys | None
) -> tuple[list[WrappingKey], set[str]]:
    """Return the keys that the server has, and the IDs of the current keys."""
    keys = list(sealer.keys.all())
    current = {keys[0].id}
    if file_keys is not None:
        keys += file_keys.keys()
        current |= {key.id for key in file_keys.current()}
    return keys, current


async def rotate_key(
    store: Store, sealer: SecretSealer, file_keys: FileKeys | None = None
) -> KeyRotation:
    """Create a new key if the server creates its own keys. Encrypt all secrets and credentials
    again, with new data keys that the current key protects. Also encrypt each data key of files
    again, with the current key of the file's project. The call can be repeated after a crash,
    because data can still be decrypted with the former keys. Raises StoreFull, or StoreUnusable if
    the current key cannot be used, or if a capability that has tables is not installed.
    """
    await _refuse_left_out(store)
    keys = sealer.keys
    key = await to_thread(keys.renew if keys.renewable else keys.current)
    encrypted = 0
    unreadable: list[tuple[str, str, str]] = []
    for secret in await store.all_secrets():
        try:
            encrypted += await _reseal(store, sealer, secret)
        except StoreUnusable as error:
            unreadable.append((secret.project, secret.name, str(error)))
    credentials = store.provider_credentials
    others: list[tuple[SealedValue, Callable[[bytes], Awaitable[bool]]]] = [
        (each, partial(credentials.reseal, each)) for each in await credentials.list()
    ]
    for own in _list_own(store):
        others += [(each, partial(own.reseal, each)) for each in await own.list_sealed()]
    for found, reseal in others:
        project, name = found.project, found.bound_name
        try:
            sealed = await to_thread(_seal_again, sealer, project, name, found.sealed)
            encrypted += await reseal(sealed)
        except StoreUnusable as error:
            unreadable.append((project, name, str(error)))
    files = 0
    if file_keys is not None:
        files, problems = await to_thread(file_keys.rotate)
        unreadable += problems
    return KeyRotation(key=key, encrypted=encrypted, files=files, unreadable=unreadable)


async def _refuse_left_out(store: Store) -> None:
    """Raise StoreUnusable if a capability that is not installed may have encrypted values: a key
    that seems unused would be deleted, and these would be lost.
    """
    if names := await store.list_left_out():
        raise StoreUnusable(
            f"the database has tables of {' and '.join(names)}, which is not installed, so it is "
            "unknown which keys their values need; install what brings this capability, and try "
            "again"
        )


def _list_own(store: Store) -> list[SealedValues]:
    """Return the encrypted values of the capabilities."""
    tables = [each.tables for each in list_own_migrations() if each.tables.reseal]
    return [load(each.reseal)(*store.database) for each in tables]


async def _reseal(store: Store, sealer: SecretSealer, secret: SealedSecret) -> bool:
    """Return False if the secret was set or deleted in the meantime; a new value already uses the
    new key.
    """
    sealed = await to_thread(_seal_again, sealer, secret.project, secret.name, secret.sealed)
    return await store.reseal_secret(secret, sealed)


def _seal_again(sealer: SecretSealer, project: str, name: str, sealed: bytes) -> bytes:
    return sealer.seal(project, name, sealer.unseal(project, name, sealed))
