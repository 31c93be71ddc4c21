"""Azure: each node is one virtual machine that starts the agent on boot."""

from datetime import timedelta

from cavvy.providers.abilities import HAS_PARTS, TELLS_QUOTAS
from cavvy.providers.base import Feature, Manifest, ProviderSetting, SettingKind, explain_results
from cavvy.providers.notices import NoticeNode, NoticeReply, NoticeSource
from cavvy.providers.settings import disk_setting, project_flag, project_text, text
from cavvy.providers.vm.abilities import ABILITIES

# the settings that several providers on Azure share
KEY_FILE = ProviderSetting(
    name="key_file",
    kind=SettingKind.KEY_FILE,
    consequence="The JSON file of a service principal with a secret, as `az ad sp create-for-rbac` "
    "prints it. By default, azure-identity searches for credentials in its usual order: "
    "environment variables, the machine's managed identity, and the login of `az`.",
).for_projects()
SUBSCRIPTION = project_text(
    "subscription",
    "The id of the subscription. The default is `AZURE_SUBSCRIPTION_ID` in the environment, or "
    "else the account's only subscription.",
).for_setup()
RESOURCE_MANAGER = text(
    "endpoint",
    "The address of Azure Resource Manager, which differs in national clouds.",
    "https://management.azure.com",
)
PRICES = text(
    "prices_endpoint",
    "The address of Azure's public list of prices, or of a mirror, for servers that "
    "cannot reach Azure's list.",
    "https://prices.azure.com",
)
# where a provider on Azure Machine Learning runs
WORKSPACE = (
    KEY_FILE,
    SUBSCRIPTION,
    project_text("resource_group", "The resource group of the workspace. Required.").for_setup(),
    project_text("workspace", "The name of the workspace. Required.").for_setup(),
)

_METADATA = "http://169.254.169.254/metadata"
_EVENTS = f"{_METADATA}/scheduledevents?api-version=2020-07-01"
_NODES_PAGE = "https://learn.microsoft.com/azure/virtual-machines"
# Azure documents a notice of at least 30 seconds, and allows at most one poll a second:
# https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
NOTICES = (
    NoticeSource(
        source="Azure",
        url=_EVENTS,
        headers={"Metadata": "true"},
        list_field="Events",
        match={"EventType": ("Preempt", "Terminate")},
        node=NoticeNode(
            url=f"{_METADATA}/instance/compute/name?api-version=2021-02-01&format=text",
            field_name="Resources",
        ),
        time_field="NotBefore",
        within=timedelta(seconds=30),
        reply=NoticeReply(
            url=_EVENTS, body='{"StartRequests": [{"EventId": "{id}"}]}', id_field="EventId"
        ),
    ),
)

MANIFEST = Manifest(
    name="azure",
    title="Azure",
    cloud="cavvy.providers.azure.cloud:AzureCloud",
    layer="cavvy.providers.vm.provider:make_provider",
    rights="a role with the actions in docs/guides/azure.md; three of the actions must be "
    "allowed on the subscription",
    abilities=(*ABILITIES, HAS_PARTS, TELLS_QUOTAS),
    prices="cavvy.providers.azure.price_list",
    visibility_delay=timedelta(minutes=1),
    notices=NOTICES,
    notice=timedelta(seconds=30),
    unsupported={
        Feature.CAPACITY: "Azure reports which sizes a subscription may use, but not how many "
        f"machines are free ({_NODES_PAGE}/linux/error-codes-spot)",
        Feature.SELF_END: "Azure bills a machine until it is deallocated or deleted, even after "
        f"it has shut itself down ({_NODES_PAGE}/states-billing); the server deletes such machines",
        Feature.VOLUMES: "managed disks cannot be attached yet; copy data from and to a bucket "
        "instead "
        f"({_NODES_PAGE}/managed-disks-overview)",
        Feature.NETWORK: "tasks cannot select a network; the setting `subnets` selects one for "
        "each region (https://learn.microsoft.com/azure/virtual-network/virtual-networks-overview)",
        Feature.RESULTS: explain_results(
            f"a machine's disk is deleted when the machine ends ({_NODES_PAGE}/delete)",
            "the machine",
        ),
    },
    options={"image": "the machine image: publisher:offer:sku:version, or a resource id"},
    docs="docs/guides/azure.md",
    project_key="cavvy.providers.azure.account",
    settings=(
        KEY_FILE,
        SUBSCRIPTION,
        project_text(
            "resource_group",
            "The resource group of all resources that Cavvy creates. The group must exist.",
            "cavvy",
        ).for_setup(),
        project_text(
            "regions",
            "The regions to use, separated by commas, such as `eastus, westeurope`. The default is "
            "the region of the resource group.",
        ).for_setup(),
        project_text(
            "sizes",
            "Patterns of the sizes to offer, separated by commas, such as `Standard_ND*, "
            "Standard_D8s_v5`. The default is every size with accelerators, and the sizes of the "
            "families Dsv5, Esv5 and Fsv2.",
        ),
        project_text(
            "image",
            "The machine image: publisher:offer:sku:version, or a resource id. The default is "
            "Azure's Ubuntu image for HPC, which has the drivers of NVIDIA and AMD GPUs. For "
            "sizes without accelerators, the default is Ubuntu 24.04.",
        ),
        disk_setting(
            "The size of a node's system disk, unless the task requests another size.",
            128,
            minimum=64,
        ),
        project_text(
            "disk_type",
            "The type of the system disk, unless the task names a type.",
            "StandardSSD_LRS",
        ),
        project_text(
            "subnets",
            "The subnet of nodes in each region: `eastus=RESOURCE-ID, westus3=RESOURCE-ID`. In "
            "other regions, Cavvy creates the network `cavvy-REGION`, whose nodes accept "
            "connections only from each other.",
        ),
        project_flag(
            "public_ip",
            "If `true`, each node has a public address, through which it connects to the server. "
            "If `false`, the subnet needs another route to the server, such as a NAT gateway.",
            default=True,
        ),
        project_text(
            "ssh_key",
            "The public key for SSH to nodes as the user `cavvy`. By default, nodes accept no SSH "
            "logins.",
        ),
        project_text(
            "identity",
            "The resource id of the user-assigned managed identity with which work on nodes uses "
            "Azure without keys. By default, nodes have no identity.",
        ),
        RESOURCE_MANAGER,
        PRICES,
    ),
)
