"""Azure Machine Learning: each gang is one command job, whose containers start the agent."""

from cavvy.providers.azureml.manifest import MANIFEST
from cavvy.providers.base import Provider, ProviderContext

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.azureml.service import AzureMlService
    from cavvy.providers.managed.provider import make_provider

    service = AzureMlService(context)
    return make_provider(MANIFEST, context, service, close=service.close)
