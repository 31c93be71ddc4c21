"""Vast.ai: each node is one container, on which the server starts the agent by SSH."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.vast.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.vast.cloud import VastCloud
    from cavvy.providers.vm.account import make_provider

    return make_provider(MANIFEST, context, VastCloud)
