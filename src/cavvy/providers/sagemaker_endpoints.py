"""Real-time endpoints of Amazon SageMaker: each replica of a service is one endpoint with one
instance.
"""

from cavvy.providers.aws.settings import ACCOUNT, REGIONS
from cavvy.providers.base import Feature
from cavvy.providers.managed.manifest import EndpointManifest, list_unsupported_by_endpoints
from cavvy.providers.sagemaker import INSTANCES
from cavvy.providers.settings import project_number, project_text

_DOCS = "https://docs.aws.amazon.com/sagemaker/latest"
CONTRACT = f"{_DOCS}/dg/your-algorithms-inference-code.html"
_CONFIG = f"{_DOCS}/APIReference/API_ProductionVariant.html"
_MODEL = f"{_DOCS}/APIReference/API_ContainerDefinition.html"

MANIFEST = EndpointManifest(
    name="sagemaker-endpoints",
    title="Amazon SageMaker endpoints",
    cloud="cavvy.providers.sagemaker.endpoints:make_endpoints",
    rights="sagemaker:CreateModel, CreateEndpointConfig, CreateEndpoint, DescribeEndpoint, "
    "ListEndpoints, ListEndpointConfigs, ListModels, DeleteEndpoint, DeleteEndpointConfig, "
    "DeleteModel, AddTags and InvokeEndpoint, pricing:GetProducts, and iam:PassRole for the role "
    "of the setting `role`",
    unsupported={
        **list_unsupported_by_endpoints("SageMaker", container=CONTRACT, api=_CONFIG),
        Feature.SPOT: f"endpoints have no spot instances ({_CONFIG})",
        Feature.LOGIN: "SageMaker pulls images from Amazon ECR with the rights of the setting "
        f"`role` ({_MODEL})",
    },
    settings=(
        REGIONS,
        *ACCOUNT,
        project_text(
            "role",
            "The ARN of the execution role of endpoints. SageMaker uses this role to pull the "
            "image and to read the model from its bucket. The container also runs with the role's "
            "permissions. "
            "Required.",
        ),
        project_text(
            "image",
            "The image, in Amazon ECR, of services whose task names no image. `{region}` is "
            "replaced by the endpoint's region. Without this setting, each task must name an "
            "image.",
        ),
        INSTANCES,
        project_text(
            "subnets",
            "The subnets of endpoints, separated by commas. By default, endpoints run in "
            "SageMaker's own network.",
        ),
        project_text("security_groups", "The security groups of endpoints, if `subnets` is set."),
        project_number(
            "disk_gib",
            "The disk size that Cavvy states in offers and compares with `resources.disk`. "
            "The instance type of an endpoint determines the real size of its disk.",
            default=30,
            minimum=1,
            unit="GiB",
            whole=True,
        ),
        project_number(
            "download_s",
            "How long SageMaker may copy the model from its bucket. If copying takes longer, the "
            "endpoint fails.",
            default=1200,
            minimum=60,
            unit="seconds",
            whole=True,
        ),
        project_number(
            "start_s",
            "How long a container may take until it answers /ping. If the container takes longer, "
            "the endpoint fails.",
            default=1200,
            minimum=60,
            unit="seconds",
            whole=True,
        ),
    ),
)
