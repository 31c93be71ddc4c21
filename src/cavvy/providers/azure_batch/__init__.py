"""Azure Batch: each gang is one job with its own pool. The containers of the job's tasks start the
agent.
"""

from cavvy.providers.azure_batch.manifest import MANIFEST
from cavvy.providers.base import Provider, ProviderContext

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.azure_batch.service import AzureBatchService
    from cavvy.providers.managed.provider import make_provider

    service = AzureBatchService(context)
    return make_provider(MANIFEST, context, service, close=service.close)
