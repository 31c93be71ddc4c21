"""Kubernetes clusters: each gang is a group of bare pods, with an agent in each pod."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.kubernetes.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    from cavvy.providers.kubernetes.provider import (
        KubernetesProvider,
    )  # imported only here, so that listing the providers stays fast

    return KubernetesProvider(MANIFEST, context)
