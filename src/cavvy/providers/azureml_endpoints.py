"""Managed online endpoints of Azure Machine Learning: each replica of a service is one endpoint
with one deployment on one machine.
"""

from cavvy.providers.azure.settings import RESOURCE_MANAGER, WORKSPACE
from cavvy.providers.base import Feature
from cavvy.providers.managed.manifest import EndpointManifest, list_unsupported_by_endpoints
from cavvy.providers.settings import project_number, project_text

_LEARN = "https://learn.microsoft.com"
DOCS = f"{_LEARN}/azure/machine-learning"
CONTRACT = f"{DOCS}/how-to-deploy-custom-container"
_API = f"{_LEARN}/rest/api/azureml/online-deployments/create-or-update"

MANIFEST = EndpointManifest(
    name="azureml-endpoints",
    title="Azure ML endpoints",
    cloud="cavvy.providers.azureml.endpoints:make_endpoints",
    rights="the role AzureML Data Scientist, and two actions of "
    "Microsoft.MachineLearningServices: locations/vmSizes/read and "
    "locations/mfeOperationsStatus/read; instead of the role, these actions suffice: "
    "workspaces/read; workspaces/computes/read; workspaces/environments/versions/read and "
    "write; workspaces/onlineEndpoints/read, write, delete and score/action; "
    "workspaces/onlineEndpoints/deployments/read and write",
    unsupported={
        **list_unsupported_by_endpoints("Azure", container=CONTRACT, api=_API),
        Feature.SPOT: f"endpoints cannot use low-priority machines ({_API})",
        Feature.LOGIN: "Azure pulls images with the rights of the endpoint's identity, and accepts "
        f"no login ({DOCS}/how-to-troubleshoot-online-endpoints)",
    },
    project_key="cavvy.providers.azure.account",
    settings=(
        *WORKSPACE,
        project_text(
            "sizes",
            "Patterns of the sizes to offer, such as `Standard_NC*`, separated by commas. The "
            "default is every size that Azure allows for managed online endpoints, that the "
            "workspace's region has, and that has a price in the catalog.",
            "*",
        ),
        project_text(
            "image",
            "The image of services whose task names no image, such as "
            "`NAME.azurecr.io/digits:1`. Without this setting, each task must name an image.",
        ),
        project_text(
            "identity",
            "The resource id of a user-assigned managed identity. Endpoints pull their image "
            "with this identity, and containers run with it. By default, Azure creates an identity "
            "for each endpoint; such an identity may pull images from the workspace's own "
            "registry.",
        ),
        project_number(
            "start_s",
            "The maximum time between the start of a container and its first answer to /ping. If "
            "a container needs more time, the endpoint fails.",
            default=1800,
            minimum=60,
            unit="seconds",
            whole=True,
        ),
        RESOURCE_MANAGER,
    ),
)
