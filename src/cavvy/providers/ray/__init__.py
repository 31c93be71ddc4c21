"""Ray clusters as places for jobs: each gang is a Ray job that reserves its nodes and has an
agent held on each.
"""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.ray.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    from cavvy.providers.ray.provider import (
        RayProvider,
    )  # a list of all providers needs nothing of this

    return RayProvider(MANIFEST, context)
