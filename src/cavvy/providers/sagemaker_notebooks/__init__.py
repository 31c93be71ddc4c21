"""Notebook instances of Amazon SageMaker: each session is a managed notebook, which starts the
agent.
"""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.sagemaker_notebooks.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.managed.provider import make_provider
    from cavvy.providers.sagemaker_notebooks.service import NotebookInstances

    return make_provider(MANIFEST, context, NotebookInstances(context))
