"""Encrypts and decrypts the credentials of projects at providers, and creates a provider for each
credential. Credentials never leave this process: agents, answers and logs do not contain them, and
key files exist only in this process's memory.
"""

import asyncio
import logging
import os
import re
from asyncio import to_thread
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from importlib import import_module
from typing import Protocol

from msgspec.json import decode, encode

from cavvy.api.errors import ApiProblem
from cavvy.control.provider_pool import ProviderPool
from cavvy.domain.credentials import SealedCredential, name_account
from cavvy.domain.gangs import GangState
from cavvy.domain.tasks import Scalar
from cavvy.domain.values import Struct, field, replace
from cavvy.providers.abilities import CLOSEABLE, WHO_AM_I, ability
from cavvy.providers.base import (
    KeyFileRefused,
    Manifest,
    Provider,
    ProviderError,
    Refused,
    SettingKind,
    TryAgain,
)
from cavvy.providers.registry import (
    BadSettings,
    KnownProvider,
    check_settings,
    list_known,
    manifest_of,
)
from cavvy.store.base import StoreError, StoreUnusable
from cavvy.store.secrets import SecretSealer
from cavvy.store.sql import Store

_RETRY_S = 60.0  # seconds between attempts to decrypt credentials that could not be decrypted
_ASKING_S = 60.0  # maximum seconds for the first calls with a new credential
_LONGEST = 1000  # maximum characters of a setting
_LONGEST_KEY = 64 * 1024  # maximum characters of a key file
# regions may become a part of a cloud's address, so they must not end its host
_REGIONS = re.compile(r"[A-Za-z0-9_, -]*")
_log = logging.getLogger(__name__)


class CredentialContent(Struct, frozen=True, kw_only=True):
    """The values that a project sets: settings of the provider, and the contents of the provider's
    key files, keyed by the names of the settings.
    """

    settings: dict[str, Scalar] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)


# (known provider, settings, project) -> the provider with the project's account
MakeProvider = Callable[[KnownProvider, Mapping[str, Scalar], str], Provider]


class UsesAccounts(Protocol):
    """An object that uses the cloud accounts of projects: the control plane, or the check after a
    restore.
    """

    @property
    def pool(self) -> ProviderPool: ...
    async def put_account(self, account: str, provider: Provider) -> None: ...
    async def drop_account(self, account: str) -> None: ...


class ProjectCredentials:
    """The credentials of all projects. `problems` contains the reason for each account whose
    credential could not be decrypted.
    """

    def __init__(
        self,
        store: Store,
        sealer: SecretSealer,
        accounts: UsesAccounts,
        make_provider: MakeProvider,
        now: Callable[[], datetime],
    ) -> None:
        self._store, self._sealer, self._now = store, sealer, now
        self._accounts = accounts
        self._make = make_provider
        self._files: dict[str, list[int]] = {}  # account -> descriptors of its key files
        self._opened: dict[str, datetime] = {}  # account -> `updated_at` of the open credential
        self._changing = asyncio.Lock()
        self._soon = asyncio.Event()
        accounts.pool.read_accounts = self._soon.set
        self.problems = accounts.pool.unusable

    async def open_changed(self) -> None:
        """Open the stored credentials that are not open, and close open credentials that are no
        longer stored. Another server may have added or deleted credentials. The server later
        retries a credential that cannot be opened.
        """
        async with self._changing:
            pool = self._accounts.pool
            stored = {
                name_account(each.provider, each.project): each
                for each in await self._store.provider_credentials.list()
            }
            for account in (self._opened.keys() | self.problems.keys()) - stored.keys():
                await self._drop(account)
            for account, each in stored.items():
                if account in pool.providers and self._opened.get(account) == each.updated_at:
                    continue
                try:
                    text = await to_thread(
                        self._sealer.unseal, each.project, each.bound_name, each.sealed
                    )
                    content = decode(text, type=CredentialContent)
                    provider, files = self._open(each.project, each.provider, content)
                except (ProviderError, StoreError, ApiProblem) as error:
                    why = f"the project's credential for {each.provider} cannot be used: {error}"
                    if self.problems.get(account) != why:
                        _log.warning("project %s: %s", each.project, why)
                    self.problems[account] = why
                    continue
                await self._use(account, provider, files, each.updated_at)
            pool.accounts_read_at = self._now()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Open the stored credentials, and regularly retry the credentials that fail. When the
        context ends, close all credentials.
        """
        await self.open_changed()
        retrying = asyncio.create_task(self._keep_open())
        try:
            yield
        finally:
            retrying.cancel()
            self.forget()

    def forget(self) -> None:
        """Close the key files; providers that use these files cannot read them again."""
        while self._files:
            _close_files(self._files.popitem()[1])

    async def put(self, project: str, provider: str, content: CredentialContent) -> None:
        """Check and store a credential. After this call, providers use the credential. Raises
        ApiProblem, and Refused or TryAgain if the provider does not accept the credential.
        """
        account = name_account(provider, project)
        async with self._changing:
            made, files = self._open(project, provider, content)
            try:
                await _try(made)
                if missing := await self._find_missing(account, made):
                    raise ApiProblem(
                        "credential-in-use",
                        f"{provider} does not list {missing[0]} with this credential, but a job "
                        f"of project {project} is running or ending there",
                    )
                plain = encode(content).decode()
                bound = SealedCredential(
                    project=project, provider=provider, sealed=b"", updated_at=self._now()
                )
                sealed = await to_thread(self._sealer.seal, project, bound.bound_name, plain)
                await self._store.provider_credentials.put(replace(bound, sealed=sealed))
            except BaseException:
                _close_files(files)
                if closeable := ability(made, CLOSEABLE):
                    await closeable.close()
                raise
            self._accounts.pool.tell_accounts()
            await self._use(account, made, files, bound.updated_at)

    async def remove(self, project: str, provider: str) -> None:
        """Delete a credential, if no running machine uses it. Raises RowNotFound, ApiProblem,
        TryAgain.
        """
        account = name_account(provider, project)
        async with self._changing:
            if running := await self._list_running(account):
                raise ApiProblem(
                    "credential-in-use",
                    f"{running[0]} still runs with this credential, or is ending",
                )
            await self._store.provider_credentials.delete(project, provider)
            self._accounts.pool.tell_accounts()
            await self._drop(account)

    async def _keep_open(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_S):
                    await self._soon.wait()
            self._soon.clear()
            try:
                await self.open_changed()
            except StoreError as error:
                _log.warning("cannot read the credentials of projects", exc_info=error)

    async def _drop(self, account: str) -> None:
        await self._accounts.drop_account(account)
        self.problems.pop(account, None)
        self._opened.pop(account, None)
        _close_files(self._files.pop(account, []))

    async def _use(
        self, account: str, provider: Provider, files: list[int], updated_at: datetime
    ) -> None:
        former = self._files.pop(account, [])
        self._files[account], self._opened[account] = files, updated_at
        self.problems.pop(account, None)
        await self._accounts.put_account(account, provider)
        _close_files(former)

    def _open(
        self, project: str, provider: str, content: CredentialContent
    ) -> tuple[Provider, list[int]]:
        """Create the provider, and the key files that the provider reads. Raises ApiProblem,
        ProviderError.
        """
        known = list_known().get(provider)
        if known is None:
            raise ApiProblem("invalid-request", f"{provider!r} is not a provider")
        manifest = manifest_of(known)
        check_content(manifest, content)
        files: list[int] = []
        try:
            paths = {
                name: _make_file(_clean(manifest, name, text), files)
                for name, text in content.keys.items()
            }
            return self._make(known, {**content.settings, **paths}, project), files
        except BaseException as error:
            _close_files(files)
            if isinstance(error, BadSettings):
                raise ApiProblem("invalid-request", str(error)) from error
            raise

    async def _list_attempts(self, account: str) -> list[str]:
        attempts = await self._store.open_attempts()
        return [each.gang for each in attempts if each.offer.account == account]

    async def _find_missing(self, account: str, made: Provider) -> list[str]:
        """Return the account's gangs that are missing from the provider's list."""
        wanted = await self._list_attempts(account)
        seen = {each.name for each in await made.gangs()} if wanted else set()
        return [each for each in wanted if each not in seen]

    async def _list_running(self, account: str) -> list[str]:
        """Return the account's gangs that may still be running. If the provider no
        longer accepts the credential, return the gangs of unfinished attempts.
        """
        running, pool = await self._list_attempts(account), self._accounts.pool
        if running or account not in pool.providers:
            return running
        try:
            seen = await pool.gangs(account)
        except Refused:
            return []
        return [each.name for each in seen if each.state is not GangState.ENDED]


def check_content(manifest: Manifest, content: CredentialContent) -> None:
    """Raise ApiProblem unless a project may set exactly these values for the provider."""
    if not manifest.project_settings:
        why = f": {manifest.no_project_accounts}" if manifest.no_project_accounts else ""
        raise ApiProblem(
            "invalid-request",
            f"{manifest.name} does not support credentials of projects{why}",
            "docs/guides/credentials.md lists the providers that support credentials of projects",
        )
    kinds = {each.name: each.kind for each in manifest.settings}
    allowed = [each for each in manifest.project_settings if each in kinds]
    needed = [each for each in allowed if kinds[each] is SettingKind.KEY_FILE]
    _check_names("key", content.keys, needed)
    _check_names("setting", content.settings, [each for each in allowed if each not in needed])
    for name in needed:
        if not content.keys.get(name, "").strip():
            raise ApiProblem("invalid-request", f"{manifest.name} needs the key {name}")
    for name, text in content.keys.items():
        if len(text) > _LONGEST_KEY or "\0" in text:
            raise ApiProblem(
                "invalid-request", f"the key {name} must be text of up to {_LONGEST_KEY} characters"
            )
    for name, value in content.settings.items():
        text = str(value)
        if len(text) > _LONGEST or not text.isprintable():
            raise ApiProblem(
                "invalid-request",
                f"{name} must have at most {_LONGEST} characters, all of them printable",
            )
        if name in ("regions", "zones") and not _REGIONS.fullmatch(text):
            raise ApiProblem("invalid-request", f"{text!r} does not list {name}")
    check_settings(manifest, content.settings)


def _clean(manifest: Manifest, name: str, text: str) -> str:
    """Return the part of a key file that the provider reads. Raises ApiProblem."""
    if not manifest.project_key:
        return text
    try:
        return str(import_module(manifest.project_key).clean_key(text))
    except KeyFileRefused as error:
        raise ApiProblem("invalid-request", f"the key {name} cannot be used: {error}") from error


def _check_names(what: str, given: Collection[str], allowed: Collection[str]) -> None:
    for name in given:
        if name not in allowed:
            listed = ", ".join(sorted(allowed))
            raise ApiProblem(
                "invalid-request", f"a project cannot set the {what} {name!r} here: {listed}"
            )


async def _try(provider: Provider) -> None:
    """Test the credential with one request. Raises ProviderError."""
    try:
        async with asyncio.timeout(_ASKING_S):
            if who := ability(provider, WHO_AM_I):
                await who.whoami()
            else:
                await provider.offers()
    except TimeoutError:
        raise TryAgain(f"no answer within {_ASKING_S:.0f} s") from None


def _make_file(text: str, files: list[int]) -> str:
    """Create a file that exists only in the memory of this process, and return its path."""
    try:
        fd = os.memfd_create("key", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        raise StoreUnusable(f"this system cannot store keys in memory files: {error}") from error
    files.append(fd)
    os.write(fd, text.encode())
    return f"/proc/{os.getpid()}/fd/{fd}"


def _close_files(files: list[int]) -> None:
    while files:
        os.close(files.pop())
