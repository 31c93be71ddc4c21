"""Prime Intellect: each node is one pod, on which the server starts the agent by SSH."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.primeintellect.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.primeintellect.cloud import PrimeIntellectCloud
    from cavvy.providers.vm.account import make_provider

    return make_provider(MANIFEST, context, PrimeIntellectCloud)
