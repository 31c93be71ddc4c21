"""The manifest of the provider for compute instances of Azure Machine Learning."""

from datetime import timedelta

from cavvy.providers.base import Feature, Manifest
from cavvy.providers.settings import number, text
from cavvy.providers.vm.abilities import ABILITIES

_IMAGE = (
    "a compute instance has Azure's own image "
    "(https://learn.microsoft.com/azure/machine-learning/concept-compute-instance)"
)

MANIFEST = Manifest(
    name="azureml-notebooks",
    title="Azure ML compute instances",
    docs="docs/guides/notebooks.md",
    abilities=ABILITIES,
    only_sessions=True,
    visibility_delay=timedelta(minutes=1),
    rights="Microsoft.MachineLearningServices/workspaces/read, workspaces/computes/read, write and "
    "delete, and locations/vmSizes/read (the role AzureML Compute Operator contains those on "
    "computes)",
    unsupported={
        Feature.SPOT: "Azure sells compute instances at the full price only",
        Feature.IMAGE: _IMAGE,
        Feature.BUILD: _IMAGE,
        Feature.LOGIN: _IMAGE,
        Feature.CAPACITY: "Azure does not report free capacity; a compute instance without "
        "capacity fails, and Cavvy tries the next best offer",
        Feature.VOLUMES: "a compute instance attaches no disks; it has the workspace's own files "
        "below ~/cloudfiles",
        Feature.MOUNTS: "Cavvy mounts no folders on a compute instance; it has the workspace's own "
        "files below ~/cloudfiles",
        Feature.NETWORK: "Azure does not report the speed of the network",
        Feature.DISK: "Azure selects the disk "
        "(https://learn.microsoft.com/azure/machine-learning/concept-compute-instance)",
        Feature.SELF_END: "a compute instance cannot delete itself; Azure stops it after the "
        "setting `idle_stop_s`",
        Feature.RESULTS: "a compute instance is deleted with its disk when the session ends. If "
        "the server is away then, the results go to the bucket in `checkpoint.storage` or "
        "`server.results_url`",
        Feature.NOTICE: "a compute instance is not taken back",
    },
    settings=(
        text(
            "subscription",
            "The id of the subscription. The default is `AZURE_SUBSCRIPTION_ID` in the "
            "environment, or else the account's only subscription.",
        ),
        text("resource_group", "The resource group of the workspace. Required."),
        text("workspace", "The name of the workspace. Required."),
        text(
            "sizes",
            "Patterns of the sizes to offer, such as `Standard_NC*`, separated by commas. The "
            "default is every size that Azure allows for compute instances and that has a price in "
            "the catalog.",
            "*",
        ),
        text(
            "user_id",
            "The object id of the user who may also open the notebook in Azure's studio. The "
            "default is the account of the server's credentials.",
        ),
        text("tenant_id", "The tenant of the user in `user_id`."),
        text("subnet", "The id of the subnet of compute instances. By default, Azure selects one."),
        number(
            "idle_stop_s",
            "Azure stops a compute instance whose own Jupyter, terminals and VS Code were not used "
            "for this time. Azure does not see sessions that Cavvy opens, so this is the limit for "
            "a notebook whose server is lost; `--keep` ends idle sessions sooner. Azure allows 3 "
            "days at most.",
            default=259_200,
            minimum=900,
            unit="seconds",
            whole=True,
        ),
        text(
            "endpoint",
            "The address of Azure Resource Manager, which differs in national clouds.",
            "https://management.azure.com",
        ),
    ),
)
