"""Hosts reached by SSH: jobs get their CPUs, memory and accelerators, and agents are processes."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.ssh.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    """The provider; a list of all providers imports nothing of this."""
    from cavvy.providers.ssh.provider import SshProvider

    return SshProvider(MANIFEST, context)
