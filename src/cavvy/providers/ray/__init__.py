"""Ray clusters: each gang is a Ray job that reserves its nodes and supervises an agent on each."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.ray.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    from cavvy.providers.ray.provider import RayProvider  # not needed to list providers

    return RayProvider(MANIFEST, context)
