"""A Slurm cluster as a place for jobs: each gang is one batch job with an agent on each of its
nodes.
"""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.slurm.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    from cavvy.providers.slurm.provider import (
        SlurmProvider,
    )  # a list of all providers needs nothing of this

    return SlurmProvider(MANIFEST, context)
