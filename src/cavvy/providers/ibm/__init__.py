"""IBM Cloud: each node is one instance or bare metal server, and starts the agent on boot."""

from cavvy.providers.base import Feature
from cavvy.providers.settings import disk_setting, project_flag, project_text, text
from cavvy.providers.vm.abilities import make_manifest, reach_setting
from cavvy.providers.vm.keys import ApiKeySource

_DOCS = "https://cloud.ibm.com/docs/vpc?topic=vpc"

KEYS = ApiKeySource(
    provider="ibm",
    variables=("IBMCLOUD_API_KEY", "IC_API_KEY"),
    files=("~/.ibm/credentials.yaml",),
    names=("iam_api_key", "apikey"),
    made_at="https://cloud.ibm.com/iam/apikeys",
)

MANIFEST = make_manifest(
    "ibm",
    "IBM Cloud",
    machine="an instance",
    deletion=f"{_DOCS}-managing-virtual-server-instances",
    rights="an API key of a user or service ID with the platform role Editor and the service role "
    "Writer on VPC Infrastructure Services, for one resource group",
    endpoint="https://{region}.iaas.cloud.ibm.com/v1",
    endpoint_consequence="The address of the VPC API, with `{region}` for the region.",
    unsupported={
        Feature.CAPACITY: "the VPC API lists the zones of a profile, but not how many instances "
        f"are free ({_DOCS}-profiles)",
        Feature.SELF_END: "IBM stops billing an instance that the console, the CLI or the API "
        "stops, but does not document the same for an instance that shuts itself down; the server "
        "deletes such instances "
        f"({_DOCS}-suspend-billing)",
        Feature.VOLUMES: f"{_DOCS}-attaching-block-storage",
        Feature.NETWORK: "tasks cannot select a network; the setting `subnet` selects one "
        f"({_DOCS}-about-networking-for-vpc)",
        Feature.NOTICE: "IBM describes no notice before it preempts a spot instance "
        f"({_DOCS}-spot-instances-virtual-servers)",
    },
    settings=(
        KEYS.setting(),
        project_text("regions", "The regions to use, separated by commas.", "us-south").for_setup(),
        project_text(
            "resource_group",
            "The id of the resource group of instances. The default is the account's default "
            "resource group.",
        ).for_setup(),
        project_text(
            "subnet",
            "The subnet of instances: its id, or its name in each zone. The default is the only "
            "subnet of the zone.",
        ),
        project_text(
            "security_groups",
            "The ids of the security groups of instances, separated by commas. The default is the "
            "VPC's default security group; the members of this group may reach each other.",
        ),
        project_text(
            "image",
            "The image of instances: its id, or its name in each region. The default is IBM's "
            "newest Ubuntu 24.04 for instances without GPUs. IBM has no image with GPU "
            "drivers, so instances with GPUs need your own image.",
        ),
        project_text(
            "cpu_profiles",
            "The profiles without GPUs to offer, separated by commas. All profiles with GPUs are "
            "offered.",
            "bxf-2x8, bxf-4x16, bxf-8x32, bxf-16x64, bx3d-8x40, bx3d-16x80, bx3d-32x160, bx2-8x32",
        ),
        project_text(
            "bare_metal_profiles",
            "The profiles of bare metal servers to offer, separated by commas. By default, none. "
            "Do not remove a profile from this list while servers with this profile run.",
        ),
        project_flag(
            "cluster_networks",
            "If `true`, a gang of several instances gets its own cluster network, where the VPC "
            "API lists one for the profile and the zone, so that RDMA connects the GPUs of its "
            "nodes. If `false`, their RDMA network is not used, and the API key needs no right to "
            "cluster networks.",
            default=True,
        ),
        disk_setting(
            "The size of an instance's boot volume, unless the task requests another size.",
            100,
            minimum=100,
        ),
        reach_setting(),
        text(
            "iam_endpoint",
            "The address of the service that exchanges the API key for tokens.",
            "https://iam.cloud.ibm.com",
        ),
        text(
            "prices_endpoint",
            "The address of IBM's public price list, the Global Catalog.",
            "https://globalcatalog.cloud.ibm.com/api/v1",
        ),
    ),
    cloud="cavvy.providers.ibm.cloud:IbmCloud",
    layer="cavvy.providers.vm.provider:make_provider",
    zoned=True,
    # read on 2026-11-23, as was IBM's client of the API, the Python package ibm-vpc 0.36
    no_quotas="IBM's VPC API reports neither quotas nor their use; IBM lists the default "
    "quotas online and raises quotas through support cases "
    "(https://cloud.ibm.com/docs/vpc?topic=vpc-quotas)",
    options={"image": "the id or the name of an image"},
)
