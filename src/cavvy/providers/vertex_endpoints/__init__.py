"""Online endpoints of Vertex AI: each replica of a service is one endpoint with one deployed model
on one machine.
"""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.vertex_endpoints.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.managed.endpoint_provider import EndpointProvider
    from cavvy.providers.managed.provider import make_provider
    from cavvy.providers.vertex_endpoints.runtime import VertexRuntime
    from cavvy.providers.vertex_endpoints.service import VertexEndpoints

    service = VertexEndpoints(context)
    runtime = VertexRuntime(service)

    inner = make_provider(MANIFEST, context, service, close=service.close)
    return EndpointProvider(inner, runtime, context.now)
