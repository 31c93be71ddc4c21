"""Azure: each node is one virtual machine that starts the agent on boot."""

from cavvy.providers.azure.manifest import MANIFEST
from cavvy.providers.base import Provider, ProviderContext

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.azure.cloud import AzureCloud
    from cavvy.providers.vm.provider import VmProvider
    from cavvy.providers.vm.records import MachineNames

    mark = MachineNames(context.installation, AzureCloud.traits.name_limit).mark
    cloud = AzureCloud(context.settings, context.now, context.find_instance, mark=mark)
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
