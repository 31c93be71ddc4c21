"""Amazon ECS: each rank of a gang is one task of a cluster, and the task's container starts the
agent.
"""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.ecs.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.ecs.service import EcsService
    from cavvy.providers.managed.provider import make_provider

    return make_provider(
        MANIFEST, context, EcsService(context), list_notices=EcsService.list_notices
    )
