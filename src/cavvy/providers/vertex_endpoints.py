"""Online endpoints of Vertex AI: each replica of a service is one endpoint with one deployed model
on one machine.
"""

from cavvy.providers.base import Feature
from cavvy.providers.gcp.settings import KEY_FILE, MACHINES, project
from cavvy.providers.managed.manifest import EndpointManifest, list_unsupported_by_endpoints
from cavvy.providers.settings import project_number, project_text, text

_DOCS = "https://cloud.google.com/vertex-ai/docs"
CONTRACT = f"{_DOCS}/predictions/custom-container-requirements"
_API = f"{_DOCS}/reference/rest/v1/projects.locations.endpoints"

MANIFEST = EndpointManifest(
    name="vertex-endpoints",
    title="Vertex AI endpoints",
    cloud="cavvy.providers.vertex.endpoints:make_endpoints",
    rights="the role Vertex AI User (roles/aiplatform.user), or a role with these permissions: "
    "aiplatform.models.upload, get, list and delete; aiplatform.endpoints.create, get, list, "
    "deploy, undeploy, delete and predict. If the setting `service_account` is set: also "
    "iam.serviceAccounts.actAs for this account",
    unsupported={
        **list_unsupported_by_endpoints("Vertex AI", container=CONTRACT, api=_API),
        Feature.SPOT: "Cavvy starts no endpoints on spot machines yet "
        f"({_DOCS}/predictions/use-spot-vms)",
        Feature.LOGIN: "Vertex AI pulls images from Artifact Registry with the rights of its "
        f"service agent ({CONTRACT})",
    },
    project_key="cavvy.providers.gcp.credentials",
    settings=(
        project("endpoints"),
        KEY_FILE,
        project_text("regions", "The regions to use, separated by commas.", "us-central1"),
        MACHINES,
        project_text(
            "image",
            "The image for services whose task names no image. The image must be in Artifact "
            "Registry. `{region}` is replaced by the endpoint's region. Without this setting, "
            "each task must name an image.",
        ),
        project_text(
            "service_account",
            "The e-mail address of the service account that containers run as. The default is "
            "Vertex AI's own service agent.",
        ),
        project_number(
            "disk_gib",
            "The disk size with which Cavvy compares `resources.disk`. Google selects the real "
            "size of an endpoint's disk.",
            default=100,
            minimum=1,
            unit="GiB",
            whole=True,
        ),
        project_number(
            "start_s",
            "How long a deployment may take until its container answers /ping. If the deployment "
            "takes longer, the endpoint fails.",
            default=1800,
            minimum=60,
            unit="seconds",
            whole=True,
        ),
        text(
            "endpoint",
            "The address of the API. `{region}` is replaced by the endpoint's region.",
            "https://{region}-aiplatform.googleapis.com/v1",
        ),
    ),
)
