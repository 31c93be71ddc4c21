"""Azure Machine Learning's compute instances: each session is a managed notebook, which starts the
agent when it is created.
"""

from cavvy.providers.azure.settings import RESOURCE_MANAGER, WORKSPACE
from cavvy.providers.base import Feature
from cavvy.providers.managed.manifest import NotebookManifest, list_unsupported_by_notebooks
from cavvy.providers.settings import project_number, project_text

_DOCS = "https://learn.microsoft.com/azure"
_INSTANCE = f"{_DOCS}/machine-learning/concept-compute-instance"
_API = f"{_DOCS}/templates/microsoft.machinelearningservices/workspaces/computes"

MANIFEST = NotebookManifest(
    name="azureml-notebooks",
    title="Azure ML compute instances",
    cloud="cavvy.providers.azureml.notebooks:ComputeInstances",
    rights="Microsoft.MachineLearningServices/workspaces/read, workspaces/computes/read, write "
    "and delete, and locations/vmSizes/read (the role AzureML Compute Operator contains the "
    "permissions for computes)",
    unsupported={
        **list_unsupported_by_notebooks(
            "Azure", "a compute instance", images=_INSTANCE, api=_API, deletion=_INSTANCE
        ),
        Feature.VOLUMES: "a compute instance attaches no disks, but has the workspace's own files "
        f"below ~/cloudfiles ({_INSTANCE})",
        Feature.MOUNTS: "Cavvy mounts no folders on a compute instance; the instance has the "
        f"workspace's own files below ~/cloudfiles ({_INSTANCE})",
        Feature.NETWORK: f"Azure does not report the speed of the network ({_API})",
        Feature.DISK: f"Azure selects the disk ({_INSTANCE})",
        Feature.SELF_END: "a compute instance cannot delete itself; Azure stops it after the "
        f"time in the setting `idle_stop_s` ({_API})",
    },
    project_key="cavvy.providers.azure.account",
    settings=(
        *WORKSPACE,
        project_text(
            "sizes",
            "Patterns of the sizes to offer, such as `Standard_NC*`, separated by commas. The "
            "default is every size that Azure allows for compute instances and that has a price in "
            "the catalog.",
            "*",
        ),
        project_text(
            "user_id",
            "The object id of the user who may also open the notebook in Azure's studio. The "
            "default is the account of the credentials.",
        ),
        project_text("tenant_id", "The tenant of the user in `user_id`."),
        project_text(
            "subnet",
            "The id of the subnet of compute instances. By default, Azure selects the subnet.",
        ),
        project_number(
            "idle_stop_s",
            "Azure stops a compute instance if its own Jupyter, terminals and VS Code were not "
            "used for this time. Sessions that Cavvy opens do not count as use. A "
            "notebook whose Cavvy server is lost therefore stops after this time; `--keep` ends "
            "idle sessions sooner. Azure allows 3 days at most.",
            default=259_200,
            minimum=900,
            unit="seconds",
            whole=True,
        ),
        RESOURCE_MANAGER,
    ),
)
