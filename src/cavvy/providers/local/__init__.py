"""This machine as a provider: jobs use its CPUs, memory and accelerators, with agents as
processes."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.local.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    from cavvy.providers.local.provider import (
        LocalProvider,
    )  # a list of all providers needs no import of this

    return LocalProvider(MANIFEST, context)
