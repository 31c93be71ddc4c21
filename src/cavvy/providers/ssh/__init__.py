"""Hosts reached by SSH: jobs use their CPUs, memory and accelerators; agents are processes."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.ssh.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    """Make the provider. The provider's modules are imported only here, so that listing the
    providers stays fast.
    """
    from cavvy.providers.ssh.provider import SshProvider

    return SshProvider(MANIFEST, context)
