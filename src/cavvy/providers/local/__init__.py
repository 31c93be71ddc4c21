"""The provider for this machine: jobs use its CPUs, memory and accelerators; agents are
processes.
"""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.local.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    from cavvy.providers.local.provider import (
        LocalProvider,
    )  # imported here because listing the providers does not need it

    return LocalProvider(MANIFEST, context)
