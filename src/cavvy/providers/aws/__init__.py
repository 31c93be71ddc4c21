"""Amazon EC2: each gang is one all-or-none launch of instances that start the agent themselves."""

from cavvy.providers.aws.manifest import MANIFEST
from cavvy.providers.base import Provider, ProviderContext

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    from cavvy.providers.aws.provider import AwsProvider  # not needed to list providers

    return AwsProvider(MANIFEST, context)
