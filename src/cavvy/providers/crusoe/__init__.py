"""Crusoe Cloud: each node is one virtual machine that starts the agent on boot."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.crusoe.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.crusoe.cloud import CrusoeCloud
    from cavvy.providers.vm.account import make_provider

    return make_provider(MANIFEST, context, CrusoeCloud)
