"""Azure Batch: each gang is one job with its own pool. The containers of the job's tasks start the
agent.
"""

from cavvy.providers.azure import KEY_FILE
from cavvy.providers.base import Feature
from cavvy.providers.managed.manifest import JobManifest, list_unsupported_by_jobs
from cavvy.providers.settings import project_flag, project_text, text

_DOCS = "https://learn.microsoft.com/azure/batch"
_CONTAINERS = f"{_DOCS}/batch-docker-container-workloads"
_POOL = "https://learn.microsoft.com/rest/api/batchservice/pool/add"

MANIFEST = JobManifest(
    name="azure-batch",
    title="Azure Batch",
    cloud="cavvy.providers.azure_batch.service:AzureBatchService",
    rights="the role Azure Batch Data Contributor on the Batch account, or a role with the actions "
    "Microsoft.Batch/batchAccounts/pools/read, write and delete, and the data actions "
    "Microsoft.Batch/batchAccounts/jobs/read, write and delete",
    unsupported={
        **list_unsupported_by_jobs("a task", page=_CONTAINERS, disk=f"{_DOCS}/nodes-and-pools"),
        Feature.LOGIN: "a pool that Azure Batch creates for a job has no managed identity, so "
        f"Cavvy uses public images only ({_CONTAINERS})",
        Feature.CAPACITY: "Azure Batch does not report free capacity; a pool that does not get "
        "its machines reports an error, and Cavvy tries the next best offer "
        f"({_DOCS}/batch-pool-node-error-checking)",
        Feature.VOLUMES: "a pool can attach new, empty disks but no existing disks; copy data from "
        f"and to a bucket instead ({_POOL})",
        Feature.MOUNTS: "a task is a container; the pool's mounts are not supported yet "
        f"({_DOCS}/virtual-file-mount)",
        Feature.NETWORK: "tasks cannot select a network; the setting `subnet` selects one "
        f"({_DOCS}/batch-virtual-network)",
        Feature.DISK: "the image and the machine size determine the disk; other disk sizes and "
        f"types are not supported yet ({_POOL})",
        Feature.NOTICE: "Azure Batch documents no notice before it reclaims a spot machine "
        f"({_DOCS}/batch-spot-vms)",
    },
    options={"image": "the container image, in the format of the setting `image`"},
    docs="docs/guides/azure-batch.md",
    project_key="cavvy.providers.azure.account",
    settings=(
        KEY_FILE,
        project_text(
            "account",
            "The name and the region of the Batch account, such as `train.westeurope`. Required.",
        ).for_setup(),
        project_text(
            "sizes",
            "Patterns of the sizes to offer, separated by commas, such as `Standard_N*, "
            "Standard_D4s_v3`. The default is every supported size with a price in the catalog.",
            "*",
        ),
        project_flag(
            "spot",
            "Set `true` if the account's pool allocation mode is user subscription. In "
            "the mode user subscription, jobs can use spot machines, at the prices in Azure's "
            "public list. In the allocation mode Batch service, jobs cannot use spot machines.",
            default=False,
        ),
        project_text(
            "image",
            "The public image of jobs whose task names no image. Without this setting, each "
            "task must "
            "name an image.",
        ),
        project_text(
            "subnet",
            "The resource id of the subnet for the machines of pools. By default, Azure Batch "
            "creates a network for each pool, and the pool's machines can reach the internet.",
        ),
        text(
            "endpoint",
            "The address of the Batch account, which differs in national clouds. `{name}` and "
            "`{region}` stand for the account's name and region.",
            "https://{name}.{region}.batch.azure.com",
        ),
        text(
            "prices_endpoint",
            "The address of Azure's public list of prices, or of a mirror, for servers that "
            "cannot reach Azure's list. Cavvy reads only spot prices from this list.",
            "https://prices.azure.com",
        ),
    ),
)
