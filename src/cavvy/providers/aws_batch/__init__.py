"""AWS Batch: each gang is one job in a queue, and the job's containers start the agent."""

from cavvy.providers.aws_batch.manifest import MANIFEST
from cavvy.providers.base import Provider, ProviderContext

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.aws_batch.service import BatchService
    from cavvy.providers.managed.provider import make_provider

    service = BatchService(context)
    return make_provider(MANIFEST, context, service, list_notices=BatchService.list_notices)
