"""The provider for this machine: jobs use its CPUs, memory and accelerators; agents are
processes.
"""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.local.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    from cavvy.providers.local.provider import (
        LocalProvider,
    )  # imported only here, so that listing the providers stays fast

    return LocalProvider(MANIFEST, context)
