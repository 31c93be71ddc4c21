"""A PBS cluster as a place for jobs: each gang is one batch job with an agent on each of its
nodes.
"""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.pbs.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    from cavvy.providers.pbs.provider import (
        PbsProvider,
    )  # a list of all providers needs nothing of this

    return PbsProvider(MANIFEST, context)
