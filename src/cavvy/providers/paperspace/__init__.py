"""Paperspace: each node is one machine that starts the agent on its first boot."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.paperspace.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.paperspace.cloud import PaperspaceCloud
    from cavvy.providers.vm.account import make_provider

    return make_provider(
        MANIFEST,
        context,
        lambda settings, now: PaperspaceCloud(settings, now, context.list_prices),
    )
