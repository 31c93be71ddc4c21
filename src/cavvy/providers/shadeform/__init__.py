"""Shadeform: each node is an instance in one of Shadeform's clouds, and starts the agent on
boot."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.shadeform.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.shadeform.cloud import ShadeformCloud
    from cavvy.providers.vm.account import make_provider

    return make_provider(MANIFEST, context, ShadeformCloud)
