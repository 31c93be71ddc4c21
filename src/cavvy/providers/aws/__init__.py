"""Amazon EC2 as a place for jobs: each gang is one all-or-none launch of instances that start
our agent themselves.
"""

from cavvy.providers.aws.manifest import MANIFEST
from cavvy.providers.base import Provider, ProviderContext

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    from cavvy.providers.aws.provider import (
        AwsProvider,
    )  # a list of all providers needs nothing of this

    return AwsProvider(MANIFEST, context)
