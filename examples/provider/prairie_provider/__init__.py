"""The Prairie (a made-up cloud): each node is one server that starts the agent on boot."""

from cavvy.providers.base import Provider, ProviderContext
from prairie_provider.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.vm.account import make_provider
    from prairie_provider.cloud import PrairieCloud

    return make_provider(MANIFEST, context, PrairieCloud)
