"""The documents that a provider stores in the installation's database, so that all servers see the
same state."""

from cavvy.domain.values import Struct


class ProviderDocument(Struct, frozen=True, kw_only=True):
    """One JSON document of a provider, such as the record of a launch."""

    collection: str  # such as "gangs" or "machines"
    name: str  # unique in its collection
    body: str  # JSON
    version: int = 1  # the version: 1 at creation; each write adds 1
