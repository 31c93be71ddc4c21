"""Nebius AI Cloud: each node is one virtual machine that starts the agent on boot."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.nebius.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.nebius.cloud import NebiusCloud, object_to
    from cavvy.providers.vm.provider import VmProvider

    cloud = NebiusCloud(context.settings, context.list_prices, context.now)
    return VmProvider(
        MANIFEST,
        context,
        cloud,
        identity=cloud.identity,
        object_to=object_to,
        silent=cloud.silent,
        close=cloud.close,
    )
