"""Instances of Vertex AI Workbench: each session is a managed notebook, which starts the agent."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.vertex_workbench.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.managed.provider import make_provider
    from cavvy.providers.vertex_workbench.service import WorkbenchInstances

    service = WorkbenchInstances(context)
    return make_provider(MANIFEST, context, service, close=service.close)
