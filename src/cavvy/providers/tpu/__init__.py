"""Google Cloud TPU: each slice is one node of the Cloud TPU API, and each of its hosts starts the
agent on boot.
"""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.tpu.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.tpu.cloud import TpuCloud
    from cavvy.providers.tpu.slices import ScriptMaker
    from cavvy.providers.vm.provider import VmProvider

    cloud = TpuCloud(context.settings, context.list_prices, context.now)
    return VmProvider(
        MANIFEST,
        context,
        cloud,
        identity=cloud.identity,
        quotas=cloud.quotas,
        silent=cloud.silent,
        close=cloud.close,
        make_script=ScriptMaker(context.node_endpoint),
    )
