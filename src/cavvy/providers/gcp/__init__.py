"""Google Compute Engine: each node is one virtual machine that starts the agent on boot."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.gcp.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.gcp.cloud import GcpCloud
    from cavvy.providers.vm.provider import VmProvider

    cloud = GcpCloud(context.settings, context.list_prices, context.now)
    return VmProvider(
        MANIFEST,
        context,
        cloud,
        identity=cloud.identity,
        quotas=cloud.quotas,
        close=cloud.close,
    )
