"""Managed online endpoints of Azure Machine Learning: each replica of a service is one endpoint
with one deployment on one machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cavvy.providers.azureml_endpoints.manifest import MANIFEST
from cavvy.providers.base import Provider, ProviderContext

if TYPE_CHECKING:
    from cavvy.providers.azure.account import Credential

__all__ = ["MANIFEST", "make"]


def make(
    context: ProviderContext, make_credential: Callable[[], Credential] | None = None
) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.azureml_endpoints.runtime import AzureMlRuntime
    from cavvy.providers.azureml_endpoints.service import AzureMlEndpoints
    from cavvy.providers.managed.endpoint_provider import EndpointProvider
    from cavvy.providers.managed.provider import make_provider

    service = AzureMlEndpoints(context, make_credential)
    runtime = AzureMlRuntime(service)

    inner = make_provider(MANIFEST, context, service, close=service.close)
    return EndpointProvider(inner, runtime, context.now)
