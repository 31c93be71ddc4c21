"""Hosts reached by SSH as places for jobs: their CPUs, memory and accelerators, with agents as
processes.
"""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.ssh.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    from cavvy.providers.ssh.provider import SshProvider  # brings asyncssh: slow to import

    return SshProvider(MANIFEST, context)
