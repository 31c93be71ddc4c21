"""Vultr: each node is one instance that starts the agent on boot."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.vultr.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.vm.account import make_provider
    from cavvy.providers.vultr.cloud import VultrCloud

    return make_provider(MANIFEST, context, VultrCloud)
