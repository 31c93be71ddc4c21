"""The manifest of the Azure Batch provider."""

from datetime import timedelta

from cavvy.providers.base import Feature, Manifest
from cavvy.providers.settings import flag, text
from cavvy.providers.vm.abilities import ABILITIES

_CONTAINER = "a task is a container, and Azure Batch lets no task start further containers"

MANIFEST = Manifest(
    name="azure-batch",
    title="Azure Batch",
    docs="docs/guides/azure-batch.md",
    abilities=ABILITIES,
    visibility_delay=timedelta(minutes=1),
    rights="the role Azure Batch Data Contributor on the Batch account, or a role with the actions "
    "Microsoft.Batch/batchAccounts/pools/read, write and delete, and the data actions "
    "Microsoft.Batch/batchAccounts/jobs/read, write and delete",
    unsupported={
        Feature.BUILD: _CONTAINER,
        Feature.LOGIN: "a pool that a job makes has no managed identity, so Cavvy uses public "
        "images only (https://learn.microsoft.com/azure/batch/batch-docker-container-workloads)",
        Feature.CAPACITY: "Azure Batch does not report free capacity; a pool that does not get its "
        "machines reports an error, and Cavvy tries the next best offer",
        Feature.VOLUMES: "a pool attaches no existing disks; copy data from and to a bucket "
        "instead",
        Feature.MOUNTS: "a task is a container without access to folders of its host; Cavvy does "
        "not use the pool's mounts",
        Feature.NETWORK: "tasks cannot select a network; the setting `subnet` selects one",
        Feature.DISK: "Azure Batch selects the size and the type of a machine's disk",
        Feature.NOTICE: "Azure Batch documents no notice before it takes a spot machine back "
        "(https://learn.microsoft.com/azure/batch/batch-spot-vms)",
        Feature.RESULTS: "a job loses its machines when it ends. If the server is away when the "
        "work ends, the results go to the bucket in `checkpoint.storage` or `server.results_url`; "
        "without a bucket, the job waits until its lease ends",
    },
    options={"image": "the image, as for the setting `image`"},
    settings=(
        text(
            "account",
            "The name and the region of the Batch account, such as `train.westeurope`. Required.",
        ),
        text(
            "sizes",
            "Patterns of the sizes to offer, separated by commas, such as `Standard_N*, "
            "Standard_D4s_v3`. The default is every supported size with a price in the catalog.",
            "*",
        ),
        flag(
            "spot",
            "Set `true` if the account's pool allocation mode is user subscription: then jobs can "
            "use spot machines, at the prices of Azure's public list. Other accounts have no spot "
            "machines.",
            default=False,
        ),
        text(
            "image",
            "The public image of jobs whose task names none. Without this setting, each task must "
            "name an image.",
        ),
        text(
            "subnet",
            "The resource id of the subnet of pools. By default, Azure Batch makes a network for "
            "each pool, whose machines reach the internet.",
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
            "cannot reach Azure's. Only spot prices are read from it.",
            "https://prices.azure.com",
        ),
    ),
)
