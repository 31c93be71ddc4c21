"""The credentials that projects have at providers, and the choice of the credential for a job.

A provider that is used with the credential of a project is a separate account, with the name
PROVIDER@PROJECT. The project's account has its own machines, ledger and quotas. The account of the
installation has the name of the provider.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from hashlib import sha256

from cavvy.domain.accounts import Project
from cavvy.domain.authorization import list_line
from cavvy.domain.values import Struct

_AT = "@"


class SealedCredential(Struct, frozen=True, kw_only=True):
    """A project's settings and keys for a provider, encrypted. The store never gets the plain
    text.
    """

    project: str
    provider: str
    sealed: bytes
    updated_at: datetime

    @property
    def bound_name(self) -> str:
        """The name that the encryption of the credential includes, so that the ciphertext can be
        decrypted only under this name. No secret can have the same name.
        """
        return f"credential for {self.provider}"


class CredentialBook:
    """The pairs of project and provider that have a credential."""

    def __init__(
        self, held: Collection[tuple[str, str]] = (), projects: Iterable[Project] = ()
    ) -> None:
        self._held = frozenset(held)
        self._parents: Mapping[str, str | None] = {each.name: each.parent for each in projects}

    def __bool__(self) -> bool:
        return bool(self._held)

    def holds(self, account: str) -> bool:
        """Return whether an account can be used. The installation's own account can always be used;
        a project's account must have a credential.
        """
        provider, project = split_account(account)
        return not project or (project, provider) in self._held

    def find_account(self, project: str, provider: str) -> str:
        """Return the account that a project's jobs use at a provider: the account of the project,
        or else of the nearest project above it that has a credential, or else of the installation.
        """
        for each in list_line(project, self._parents):
            if (each, provider) in self._held:
                return name_account(provider, each)
        return provider


def name_account(provider: str, project: str) -> str:
    """Return the name of the account; if `project` is empty, the name of the installation's
    account.
    """
    return f"{provider}{_AT}{project}" if project else provider


def split_account(account: str) -> tuple[str, str]:
    """Return the provider and the project of an account; the project is "" for the account of the
    installation.
    """
    provider, _, project = account.partition(_AT)
    return provider, project


def mark_account(installation: str, project: str) -> str:
    """Return the ID by which an account recognises its machines. Each project has a separate ID.
    Therefore two accounts never manage the same machine, even if both accounts use keys of the same
    cloud customer.
    """
    if not project:
        return installation
    return sha256(f"{installation}/{project}".encode()).hexdigest()[:32]
