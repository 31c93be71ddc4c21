"""Google's Vertex AI: each gang is one custom job, whose containers start the agent."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.vertex.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.managed.provider import make_provider
    from cavvy.providers.vertex.service import VertexService

    service = VertexService(context)
    return make_provider(MANIFEST, context, service, close=service.close)
