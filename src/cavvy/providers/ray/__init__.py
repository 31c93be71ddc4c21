"""Ray clusters: each gang is a Ray job that reserves its nodes and supervises an agent on each
node.
"""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.ray.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.ray.provider import RayProvider

    return RayProvider(MANIFEST, context)
