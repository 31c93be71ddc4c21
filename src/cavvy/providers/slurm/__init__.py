"""The provider for Slurm clusters: each gang is one batch job, with an agent on each of its
nodes.
"""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.slurm.manifest import MANIFEST, with_containers

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    """Make the provider. The provider's modules are imported only here, so that listing the
    providers stays fast.
    """
    from cavvy.providers.batch.provider import BatchProvider
    from cavvy.providers.slurm.system import SlurmSystem

    manifest = with_containers(MANIFEST, str(context.settings.get("container", "")))
    return BatchProvider(manifest, context, SlurmSystem(context.settings))
