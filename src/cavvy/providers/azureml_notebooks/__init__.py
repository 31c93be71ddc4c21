"""Azure Machine Learning's compute instances: each session is a managed notebook, which starts the
agent when it is created.
"""

from cavvy.providers.azureml_notebooks.manifest import MANIFEST
from cavvy.providers.base import Provider, ProviderContext

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.azureml_notebooks.service import ComputeInstances
    from cavvy.providers.managed.provider import make_provider

    service = ComputeInstances(context)
    return make_provider(MANIFEST, context, service, close=service.close)
