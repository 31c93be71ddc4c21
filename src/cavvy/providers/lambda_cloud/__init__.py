"""Lambda Cloud: each node is one on-demand instance that starts the agent on boot.

The package is not named `lambda`, because that is a keyword of Python.
"""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.lambda_cloud.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.lambda_cloud.cloud import LambdaCloud
    from cavvy.providers.vm.account import make_provider

    return make_provider(MANIFEST, context, LambdaCloud)
