"""Notebook instances of Amazon SageMaker: each session is a managed notebook, which starts the
agent.
"""

from cavvy.providers.aws.settings import ACCOUNT, REGIONS
from cavvy.providers.base import Feature
from cavvy.providers.managed.manifest import NotebookManifest, list_unsupported_by_notebooks
from cavvy.providers.sagemaker import INSTANCES
from cavvy.providers.settings import project_number, project_text

_DOCS = "https://docs.aws.amazon.com/sagemaker/latest"
_API = f"{_DOCS}/APIReference/API_CreateNotebookInstance.html"

MANIFEST = NotebookManifest(
    name="sagemaker-notebooks",
    title="Amazon SageMaker notebook instances",
    cloud="cavvy.providers.sagemaker.notebooks:NotebookInstances",
    rights="sagemaker:CreateNotebookInstance, DescribeNotebookInstance, ListNotebookInstances, "
    "StopNotebookInstance, DeleteNotebookInstance, CreateNotebookInstanceLifecycleConfig, "
    "ListNotebookInstanceLifecycleConfigs, "
    "DeleteNotebookInstanceLifecycleConfig and AddTags, pricing:GetProducts, and iam:PassRole for "
    "the role of the setting `role`",
    unsupported={
        **list_unsupported_by_notebooks(
            "SageMaker",
            "a notebook instance",
            images=f"{_DOCS}/dg/nbi.html",
            api=_API,
            deletion=f"{_DOCS}/dg/API_DeleteNotebookInstance.html",
        ),
        Feature.VOLUMES: "a notebook instance attaches no other disks; copy data from and to a "
        f"bucket instead ({_API})",
        Feature.MOUNTS: "Cavvy mounts no folders on a notebook instance; copy data from and to a "
        f"bucket instead ({_API})",
        Feature.NETWORK: f"SageMaker neither reports nor selects the speed of the network ({_API})",
        Feature.DISK: "SageMaker selects the type of the disk; `resources.disk` selects its size "
        f"({_API})",
        Feature.SELF_END: "a notebook instance can stop itself only if the role in `role` permits "
        "sagemaker:StopNotebookInstance, which Cavvy does not check; the disk of a stopped "
        "notebook instance is billed until Cavvy deletes the instance "
        f"({_DOCS}/APIReference/API_StopNotebookInstance.html)",
    },
    settings=(
        REGIONS,
        *ACCOUNT,
        project_text(
            "role",
            "The ARN of the execution role of notebooks. The work in a session runs with the "
            "role's permissions. With the right sagemaker:StopNotebookInstance, a notebook whose "
            "agent has ended stops itself, even if the server is lost. Required.",
        ),
        INSTANCES,
        project_text(
            "platform",
            "The platform of notebooks, such as `notebook-al2023-v1`. By default, AWS selects the "
            "platform.",
        ),
        project_text(
            "subnet",
            "The subnet of notebooks, for connections to your network. By default, notebooks run "
            "in SageMaker's own network.",
        ),
        project_text("security_groups", "The security groups of notebooks, if `subnet` is set."),
        project_number(
            "disk_gib",
            "The size of a notebook's disk, which contains the session's files, unless the task "
            "requests another size. AWS bills the disk in addition to the instance.",
            default=50,
            minimum=5,
            unit="GiB",
            whole=True,
        ),
    ),
)
