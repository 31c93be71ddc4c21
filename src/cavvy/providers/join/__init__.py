"""Machines that join: any machine that can call the control plane joins with one pasted command."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.join.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    """The provider; nothing is imported before it is enabled."""
    from cavvy.providers.join.provider import JoinProvider

    return JoinProvider(MANIFEST, context)
