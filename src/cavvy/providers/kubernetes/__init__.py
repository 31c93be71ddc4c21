"""Kubernetes clusters: each gang is a group of bare pods with an agent in each."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.kubernetes.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    from cavvy.providers.kubernetes.provider import (
        KubernetesProvider,
    )  # not needed to list providers

    return KubernetesProvider(MANIFEST, context)
