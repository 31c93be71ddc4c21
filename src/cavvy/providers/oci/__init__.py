"""Oracle Cloud Infrastructure: each node is one compute instance that starts the agent on boot."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.oci.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.oci.cloud import OciCloud
    from cavvy.providers.vm.provider import VmProvider

    cloud = OciCloud(context.settings, context.list_prices, context.now)
    return VmProvider(
        MANIFEST,
        context,
        cloud,
        identity=cloud.identity,
        quotas=cloud.quotas,
        untold_quotas=cloud.untold_quotas,
        silent=cloud.silent,
        close=cloud.close,
    )
