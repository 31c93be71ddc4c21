"""Joined machines: any machine that reaches the control plane can join with one pasted command."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.join.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    """Make the provider. The provider's modules are imported only here, so that listing the
    providers stays fast.
    """
    from cavvy.providers.join.provider import JoinProvider

    return JoinProvider(MANIFEST, context)
