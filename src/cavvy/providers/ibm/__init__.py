"""IBM Cloud: each node is one instance or bare metal server, and starts the agent on boot."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.ibm.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.ibm.cloud import IbmCloud
    from cavvy.providers.vm.provider import VmProvider

    cloud = IbmCloud(context.settings, context.list_prices, context.now)
    return VmProvider(
        MANIFEST,
        context,
        cloud,
        identity=cloud.identity,
        silent=cloud.silent,
        close=cloud.close,
    )
