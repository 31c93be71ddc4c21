"""Amazon EC2: each gang is one all-or-none launch of instances that start the agent on boot."""

from cavvy.providers.aws.manifest import MANIFEST
from cavvy.providers.base import Provider, ProviderContext

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.aws.provider import AwsProvider

    return AwsProvider(MANIFEST, context)
