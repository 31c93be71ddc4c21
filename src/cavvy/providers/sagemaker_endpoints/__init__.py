"""Real-time endpoints of Amazon SageMaker: each replica of a service is one endpoint with one
instance.
"""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.sagemaker_endpoints.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.managed.endpoint_provider import EndpointProvider
    from cavvy.providers.managed.provider import make_provider
    from cavvy.providers.sagemaker_endpoints.runtime import SageMakerRuntime
    from cavvy.providers.sagemaker_endpoints.service import SageMakerEndpoints

    service = SageMakerEndpoints(context)
    runtime = SageMakerRuntime(context.settings)
    inner = make_provider(MANIFEST, context, service)
    return EndpointProvider(inner, runtime, context.now)
