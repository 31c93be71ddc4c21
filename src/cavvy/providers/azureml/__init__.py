"""Azure Machine Learning: each gang is one command job, whose containers start the agent."""

from datetime import timedelta

from cavvy.providers.azure import NOTICES, PRICES, RESOURCE_MANAGER, WORKSPACE
from cavvy.providers.base import Feature
from cavvy.providers.managed.manifest import JobManifest, list_unsupported_by_jobs
from cavvy.providers.settings import project_number, project_text, text

_DOCS = "https://learn.microsoft.com/azure/machine-learning"
_JOB = f"{_DOCS}/reference-yaml-job-command"
_CLUSTER = f"{_DOCS}/reference-yaml-compute-aml"

MANIFEST = JobManifest(
    name="azureml",
    title="Azure Machine Learning",
    cloud="cavvy.providers.azureml.jobs:AzureMlService",
    notices=NOTICES,
    notice=timedelta(seconds=30),
    rights="Microsoft.MachineLearningServices/workspaces/read, jobs/read, write and "
    "cancel/action, computes/read, environments/versions/read and write, and "
    "experiments/runs/read (the role AzureML Data Scientist contains these actions); with the "
    "setting `sizes` also computes/write and delete, and locations/vmSizes/read (the role AzureML "
    "Compute Operator)",
    unsupported={
        **list_unsupported_by_jobs("a command job", page=_JOB, disk=_JOB),
        Feature.LOGIN: "Azure Machine Learning pulls images with the rights of the workspace and "
        f"the cluster ({_DOCS}/how-to-use-private-python-packages)",
        Feature.CAPACITY: "Azure does not report free capacity, only the sizes of machines; a job "
        "waits until its cluster has nodes "
        "(https://learn.microsoft.com/rest/api/azureml/virtual-machine-sizes/list)",
        Feature.VOLUMES: "a command job attaches no disks; copy data from and to a bucket, or "
        f"mount data assets with the option `data` ({_JOB})",
        Feature.MOUNTS: "a command job is a container without access to folders of its host or to "
        f"NFS; mount data assets with the option `data` ({_JOB})",
        Feature.NETWORK: f"the cluster selects the network ({_CLUSTER})",
        Feature.DISK: f"the size of the cluster's machines determines the disk ({_CLUSTER})",
    },
    options={
        "image": "the container image, in the format of the setting `image`",
        "data": "data assets of the workspace that the job mounts read-only, such as "
        "`digits=azureml:digits:1`, separated by commas; the environment variable "
        "`AZUREML_DATA_digits` contains the path of `digits`",
    },
    docs="docs/guides/azureml.md",
    project_key="cavvy.providers.azure.account",
    settings=(
        *WORKSPACE,
        project_text(
            "clusters",
            "The names of the compute clusters to use, or patterns such as `gpu-*`, separated by "
            "commas. The default is every cluster of the workspace.",
            "*",
        ),
        project_text(
            "sizes",
            "Patterns of the sizes for which Cavvy creates compute clusters, such as "
            "`Standard_NC*`, separated by commas. The default is none. A cluster has one size, "
            "dedicated or with low priority, and at most 100 nodes. It is created for the first "
            "job, its nodes end two minutes after a job, and it is removed after an hour without "
            "jobs.",
        ),
        project_text(
            "image",
            "The image of jobs whose task names no image. Without this setting, each task must "
            "name "
            "an image.",
        ),
        project_text(
            "experiment", "The experiment under which Azure's studio shows the jobs.", "cavvy"
        ),
        project_number(
            "max_run_s",
            "Azure stops a job after this time if the task has no time limit.",
            default=604_800,
            minimum=60,
            unit="seconds",
            whole=True,
        ),
        RESOURCE_MANAGER,
        text(
            "history_endpoint",
            "The address of the service that stores when jobs started and why they ended. "
            "`{region}` stands for the workspace's region.",
            "https://{region}.api.azureml.ms",
        ),
        PRICES,
    ),
)
