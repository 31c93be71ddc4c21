"""The provider for PBS clusters: each gang is one batch job, with an agent on each of its nodes."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.pbs.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    """Make the provider. The provider's modules are imported only here, so that listing the
    providers stays fast.
    """
    from cavvy.providers.batch.provider import BatchProvider
    from cavvy.providers.pbs.system import PbsSystem

    return BatchProvider(MANIFEST, context, PbsSystem(context.settings))
