"""Names the caches of projects on clusters where the jobs of all projects run as one account."""

import hashlib
import os

from cavvy.domain.values import Struct
from cavvy.providers.base import GangSpec
from cavvy.providers.ledger import ChangedElsewhere, LaunchLedger
from cavvy.providers.state import ProviderState

_SECRET = "caches"


class CacheSecret(Struct, frozen=True, kw_only=True):
    """The secret from which the names of all projects' caches are computed."""

    name: str
    secret: str


class ProjectCaches:
    """Names the cache of each project on clusters where the jobs of all projects run as one
    account, so that no job uses what a job of another project prepared.

    The names are computed from a secret of the installation: no job can create a project's cache
    before the project does. A job can list the names, because the account owns the caches, which
    are therefore separate, but not protected.
    """

    def __init__(self, state: ProviderState) -> None:
        self._ledger = LaunchLedger(state, CacheSecret, "caches")

    async def name(self, gang: GangSpec) -> str:
        """Return the name of the cache of the gang's project. Raises TryAgain."""
        known = self._ledger.get(_SECRET)
        if known is None:
            await self._ledger.refresh(_SECRET)
            known = self._ledger.get(_SECRET)
        if known is None:
            known = CacheSecret(name=_SECRET, secret=os.urandom(16).hex())
            try:
                await self._ledger.put(known)
            except ChangedElsewhere:  # another server was first
                known = self._ledger.get(_SECRET) or known
        text = f"{known.secret}\0{gang.labels.get('project', '')}"
        return f"p-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
