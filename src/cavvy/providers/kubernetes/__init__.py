"""Kubernetes clusters: each gang is a group of bare pods, with an agent in each pod."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.kubernetes.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    from cavvy.providers.kubernetes.provider import (
        KubernetesProvider,
    )  # imported here, so that listing the providers does not load it

    return KubernetesProvider(MANIFEST, context)
