"""Amazon SageMaker: each gang is one training job, whose containers start the agent."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.sagemaker.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.managed.provider import make_provider
    from cavvy.providers.sagemaker.channels import list_placed
    from cavvy.providers.sagemaker.service import SageMakerService

    service = SageMakerService(context)
    return make_provider(
        MANIFEST, context, service, list_placed=list_placed, release=service.release
    )
